"""Draw R@1 against ε for every audit with such a curve: `python docs/pictures/curves.py`.

Files: results/strong/*.json, every audit.json under results/, and the demo's two models. One picture for each data set:
curve-DATA.png here. The demo's picture, curve-demo.png, is that of the README.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COLOURS = ("#1b5e8c", "#c8553d", "#3a7d44", "#8c6bb1", "#b8860b", "#555555", "#d16ba5", "#2a9d8f")


@dataclass(frozen=True)
class Curve:
    """R@1 in % of one model at each ε, with 95 % intervals where they are known."""

    name: str
    data: str
    eps: tuple[float, ...]
    recall: tuple[float, ...]
    spans: tuple[tuple[float, float], ...] = ()


def set_of(name: str) -> str:
    """The data set of a split; held-out training classes are a set of their own.

    >>> set_of("cub/test"), set_of("cub/train, last 20 classes")
    ('cub', 'cub-held-out')
    """
    data, part = name.split("/", 1)
    return f"{data}-held-out" if "last" in part else data


def curves(results: Path) -> Iterator[Curve]:
    """The curves of all audits under `results`."""
    strong = sorted((results / "strong").glob("*.json"))
    for path in (*strong, *sorted(results.rglob("audit.json"))):
        audit = json.loads(path.read_text(encoding="utf-8"))
        curve = audit.get("curve") or {}
        if "R@1" not in curve.get("lines", {}):
            continue
        name = path.stem if path in strong else path.relative_to(results).parent.as_posix()
        spans = curve.get("intervals", {}).get("R@1") or ()
        yield Curve(
            name.removesuffix("/strong"),
            set_of(audit["data"]["query"]["name"]),
            tuple(curve["eps"]),
            tuple(curve["lines"]["R@1"]),
            tuple((low, high) for low, high in spans),
        )


def demo(results: Path) -> Iterator[Curve]:
    """The two models of the demo with seed 0; its last ε, at which nothing is left, is not drawn."""
    found = json.loads((results / "demo" / "seed-0.json").read_text(encoding="utf-8"))
    for name in ("natural", "robust"):
        recall = (found[name]["clean"], *found[name]["attacked"][:-1])
        yield Curve(name, "demo", (0.0, *found["epsilons"][:-1]), recall)


def told(drawn: Sequence[Curve]) -> str:
    """What a picture shows, as text. The file stores it, so that a test detects an old picture."""
    lines = ([f"{eps:.4f} {value:.1f}" for eps, value in zip(each.eps, each.recall, strict=True)] for each in drawn)
    return "; ".join(f"{each.name}: {', '.join(line)}" for each, line in zip(drawn, lines, strict=True))


def label(eps: float) -> str:
    """An ε as a reader writes it: a fraction of 255 where it is one.

    >>> label(8 / 255), label(0.03)
    ('8/255', '0.03')
    """
    parts = round(eps * 255)
    return f"{parts}/255" if eps and abs(parts / 255 - eps) < 1e-6 else f"{eps:g}"


def draw(drawn: Sequence[Curve], title: str, out: Path) -> Path:
    """One picture of several curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=130, layout="constrained")
    axis: Any = figure.subplots()
    for place, each in enumerate(drawn):
        colour = COLOURS[place % len(COLOURS)]
        axis.plot(each.eps, each.recall, marker="o", markersize=4.5, color=colour, label=each.name)
        if each.spans:
            low, high = zip(*each.spans, strict=True)
            axis.fill_between(each.eps, low, high, color=colour, alpha=0.15, linewidth=0)
    ticks = sorted({eps for each in drawn for eps in each.eps})
    apart = [eps for eps, before in zip(ticks, [-1.0, *ticks], strict=False) if eps - before > ticks[-1] / 20]
    axis.set_xticks(apart, [label(eps) for eps in apart])
    axis.set(xlabel="ε, the most that a pixel may change (of 1)", ylabel="R@1 (%)", title=title, ylim=(0, 100))
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(out, metadata={"Description": told(drawn), "Software": None})
    return out


def pictures(results: Path) -> dict[str, tuple[str, list[Curve]]]:
    """What is drawn: the file's name, with its title and curves."""
    sets: defaultdict[str, list[Curve]] = defaultdict(list)
    for each in curves(results):
        sets[each.data].append(each)
    found = {f"curve-{data}.png": (f"{data}: R@1 under the strong attack", these) for data, these in sets.items()}
    title = "Handwritten digits: R@1 when every query is attacked"
    return found | {"curve-demo.png": (title, list(demo(results)))}


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description="Draw R@1 against ε for every audit with such a curve.")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--out", type=Path, default=HERE)
    asked = parser.parse_args()
    for name, (title, drawn) in pictures(asked.results).items():
        print(draw(drawn, title, asked.out / name), f"({len(drawn)} curves)")


if __name__ == "__main__":
    main()
