"""What the scores mean: python docs/pictures/scores.py draws scores.png from two audits in results/cub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from style import BLUE, GREY, HERE, ORANGE, begin, save

RESULTS = HERE.parents[1] / "results" / "cub"
MODELS = {"natural-112": ("trained without attacks", ORANGE), "hm-lga-112": ("trained with HM[S, LGA]", BLUE)}
TITLE = "Birds (CUB-200-2011), ε = 8/255, the papers' protocol"
MEANING = {
    "CA+": "an image is moved up your list",
    "CA-": "an image is moved down your list",
    "QA+": "a query is changed so that a chosen image moves up",
    "QA-": "a query is changed so that a chosen image moves down",
    "TMA": "a query is made similar to any chosen image",
    "ES:D": "a query is moved as far as possible",
    "ES:R": "… and its nearest image is still right",
    "LTM": "right images pushed away, wrong ones pulled near",
    "GTM": "the nearest wrong image comes first",
    "GTT": "the nearest image drops out of the top 4",
}


def scores_of(results: Path) -> dict[str, dict[str, Any]]:
    """ERS of both models with its terms, from their audits."""
    audits = {name: json.loads((results / name / "audit.json").read_text(encoding="utf-8")) for name in MODELS}
    return {name: audit["protocols"]["published"]["ers"] for name, audit in audits.items()}


def numbers(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """The numbers of the picture as text. The PNG stores it, so that a test detects an old picture."""
    lines = ([f"{column} {s['terms'][column]:.1f}" for column in MEANING] for s in scores.values())
    return "; ".join(f"{name} ERS {scores[name]['value']:.1f}: {', '.join(line)}" for name, line in zip(scores, lines))


def main(folder: Path = HERE) -> Path:
    begin()
    scores = scores_of(RESULTS)
    figure, axis = plt.subplots(figsize=(9.2, 4.6))
    lines = [*MEANING, "ERS"]
    for y, column in enumerate(lines):
        height = y + 0.45 * (column == "ERS")
        values = {name: s["value"] if column == "ERS" else s["terms"][column] for name, s in scores.items()}
        axis.plot([0, 100], [height] * 2, color="#e5e7eb", linewidth=5, solid_capstyle="round", zorder=1)
        axis.plot(list(values.values()), [height] * 2, color="#9ca3af", linewidth=1.5, zorder=2)
        for name, value in values.items():
            axis.scatter(value, height, s=95 if column == "ERS" else 50, color=MODELS[name][1], zorder=3, clip_on=False)
            if column == "ERS":
                told = {"color": MODELS[name][1], "ha": "center", "va": "top", "fontweight": "bold"}
                axis.text(value, height + 0.42, f"{value:.1f}", **told)
        words = "the mean of all ten" if column == "ERS" else MEANING[column]
        axis.text(-14, height, words, ha="right", va="center", fontsize=9.5)
        axis.text(-3, height, column, ha="right", va="center", fontsize=9.5, fontweight="bold", color=GREY)
    for label, colour in MODELS.values():
        axis.scatter([], [], s=50, color=colour, label=label)
    axis.set(xlim=(0, 102), ylim=(len(lines) + 0.3, -0.7), yticks=[], xticks=[0, 50, 100])
    axis.set_xticklabels(["0\nthe attack wins", "50", "100\nthe attack fails"])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.0, -0.0), ncols=2, fontsize=9.5)
    figure.suptitle(TITLE, y=1.03)
    return save(figure, "scores", folder, numbers(scores))


if __name__ == "__main__":
    print(main())
