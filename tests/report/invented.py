"""Run folders and audits with numbers that somebody chose."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anchorhold.columns import ERS_COLUMNS
from anchorhold.config.build import to_dict
from anchorhold.config.recipes import settings_from
from anchorhold.runs.folder import Run
from anchorhold.runs.schemas import AUDIT_SCHEMA

CONFIG = {"backbone": "small", "dim": 16}


def a_run(
    path: Path,
    rows: Iterable[Mapping[str, Any]] = ({"epoch": 1, "r1": 50.0, "r2": 60.0, "map_r": 20.0},),
    recipe: str = "hm-lga",
    status: str = "done",
    **more: Any,
) -> Path:
    """A run folder; `more`: sections of settings, such as defence={"steps": 4}, fields of run.json, `on` a data set."""
    sections = {key: more.pop(key) for key in ("defence", "train", "model", "batch") if key in more}
    data, held_out = more.pop("on", "digits"), more.pop("held_out", 0)
    settings = to_dict(settings_from(recipe, {"data": {"name": data, "held_out": held_out}, **sections}))
    about = {"data": {"name": data, "test": "mark"}, "model": {"config": CONFIG}}
    run = Run.create(path, {"settings": settings, **about, "status": status, **more})
    for row in rows:
        run.append(row)
    return path


def an_audit(
    path: Path,
    ers: float = 30.0,
    r1: float = 50.0,
    queries: int = 100,
    eps: float = 8 / 255,
    strong: bool = False,
    columns: bool = False,
) -> Path:
    """An audit.json; the corrected ERS is 5 lower, ARS 10 higher than ERS (measured: 20), and intervals are ±1.

    A strong one says 7 less than corrected. Columns are 1, 2 … and 10 more in each following protocol.
    """

    def score(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 1, "high": value + 1}

    found: dict[str, Any] = {
        "schema": AUDIT_SCHEMA,
        "settings": {"eps": eps, "alpha": 3 / 255, "steps": 32, "method": "pgd"},
        "model": {"config": CONFIG},
        "data": {"query": {"name": "digits/test", "fingerprint": "mark"}, "attacked": [queries, queries]},
        "clean": {"R@1": score(r1), "R@2": score(r1 + 5), "mAP@R": score(r1 - 30)},
        "protocols": {
            name: {
                "ers": score(ers - less),
                "ars": {"constants": score(ers + 10 - less), "measured": score(ers + 20 - less)},
            }
            for name, less in (("published", 0), ("corrected", 5), ("strong", 12))[: 3 if strong else 2]
        },
        "seconds": 12.5,
    }
    if columns:
        for place, outcome in enumerate(found["protocols"].values()):
            values = enumerate(ERS_COLUMNS, 1 + 10 * place)
            outcome["columns"] = {name: {"value": value, "low": None, "high": None} for value, name in values}
    path.mkdir(parents=True, exist_ok=True)
    (path / "audit.json").write_text(json.dumps(found), encoding="utf-8")
    return path


def a_curve(path: Path, r1: Iterable[float] = (50.0, 20.0), eps: float = 8 / 255) -> Path:
    """Add R@1 against ε, from 0 to `eps`, to the audit.json in a folder; intervals are ±1."""
    audit = json.loads((path / "audit.json").read_text(encoding="utf-8"))
    values = list(r1)
    sizes = [eps * at / (len(values) - 1) for at in range(len(values))]
    spans = [[value - 1, value + 1] for value in values]
    known = {"protocol": "strong", "eps": sizes, "lines": {"R@1": values}, "intervals": {"R@1": spans}}
    audit["curve"] = {**known, "queries": audit["data"]["attacked"][0]}
    (path / "audit.json").write_text(json.dumps(audit), encoding="utf-8")
    return path


def flat_rows(epochs: int = 5, separability: float = 0.0) -> list[dict[str, Any]]:
    """The log of a model that has collapsed, or has not."""
    return [
        {"epoch": epoch, "loss": 0.2, "separability": separability, "mean_distance": 0.5, "r1": 2.0}
        for epoch in range(1, epochs + 1)
    ]
