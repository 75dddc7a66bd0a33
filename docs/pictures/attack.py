"""What an attack does to a list: python docs/pictures/attack.py draws attack.png, in half a minute on a CPU.

A small model is trained on the digits 0 to 4. The query is a 5 to 9, before and after the attack.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from style import GREEN, GREY, HERE, RED, begin, save
from torch import Tensor, nn

import anchorhold as ah

EPS = 0.1


def nearest(e: Tensor, gallery: Tensor, own: int) -> Tensor:
    """The ten nearest items, without the query's own image."""
    distances = (gallery - e).norm(dim=1)
    distances[own] = float("inf")
    return distances.argsort()[:10]


def attacked(model: nn.Module, image: Tensor, gallery: Tensor, same: Tensor) -> Tensor:
    """The query, moved away from the images of its class and towards others."""

    def value(e: Tensor, at: Tensor) -> Tensor:
        right, wrong = ((e[:, 0, None] - gallery[mask]).norm(dim=2) for mask in (same, ~same))
        return right.topk(20, largest=False).values.mean(1) - wrong.topk(10, largest=False).values.mean(1)

    budget = ah.Budget(steps=40, alpha=EPS / 8, schedule="linear")
    return ah.ascend(ah.Problem(model, ah.Objective(value), ah.Ball(EPS), budget), image[None, None]).images[0, 0]


def picture(axis: plt.Axes, image: Tensor, title: str, colour: str, width: float = 2.5) -> None:
    axis.imshow(image.squeeze(), cmap="gray_r", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=9, fontweight="normal", color=colour, pad=3)
    for spine in axis.spines.values():
        spine.set(visible=True, color=colour, linewidth=width)


def main(folder: Path = HERE, epochs: int = 8) -> Path:
    begin()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        run = ah.fit(None, "digits", "natural", f"{place}/run", overrides={"train.epochs": epochs}, device="cpu")
        model = ah.load(run.path)
    test = ah.dataset("digits").test
    assert test.images is not None
    images = test.images.permute(0, 3, 1, 2).float().div(255 if test.images.dtype == torch.uint8 else 1)
    labels = torch.tensor([int(test.classes[label]) for label in test.labels])
    with torch.no_grad():
        gallery = model(images)
    # The first query whose list was right from end to end, and has no right image left.
    for own in range(len(images)):
        same = labels == labels[own]
        before = nearest(gallery[own], gallery, own)
        if bool(same[before].all()):
            moved = attacked(model, images[own], gallery, same)
            with torch.no_grad():
                after = nearest(model(moved[None])[0], gallery, own)
            if not bool(same[after].any()):
                break
    else:
        raise SystemExit("no such query: raise EPS")
    figure, axes = plt.subplots(2, 12, figsize=(10, 2.5), width_ratios=[1.25, 0.35, *[1] * 10])
    for line, image, found, name in zip(axes, (images[own], moved), (before, after), ("query", "attacked")):
        picture(line[0], image, name, GREY)
        line[1].axis("off")
        line[1].text(0.5, 0.5, "→", ha="center", va="center", fontsize=15, color=GREY, transform=line[1].transAxes)
        for axis, item in zip(line[2:], found):
            label = int(labels[item])
            picture(axis, images[item], str(label), GREEN if label == labels[own] else RED)
    title = f"The ten nearest images of a {int(labels[own])}: before, and with each pixel changed by at most {EPS:g}"
    figure.suptitle(title, y=1.04, fontsize=11)
    return save(figure, "attack", folder)


if __name__ == "__main__":
    print(main())
