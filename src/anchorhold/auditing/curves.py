"""R@1 against ε under the strong attack: what an audit says first.

An answer that the attack does not turn at an ε counts as right at every smaller one, and one that a smaller ε turned
as wrong at every larger one. So the curve can only fall.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..random import Key
from ..scores import interval, resampled_means, with_width
from .ensemble import Task
from .members import Member

__all__ = ["WORST", "curve_of", "worst_classes"]

FEW = 10  # queries of a class, on average, below which its halves say little
WORST = 0.1  # share of the classes whose R@1 is shown beside the mean: a defence may protect some classes only


def curve_of(
    task: Task,
    members: Sequence[Member],
    kept: Tensor,
    ladder: Sequence[float],
    labels: Tensor,
    *,
    key: Key,
    resamples: int,
) -> dict[str, Any]:
    """The field `curve` of audit.json; `kept` (levels, queries) is 1 where the answer is right, clean first."""
    drawn = resampled_means({str(at): row for at, row in enumerate(kept)}, key("bootstrap"), resamples)
    spans = [with_width(interval(100 * each), 100 * row) for each, row in zip(drawn.values(), kept)]
    worst = [worst_classes(row, labels) for row in kept]
    names = [goal.name for goal in task.first] + [member.name for member in members if member.wants(task.goal)]
    about = (
        f"R@1 of the same {kept.shape[1]:,} queries at every ε, clean at ε = 0. "
        f"For each query the worst result counts, of {', '.join(names)}."
    )
    classes = len(labels.unique())
    spread = {"worst": [value for value, _ in worst], "counted": worst[0][1], "of": classes}
    return {
        "about": about,
        "protocol": "strong",
        "queries": kept.shape[1],
        "attacks": {"R@1": names},
        "eps": [0.0, *ladder],
        "lines": {"R@1": [100 * float(row.nanmean()) for row in kept]},
        "intervals": {"R@1": [[span.low, span.high] for span in spans]},
        **({"classes": spread} if kept.shape[1] >= FEW * classes else {}),
    }


def worst_classes(kept: Tensor, labels: Tensor) -> tuple[float, int]:
    """R@1 in percent over the worst tenth of the classes, at least one, and how many classes these are.

    They are chosen on one half of each class's queries and measured on the other, both ways. Chosen and measured on the
    same queries, the unluckiest classes would look bad where all classes are alike. Classes are chosen anew at each ε.
    The value is at most R@1 of all classes: above it, the halves do not agree which classes are worst.

    >>> worst_classes(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([3, 3, 7, 7, 7, 7]))
    (25.0, 1)
    """
    known = ~kept.isnan()
    names, places = labels.cpu()[known.cpu()].unique(return_inverse=True)
    order = places.argsort(stable=True)
    firsts = torch.searchsorted(places[order], torch.arange(len(names)))
    half = torch.empty_like(places)
    half[order] = (torch.arange(len(places)) - firsts[places[order]]) % 2  # every second query of a class
    totals, counts = torch.zeros(2, 2, len(names), dtype=torch.float64).unbind(0)
    totals.index_put_((half, places), kept[known].double().cpu(), accumulate=True)
    counts.index_put_((half, places), torch.ones(len(places), dtype=torch.float64), accumulate=True)
    both = (counts > 0).all(0)
    if not both.any():
        return float("nan"), 0
    means = totals[:, both] / counts[:, both]
    few = max(1, int(WORST * int(both.sum()) + 0.5))
    found = [means[1 - one][means[one].argsort(stable=True)[:few]].mean() for one in (0, 1)]
    return min(50 * float(found[0] + found[1]), 100 * float(kept[known].double().mean())), few
