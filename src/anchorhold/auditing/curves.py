"""R@1 against ε under the strong attack: what an audit says first.

An answer that the attack does not turn at an ε counts as right at every smaller one, and one that a smaller ε turned
as wrong at every larger one. So the curve can only fall.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..random import Key
from ..scores import interval, resampled_means
from .ensemble import Task
from .members import Member

__all__ = ["WORST", "curve_of", "worst_classes"]

FEW = 5  # queries of a class, on average, below which its R@1 says little
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
    spans = [interval(100 * each) for each in drawn.values()]
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

    It is the mean of the lowest class means. Classes are ranked anew at each ε.

    >>> worst_classes(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([3, 3, 7, 7]))
    (50.0, 1)
    """
    names, places = labels.cpu().unique(return_inverse=True)
    known = ~kept.isnan()
    totals = torch.zeros(len(names), dtype=torch.float64).index_add_(0, places[known], kept[known].double())
    counts = torch.zeros(len(names), dtype=torch.float64).index_add_(
        0, places[known], torch.ones_like(kept[known]).double()
    )
    means = (totals / counts)[counts > 0].sort().values
    few = max(1, round(WORST * len(means)))
    return 100 * float(means[:few].mean()), few
