"""The attacker who sees only the returned list: ids in order, no distances, no vectors, a budget of queries.

The moves are Square's. What a move is worth is read from the list alone:

    recall    the rank-weighted share of right ids in it falls, then that of the ids of the clean list
    overlap   the rank-weighted share of the ids of the clean list falls, as in QAIR's relevance loss (Li et al., CVPR
              2021): the attacker does not know which ids are right
    order     the first ids of the clean list come in the reverse order, by short-range rank correlation as in the order
              attack (Zhou et al., ICCV 2021): +1 for a pair in the wanted order, −1 for any other or a missing id

Most moves change nothing in a short list, so a move is kept unless it makes the list worse. The weight of place j, from
0, is 1 / log2(j + 2). The query's own image is left out of a list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import check
from ..interface import argument
from ..perturb.ball import Ball
from ..perturb.square import proposals
from ..random import Key

__all__ = ["ListGoal", "Lists", "Search", "Spent", "attack_lists", "order_value", "weighted_share"]

Search = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) to gallery ids (B, k), the nearest first."""

ListGoal = Literal["recall", "overlap", "order"]
GOALS: tuple[str, ...] = get_args(ListGoal)
ORDERED = 5  # ids whose order is to be reversed
SECOND = 0.1  # weight of the clean list beside that of right ids: it decides where those stay the same


@dataclass(frozen=True, eq=False)
class Lists:
    """What is known of the samples: their labels, those of the gallery, and each query's own gallery id or -1."""

    labels: Tensor  # (N,)
    gallery_labels: Tensor  # (G,)
    own: Tensor  # (N,)

    def without_own(self, found: Tensor, rows: Tensor) -> Tensor:
        """The lists (n, k) without each query's own image; -1 fills the place at the end."""
        itself = found == self.own[rows, None]
        kept = itself.long().sort(dim=1, stable=True).indices
        return found.masked_fill(itself, -1).gather(1, kept)

    def right(self, found: Tensor, rows: Tensor) -> Tensor:
        """(n, k) which places hold an item with the query's label."""
        return (self.gallery_labels[found.clamp(min=0)] == self.labels[rows, None]) & (found >= 0)


@dataclass(frozen=True, eq=False)
class Spent:
    """The result: the images, the calls that each took, and how many answers were right after each call."""

    images: Tensor  # (N, C, H, W)
    right: Tensor  # (N,) whether the first id of the last kept list is right
    queries: Tensor  # (N,) images sent
    after: Tensor  # (queries,) number of right answers after 1, 2, … queries for each sample


def weighted_share(held: Tensor) -> Tensor:
    """(N,) the rank-weighted share of places (N, k) that hold what is asked for.

    >>> weighted_share(torch.tensor([[True, True], [True, False]]))
    tensor([1.0000, 0.6131], dtype=torch.float64)
    """
    weights = 1 / torch.log2(torch.arange(held.shape[1], device=held.device).double() + 2)
    return (held.double() * weights).sum(1) / weights.sum()


def order_value(found: Tensor, wanted: Tensor) -> Tensor:
    """(N,) the short-range rank correlation of lists (N, k) with the wanted order (N, m) of some ids, in [−1, 1].

    −1 among the wanted ids is no id: its pairs do not count.

    >>> order_value(torch.tensor([[3, 7, 9]]), torch.tensor([[7, 3, 5]]))
    tensor([-1.], dtype=torch.float64)
    """
    same = found.unsqueeze(1) == wanted.unsqueeze(2)  # (N, m, k)
    place = torch.where(same.any(2), same.long().argmax(2), -1)
    first, second = torch.triu_indices(wanted.shape[1], wanted.shape[1], 1, device=wanted.device)
    ahead = (place[:, first] >= 0) & (place[:, second] >= 0) & (place[:, first] < place[:, second])
    pairs = (wanted[:, first] >= 0) & (wanted[:, second] >= 0)
    return 2 * (ahead & pairs).double().sum(1) / pairs.sum(1).clamp(min=1) - 1


@torch.no_grad()
def attack_lists(
    search: Search, images: Tensor, lists: Lists, ball: Ball, queries: int, goal: ListGoal, key: Key, ids: Tensor
) -> Spent:
    """Attack images (N, C, H, W) with at most `queries` calls of `search` for each, the clean image included.

    For `recall` a sample whose first id is wrong takes no more queries. Moves are functions of `key` and `ids` (N,).
    """
    check(queries >= 1, f"{argument('queries')} must be at least 1, got {queries}")
    check(goal in GOALS, f"{argument('goal')} cannot be {goal!r}; there are: {', '.join(GOALS)}")
    check(images.ndim == 4, f"images have shape {tuple(images.shape)}; give (N, C, H, W)")
    ball.admit(images)
    everyone = torch.arange(len(images), device=images.device)
    clean_list = lists.without_own(search(images), everyone)
    wanted = clean_list[:, :ORDERED].flip(1)
    least = int((wanted >= 0).sum(1).min()) if len(wanted) else 2  # the query's own image does not count
    check(goal != "order" or least >= 2, f"the goal order needs lists of at least 2 ids: raise {argument('k')}")

    def value(found: Tensor, rows: Tensor) -> Tensor:
        if goal == "order":
            return order_value(found, wanted[rows])
        known = (found.unsqueeze(2) == clean_list[rows].unsqueeze(1)).any(2) & (found >= 0)
        if goal == "overlap":
            return -weighted_share(known)
        return -weighted_share(lists.right(found, rows)) - SECOND * weighted_share(known)

    best, level = images.clone(), value(clean_list, everyone)
    right = lists.right(clean_list, everyone)[:, 0]
    spent = torch.ones(len(images), dtype=torch.long, device=images.device)
    after = [int(right.sum())]
    propose = proposals(ball, images, ids.to(images.device), key, queries - 1)
    for query in range(queries - 1):
        active = torch.nonzero(right).squeeze(1) if goal == "recall" else everyone
        if not len(active):
            after += [after[-1]] * (queries - len(after))
            break
        tried = propose(query, active, best[active])
        found = lists.without_own(search(tried), active)
        spent[active] += 1
        first, now = lists.right(found, active)[:, 0], value(found, active)
        taken = now >= level[active]
        if goal == "recall":  # a wrong first id is the goal, whatever follows it
            taken |= ~first
        rows = active[taken]
        best[rows], level[rows], right[rows] = tried[taken], now[taken], first[taken]
        after.append(int(right.sum()))
    return Spent(best, right, spent, torch.tensor(after))
