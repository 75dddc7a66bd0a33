"""What the scores mean: python docs/pictures/scores.py draws scores.png from two audits in results/cub."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREY, HERE, ORANGE, begin, save

RESULTS = HERE.parents[1] / "results" / "cub"
MODELS = {"natural": ("trained without attacks", ORANGE), "hm-lga": ("trained with HM[S, LGA]", BLUE)}
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


def main(folder: Path = HERE) -> Path:
    begin()
    audits = {name: json.loads((RESULTS / name / "audit.json").read_text(encoding="utf-8")) for name in MODELS}
    scores = {name: audit["protocols"]["published"]["ers"] for name, audit in audits.items()}
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
    return save(figure, "scores", folder)


if __name__ == "__main__":
    print(main())
