"""Recipes on handwritten digits: clean R@1, and R@1 left by the strong attack at three ε.

    python benchmarks/recipes.py --held-out 2 --seeds 0,1,2 --epsilons 0.06,0.1,0.2 --trials --out held-out.json
    python benchmarks/recipes.py --seeds 0,1,2 --only 'natural,hm-lga,robust' --out test.json

The first is to choose: `--held-out 2` tests on the last two training digits (3 and 4), without a look at the test
digits, and `--trials` runs all that was tried. Each run takes up to a minute on one CPU thread.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from parts import Parts

import anchorhold as ah
from anchorhold.config.recipes import recipe_names
from anchorhold.device import computer_of
from anchorhold.runs.provenance import provenance

EPSILONS = (0.03, 0.06, 0.1)
QUERIES = 200
RECIPES = ("natural", "hm-lga", "proxy-minmax", "robust")
TEACHER = "a run of proxy"  # in the changes of a trial: trained first, without attacks, by the same seed
_MINMAX, _ROBUST = "proxy-minmax", "robust"
_PAIRS = {"batch.kind": "pairs", "batch.pairs": 32, "defence.triplets": 0.5}
TRIALS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{f"minmax, clean {share}": (_MINMAX, {"defence.clean": share}) for share in (0.2, 0.4)},
    **{f"clean {share}": (_ROBUST, {"defence.clean": share}) for share in (0.1, 0.33, 0.5, 0.7)},
    "mean of the weights": (_ROBUST, {"train.ema": 0.99}),
    "mean along the schedule": (_ROBUST, {"train.mean_from": 0.25}),
    "smoothing 0.1": (_ROBUST, {"defence.smoothing": 0.1}),
    "weight perturbation": (_ROBUST, {"defence.awp": 0.005}),
    "CutMix": (_ROBUST, {"defence.cutmix": 0.5}),
    "teacher": (_ROBUST, {"defence.teacher": TEACHER}),
    "teacher, and start from it": (_ROBUST, {"defence.teacher": TEACHER, "model.weights": TEACHER}),
    "triplets": (_ROBUST, _PAIRS),
    "HM triplets": (_ROBUST, {**_PAIRS, "defence.triplet_attack": "hm"}),
    "Proxy-Anchor": (_ROBUST, {"defence.loss": "proxy-anchor", "defence.scale": 32}),
    "scale 24": (_ROBUST, {"defence.scale": 24}),
    "10 steps": (_ROBUST, {"defence.steps": 10}),
    "30 epochs": (_ROBUST, {"train.epochs": 30}),
    "CutMix, smoothing": (_ROBUST, {"defence.cutmix": 0.5, "defence.smoothing": 0.1}),
    "CutMix, smoothing, mean": (
        _ROBUST,
        {"defence.cutmix": 0.5, "defence.smoothing": 0.1, "train.ema": 0.99},
    ),
}
"""Changes of a recipe that were tried, by name; a recipe of the package is its own name."""


def measured(
    name: str, seed: int, held_out: int, queries: int, epochs: int, epsilons: tuple[float, ...] = EPSILONS
) -> dict[str, Any]:
    """Train and audit one model."""
    recipe, changes = TRIALS.get(name, (name, {}))
    changes = {**changes, "train.seed": seed, **({"train.epochs": epochs} if epochs else {})}
    data = ah.dataset("digits", held_out=held_out)
    with tempfile.TemporaryDirectory() as place:
        given = dict(changes)
        if TEACHER in changes.values():
            teacher = ah.fit(None, data, "proxy", Path(place) / "teacher", overrides={"train.seed": seed}, device="cpu")
            given = {key: str(teacher.path) if value == TEACHER else value for key, value in changes.items()}
        begun = time.perf_counter()
        run = ah.fit(None, data, recipe, Path(place) / "run", overrides=given, device="cpu")
        seconds, row, info = time.perf_counter() - begun, run.metrics()[-1], run.read_json()
        found = ah.audit(
            ah.load(run.path),
            data,
            attacks=["ES"],
            protocols=("corrected",),
            eps=epsilons[-1],
            epsilons=epsilons,
            limit=queries,
            device="cpu",
            examine=None,
        )
    assert found.curve is not None
    r1 = {f"{eps:g}": round(value, 2) for eps, value in zip(found.curve["eps"], found.curve["lines"]["R@1"])}
    spans = found.curve["intervals"]["R@1"]
    return {
        "recipe": recipe,
        "changes": {key: value for key, value in changes.items() if key != "train.seed"},
        "r1": r1,
        "intervals": {eps: [round(end, 2) for end in span] for eps, span in zip(r1, spans)},
        "clean_all": round(row["r1"], 2),
        "queries": found.curve["queries"],
        "seconds": round(seconds, 1),
        "image_steps": info["image_steps"],
    }


def table(found: Mapping[str, Any]) -> str:
    """The trials of a file as a table in Markdown: means over seeds, and the strong attack's last two ε by seed."""
    trials: dict[str, list[Mapping[str, Any]]] = {}
    for key, each in found["trials"].items():
        trials.setdefault(key.rsplit("/", 1)[0], []).append(each)
    levels = [f"{eps:g}" for eps in (0, *found["epsilons"])]
    heads = ["trial", "changes", *(f"ε = {eps}" if eps != "0" else "clean" for eps in levels)]
    heads += [f"ε = {eps}, by seed" for eps in levels[-2:]]
    lines = [heads, ["---"] * len(heads)]
    for name in sorted(trials, key=[*dict.fromkeys((*RECIPES, *TRIALS, *recipe_names()))].index):
        rows = trials[name]
        changes = ", ".join(f"`{key}={value}`" for key, value in rows[0]["changes"].items())
        base = f"`{rows[0]['recipe']}`" + (f", {changes}" if changes else "")
        means = [f"{sum(row['r1'][eps] for row in rows) / len(rows):.1f}" for eps in levels]
        seeds = [" / ".join(f"{row['r1'][eps]:.1f}" for row in rows) for eps in levels[-2:]]
        lines.append([name, base, *means, *seeds])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="natural,hm-lga,proxy-minmax,proxy-trades", help="names; * has a meaning")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--held-out", type=int, default=0, help="the last N training digits replace the test digits")
    parser.add_argument("--queries", type=int, default=QUERIES, help="that are attacked")
    parser.add_argument("--epochs", type=int, default=0, help="instead of the recipe's")
    parser.add_argument("--epsilons", default=",".join(map(str, EPSILONS)), help="of the strong attack")
    parser.add_argument("--trials", action="store_true", help=f"{', '.join(RECIPES)} and every change that was tried")
    parser.add_argument("--table", action="store_true", help="write the trials of --out as a table, and end")
    parser.add_argument("--list", action="store_true", help="say which changes are tried, and end")
    parser.add_argument("--out", default="recipes.json")
    args = parser.parse_args()
    if args.list:
        print("\n".join(TRIALS))
        return
    if args.table:
        print(table(json.loads(Path(args.out).read_text())), end="")
        return
    torch.set_num_threads(1)
    epsilons = tuple(map(float, args.epsilons.split(",")))
    about = {"data": "digits", "held_out": args.held_out, "queries": args.queries, "epsilons": list(epsilons)}
    about |= {"epochs": args.epochs}
    origin = provenance(computer_of(torch.device("cpu")))
    made = Parts(args.out, "trials", {"schema": "anchorhold.trials/1"} | origin | about)
    wanted = [one.strip() for one in args.only.split(";" if ";" in args.only else ",")]
    names = [name for name in (*recipe_names(), *TRIALS) if any(fnmatch(name, one) for one in wanted)]
    for name in [*RECIPES, *TRIALS] if args.trials else names:
        for seed in map(int, args.seeds.split(",")):
            if f"{name}/{seed}" not in Parts.read(args.out, "trials"):
                found = measured(name, seed, args.held_out, args.queries, args.epochs, epsilons)
                made.keep(f"{name}/{seed}", found)


if __name__ == "__main__":
    main()
