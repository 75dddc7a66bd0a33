"""Draw R@1 against ε for every audit with such a curve: `python docs/pictures/curves.py`.

Files: results/strong/*.json, every audit.json under results/, and the demo's two models. One picture for each data set:
curve-DATA.png here. The demo's picture, curve-demo.png, is that of the README.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from anchorhold.report.epsilon import Curve, draw_curves

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def set_of(name: str) -> str:
    """The data set of a split; held-out training classes are a set of their own.

    >>> set_of("cub/test"), set_of("cub/train, last 20 classes")
    ('cub', 'cub-held-out')
    """
    data, part = name.split("/", 1)
    return f"{data}-held-out" if "last" in part else data


def curves(results: Path) -> Iterator[tuple[str, Curve]]:
    """The curves of all audits under `results`, each with its data set."""
    strong = sorted((results / "strong").glob("*.json"))
    for path in (*strong, *sorted(results.rglob("audit.json"))):
        audit = json.loads(path.read_text(encoding="utf-8"))
        curve = audit.get("curve") or {}
        if "R@1" not in curve.get("lines", {}):
            continue
        name = path.stem if path in strong else path.relative_to(results).parent.as_posix()
        spans = curve.get("intervals", {}).get("R@1") or ()
        recall = tuple(curve["lines"]["R@1"])
        drawn = Curve(name.removesuffix("/strong"), tuple(curve["eps"]), recall, tuple((a, b) for a, b in spans))
        yield set_of(audit["data"]["query"]["name"]), drawn


def demo(results: Path) -> Iterator[Curve]:
    """The two models of the demo with seed 0; its last ε, at which nothing is left, is not drawn."""
    found = json.loads((results / "demo" / "seed-0.json").read_text(encoding="utf-8"))
    for name in ("natural", "robust"):
        recall = (found[name]["clean"], *found[name]["attacked"][:-1])
        yield Curve(name, (0.0, *found["epsilons"][:-1]), recall)


def pictures(results: Path) -> dict[str, tuple[str, list[Curve]]]:
    """What is drawn: the file's name, with its title and curves."""
    sets: defaultdict[str, list[Curve]] = defaultdict(list)
    for data, each in curves(results):
        sets[data].append(each)
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
        print(draw_curves({"linf": drawn}, asked.out / name, title), f"({len(drawn)} curves)")


if __name__ == "__main__":
    main()
