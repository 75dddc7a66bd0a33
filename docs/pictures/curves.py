"""Draw R@1 against ε for every audit with such a curve: `python docs/pictures/curves.py`.

Files: results/strong/*.json and every audit.json under results/. One picture for each data set: curve-DATA.png here.
The demo's two models have a picture of their own, curve-demo.png, which is that of the README.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from anchorhold.report.epsilon import Curve, draw_curves

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


DEMO = {"strong-natural": "trained without attacks", "strong-robust": "trained with attacks (recipe robust)"}
TITLES = {
    "cub": "Birds (CUB-200-2011), test classes",
    "cub-held-out": "Birds (CUB-200-2011), 20 training classes that were left out",
    "digits": "Handwritten digits",
    "demo": "Handwritten digits: right answers under the strong attack",
}


def set_of(name: str) -> str:
    """The data set of a split; held-out training classes are a set of their own.

    >>> set_of("cub/test"), set_of("cub/train, last 20 classes")
    ('cub', 'cub-held-out')
    """
    data, part = name.split("/", 1)
    return f"{data}-held-out" if "last" in part else data


def label_of(path: Path, results: Path) -> str:
    """What a reader calls the audited model: its recipe, or the folder of its run."""
    folder = path.relative_to(results).parent.as_posix().removesuffix("/strong")
    if path.parent.name in DEMO:
        return DEMO[path.parent.name]
    if path.parent.name == "strong" and path.parent.parent == results:
        return path.stem.partition("-")[2]
    return folder.rpartition("/")[2]


def curves(results: Path) -> Iterator[tuple[str, Curve]]:
    """The curves of all audits under `results`, each with its data set, or demo."""
    strong = sorted((results / "strong").glob("*.json"))
    for path in (*strong, *sorted(results.rglob("audit.json"))):
        audit = json.loads(path.read_text(encoding="utf-8"))
        curve = audit.get("curve") if audit.get("schema", "").startswith("anchorhold.audit/") else None
        if not curve or "R@1" not in curve["lines"]:
            continue
        spans = curve.get("intervals", {}).get("R@1") or ()
        recall = tuple(curve["lines"]["R@1"])
        drawn = Curve(label_of(path, results), tuple(curve["eps"]), recall, tuple((a, b) for a, b in spans))
        yield "demo" if path.parent.name in DEMO else set_of(audit["data"]["query"]["name"]), drawn


def pictures(results: Path) -> dict[str, tuple[str, list[Curve]]]:
    """What is drawn: the file's name, with its title and curves."""
    sets: defaultdict[str, list[Curve]] = defaultdict(list)
    for data, each in curves(results):
        sets[data].append(each)
    return {f"curve-{data}.png": (TITLES.get(data, data), these) for data, these in sets.items()}


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
