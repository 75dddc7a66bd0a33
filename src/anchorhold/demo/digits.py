"""The demo on handwritten digits: a natural and a robust model, and their R@1 under attack."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config.recipes import settings_from
from ..console import Report
from ..data.datasets import dataset
from ..data.images import load_images
from ..device import computer_of
from ..distributed import Ranks
from ..errors import RunError
from ..interface import option
from ..model.embedder import load_embedder
from ..perturb.ball import Ball
from ..perturb.settings import Budget
from ..random import Key
from ..runs.folder import Run
from ..runs.locks import one_writer
from ..runs.provenance import provenance
from ..runs.writing import atomic
from ..training.evaluation import recall_under_attack, retrieval
from ..training.fit import fit

__all__ = ["EPSILONS", "run_demo", "table", "write_pages"]

EPSILONS = (0.03, 0.06, 0.1, 0.5)  # at the last one any working attack reduces R@1 to 0
STEPS, RESTARTS = 40, 2
RECIPES = {"natural": "natural", "robust": "robust"}


def attack_budget(eps: float) -> Budget:
    """40 steps, 2 restarts, best iterate; steps decrease to 0 and can cross the ball several times."""
    return Budget(STEPS, 10 * eps / STEPS, start="random", restarts=RESTARTS, keep="best", schedule="linear")


def run_demo(
    out: Path, *, seed: int = 0, report: Report, overrides: Mapping[str, Any] | None = None, queries: int = 0
) -> dict[str, Any]:
    """Train both models, attack N queries (0: all) of both at every ε, and write the result to `out`/demo.json."""
    # One thread: on nets this small a second one gains nothing.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_writer(out, Ranks(), report):
            return _demo(out, seed, report, overrides or {}, queries)
    finally:
        torch.set_num_threads(threads)


def _demo(out: Path, seed: int, report: Report, overrides: Mapping[str, Any], queries: int) -> dict[str, Any]:
    cpu = torch.device("cpu")
    digits = dataset("digits")
    result: dict[str, Any] = {
        "schema": "anchorhold.demo.digits/1",
        "seed": seed,
        "epsilons": list(EPSILONS),
        "queries": queries or len(digits.test),
        "attack": {"objective": "margin", "steps": STEPS, "restarts": RESTARTS, "norm": "linf"},
        **provenance(computer_of(cpu)),
    }
    for name, recipe in RECIPES.items():
        changes = {**overrides, "data": {"name": "digits"}}
        changes["train"] = {**changes.get("train", {}), "seed": seed}
        settings = settings_from(recipe, changes)
        if (out / name / "run.json").exists() and Run(out / name).read_json()["data"]["name"] != "digits":
            raise RunError(f"{out / name} holds a run that does not belong to the demo; choose another {option('out')}")
        report.say(f"training the {name} model (recipe {recipe}, {settings.train.epochs} epochs)")
        run = fit(None, digits, settings=settings, out=out / name, device="cpu", report=report, replace_run=True)
        model = load_embedder(run.path)
        test = load_images(digits.test, settings.data, cpu, report)
        clean, gallery = retrieval(model, test)
        if queries:  # the clean point of a curve uses the same queries as the others
            key = Key.of(seed)("demo")
            clean["r1"] = recall_under_attack(model, test, gallery, Ball(0.0), Budget(0), key, queries)
        curve = []
        with report.task(f"attacking the {name} model", len(EPSILONS)) as advance:
            for done, eps in enumerate(EPSILONS, 1):
                key = Key.of(seed)("demo")
                kept = recall_under_attack(model, test, gallery, Ball(eps), attack_budget(eps), key, queries)
                curve.append(round(kept, 2))
                advance(done, f"ε = {eps}: R@1 {kept:.1f}")
        result[name] = {
            "recipe": recipe,
            "run": str(run.path),
            "clean": round(clean["r1"], 2),
            "attacked": curve,
        }
    with atomic(out / "demo.json") as temporary:
        temporary.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def write_pages(out: Path, result: Mapping[str, Any], report: Report, limit: int = 60) -> list[Path]:
    """Audit both models on `limit` queries at ε = 0.06 and write a page for each, with the curves of both."""
    from ..auditing.run import audit

    attack = result["attack"]
    curve = {
        "about": f"R@1 under an untargeted attack, Linf, {attack['steps']} steps, {attack['restarts']} restarts, "
        f"{result['queries']} queries.",
        "eps": [0.0, *result["epsilons"]],
        "lines": {name: [result[name]["clean"], *result[name]["attacked"]] for name in RECIPES},
    }
    pages, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in RECIPES:
            report.say(f"auditing the {name} model on {limit} queries")
            budget: dict[str, Any] = {"eps": 0.06, "alpha": 0.015, "steps": 10, "seed": result["seed"]}
            found = audit(
                load_embedder(out / name), dataset("digits"), limit=limit, device="cpu", epsilons=(), **budget
            )
            pages.append(replace(found, curve=curve).save(out / name / "audit") / "page.html")
    finally:
        torch.set_num_threads(threads)
    return pages


def table(result: Mapping[str, Any]) -> str:
    """A text table of R@1 in percent, clean and under attack."""
    head = ["R@1 in %", "clean", *(f"ε = {eps:g}" for eps in result["epsilons"])]
    rows = [[name, *(f"{v:.1f}" for v in (result[name]["clean"], *result[name]["attacked"]))] for name in RECIPES]
    lines = ["".join(f"{cell:>10}" if i else f"{cell:10}" for i, cell in enumerate(row)) for row in [head, *rows]]
    attack = result["attack"]
    return "\n".join(
        [
            *lines,
            f"untargeted attack on R@1, Linf, {attack['steps']} steps, {attack['restarts']} restarts, "
            f"{result['queries']} queries",
        ]
    )
