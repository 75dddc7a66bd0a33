"""How hardness manipulation works, on a circle: python docs/pictures/hardness.py draws hardness.png.

The "images" are three points of the plane, the "model" puts each on the circle. The search is the package's own.
"""

import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from style import BLUE, GREEN, GREY, HERE, ORANGE, RED, begin, save
from torch import Tensor
from torch.nn.functional import normalize

import anchorhold as ah

NAMES = {"anchor": BLUE, "positive": GREEN, "negative": RED}
DEGREES = (80.0, 55.0, 215.0)
STEPS, ALPHA, GOAL = 18, 0.04, -0.1


def hardness(e: Tensor) -> Tensor:
    """d(a, p) - d(a, n) of (U, 3, 2): below 0 the positive is nearer."""
    return (e[:, 0] - e[:, 1]).norm(dim=1) - (e[:, 0] - e[:, 2]).norm(dim=1)


def search(goal: float) -> Tensor:
    """(steps + 1, 3, 2): the triplet on the circle at each step towards a hardness."""
    clean = torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in DEGREES])[None]
    path: list[Tensor] = []
    objective = ah.Objective(lambda e, at: -((goal - hardness(e)).clamp(min=0) ** 2), top=0.0)
    problem = ah.Problem(
        lambda x: normalize(x, dim=-1), objective, ah.Ball(1.0, low=-3, high=3), ah.Budget(STEPS, ALPHA)
    )
    found = ah.ascend(problem, clean, watch=lambda step, images, at: path.append(images[0].clone()))
    moved = [] if len(path) < STEPS else [found.images[0]]  # a finished triplet was seen at its last step already
    return normalize(torch.stack([*path, *moved]), dim=-1)


def circle(axis: plt.Axes, path: Tensor, title: str) -> None:
    axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="#d1d5db", linewidth=1.2))
    for place, (name, colour) in enumerate(NAMES.items()):
        points = path[:, place]
        axis.plot(*points.T, color=colour, linewidth=4, alpha=0.35, solid_capstyle="round")
        axis.scatter(*points[0], s=55, facecolor="white", edgecolor=colour, linewidth=1.8, zorder=3)
        axis.scatter(*points[-1], s=60, color=colour, zorder=4)
        x, y = (1.12 * points[-1]).tolist()
        side = "center" if abs(x) < 0.5 else "left" if x > 0 else "right"
        axis.text(x, y, name, color=colour, ha=side, va="center" if abs(x) > 0.5 else "bottom", fontsize=9)
    end = path[-1]
    axis.plot(*end[[0, 1]].T, color=GREEN, linewidth=1.2, linestyle="--")
    axis.plot(*end[[0, 2]].T, color=RED, linewidth=1.2, linestyle="--")
    axis.set(title=title, aspect="equal", xlim=(-1.75, 1.75), ylim=(-1.1, 1.3))
    axis.axis("off")


def main(folder: Path = HERE) -> Path:
    begin()
    to_goal, to_end = search(GOAL), search(3.0)
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.3), width_ratios=[1, 1, 1.15])
    circle(axes[0], to_goal[:1], "A triplet")
    circle(axes[1], to_goal, "Moved until it is hard enough")
    right = axes[2]
    for path, colour, label in ((to_end, ORANGE, "as hard as possible"), (to_goal, BLUE, "hardness manipulation")):
        values = hardness(path)
        right.plot(range(len(values)), values, color=colour, linewidth=2.2, marker="o", markersize=4, label=label)
    right.axhline(GOAL, color=GREY, linewidth=1.2, linestyle="--")
    right.text(STEPS, GOAL - 0.05, "the goal", color=GREY, ha="right", va="top", fontsize=9)
    stopped = len(to_goal) - 1
    note = {"arrowprops": {"arrowstyle": "-", "color": BLUE}, "color": BLUE, "fontsize": 9}
    right.annotate("stops here", (stopped, float(hardness(to_goal)[-1])), (stopped + 1, -0.9), **note)
    right.set(title="Hardness at each step", xlabel="step of the attack", ylabel="d(a, p) − d(a, n)")
    right.legend(frameon=False, fontsize=9, loc="upper left")
    right.set_ylim(None, 2.4)
    figure.tight_layout(w_pad=1.5)
    return save(figure, "hardness", folder)


if __name__ == "__main__":
    print(main())
