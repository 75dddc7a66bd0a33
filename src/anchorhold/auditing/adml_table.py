"""ADML's tables 3, 4 and 7: algorithm 1 with FGSM, C&W and PGD, for several models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..columns import pixel_fraction
from ..console import Report, Silent
from ..runs.writing import atomic
from .classes import Classes, part_of
from .inputs import Data
from .run import audit

__all__ = ["Algorithm1", "algorithm1"]

ROWS = ("benign", "fgsm", "cw", "pgd")
_NAMES = {"benign": "Benign", "fgsm": "FGSM", "cw": "C&W", "pgd": "PGD"}


@dataclass(frozen=True)
class Algorithm1:
    """R@1 and mAP@R in percent by model and method, and for PGD their standard deviation over the starts.

    Attributes:
        eps: the ε of all attacks.
        values: by model, then by method: R@1, mAP@R, and their `std`, None where there is one start.
    """

    eps: float
    values: dict[str, dict[str, dict[str, float | None]]]

    def __str__(self) -> str:
        wide = max(10, *(len(name) for name in self.values)) + 2
        head = f"algorithm 1 of ADML, Linf, ε {pixel_fraction(self.eps)}"
        lines = [head, f"{'':{wide}}{'':8}{'R@1':>14}{'mAP@R':>14}"]
        for model, rows in self.values.items():
            for method, row in rows.items():
                cells = []
                for name in ("R@1", "mAP@R"):
                    std = row[f"{name} std"]
                    cells.append(f"{row[name]:.1f}" + ("" if std is None else f" ± {std:.1f}"))
                lines.append(f"{model:{wide}}{_NAMES[method]:8}" + "".join(f"{cell:>14}" for cell in cells))
        return "\n".join(lines)

    def save(self, path: Path) -> Path:
        """Write the numbers as JSON."""
        with atomic(path) as temporary:
            text = json.dumps({"eps": self.eps, "values": self.values}, indent=2, ensure_ascii=False)
            temporary.write_text(text + "\n", encoding="utf-8")
        return path


def algorithm1(
    models: Mapping[str, nn.Module],
    data: Data,
    *,
    eps: float = 0.01,
    limit: int = 0,
    seeds: int = 5,
    out: str | Path | None = None,
    report: Report | None = None,
    classes: Classes = "unseen",
    **options: Any,
) -> Algorithm1:
    """ADML's table: R@1 and mAP@R of several models under FGSM, C&W and PGD (ADML, algorithm 1).

    FGSM takes one step of ε, C&W 50 iterations, PGD 5 steps. All models are attacked on the same images.

    Args:
        models: the victims by name.
        data: the images, as in `audit`.
        eps: maximum change of a pixel.
        limit: number of queries; 0 is all.
        seeds: random starts of PGD. The table has their mean and standard deviation.
        out: a folder for the audits and algorithm1.json; give the same one to resume.
        report: receives progress and messages; None is silent.
        classes: of a folder or CSV that a model was trained on: "unseen" classes, or "all".
        options: other arguments of `audit`: seed, batch, device and so on.

    >>> from anchorhold import Embedder
    >>> models = {"untrained": Embedder("small", 8, channels=1, size=8)}
    >>> table = algorithm1(models, "digits", limit=8, seeds=1, batch=256, device="cpu")
    >>> list(table.values["untrained"])
    ['benign', 'fgsm', 'cw', 'pgd']
    """
    report = report or Silent()
    part = part_of(data, models.values(), classes)
    for note in (f"attacked: {part.recorded}", *part.notes):
        report.say(note)
    values: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, model in models.items():
        rows: dict[str, dict[str, float | None]] = {}
        for method in ROWS[1:]:
            report.say(f"{name}: {_NAMES[method]}")
            found = audit(
                model,
                part.data,
                classes=classes,
                protocols="corrected",
                attacks=["nearest"],
                threat="adml",
                eps=eps,
                limit=limit,
                method=method,  # type: ignore[arg-type]
                seeds=seeds if method == "pgd" else 1,
                out=None if out is None else Path(out) / name / method,
                examine=None,
                report=report,
                **options,
            )
            columns = found.protocols["corrected"].columns
            pairs = {"R@1": columns["nearest"], "mAP@R": columns["nearest:mAP@R"]}
            if "benign" not in rows:
                before = {part: column.initial for part, column in pairs.items()}
                rows["benign"] = before | {f"{part} std": None for part in pairs}
            rows[method] = {part: column.value for part, column in pairs.items()}
            rows[method] |= {f"{part} std": column.std for part, column in pairs.items()}
        values[name] = rows
    table = Algorithm1(eps, values)
    if out is not None:
        table.save(Path(out) / "algorithm1.json")
    return table
