"""What an audit found: its numbers, the table it prints, and the files it leaves.

audit.json, schema "anchorhold.audit/1". Percentages are 0..100; low and high are the ends of 95 % bootstrap
intervals over queries (null where there is none); nothing in it is a path.

    schema       "anchorhold.audit/1"
    settings     protocols, attacks, limit, eps, alpha, steps, method, seed, batch, precision, resize, crop, resamples,
                 start (zero or random), seeds (how many random starts)
    versions, device, commit     what made the numbers
    model        kind, parameters, dim, weights (a hash of them), config where it is ours, notes
    data         query and gallery {name, fingerprint}, images [queries, gallery], classes, same, attacked [q, g]
    clean        {R@1, R@2, mAP, mAP@R, mAP@10, NMI: {value, low, high}} of all queries, percent
    protocols    {published, corrected: {columns, ers, ars}}
      columns    {CA+ … GTT …: {value, low, high, initial, std, seeds}}; initial: the same measure on the clean
                 embeddings; with several random starts seeds are their values, value their mean, std their sample
                 standard deviation, and low, high the interval of the mean over the starts; null otherwise
                 percent, but TMA is a cosine and ES:D a distance. published: means of the means of 112 samples
                 in data-set order; corrected: means over samples
      ers        {value, low, high, terms, ranking, recall} of those values, or null where attacks are missing
      ars        {constants, measured: {value, low, high, terms, ranking, recall, initial}}, each null where ARS
                 is not defined; constants: print's initial ranks (50, 1, 50, 1), measured: those of this model
    runs         [{label, attack, side, start_seed, goals, samples, image_steps, seconds}]: one run may serve two
                 protocols; goals {protocol: the settings of the attack, and which of print's defects it has};
                 side query or gallery; start_seed 0, 1 …
    flags        [{name, message}]      notes    sentences      seconds, image_steps    of all runs
    curve        where one was made: {about, eps [0, …], lines {name: [R@1 …]}}
    strong       of a strong audit, whose columns stand under protocols.strong: members, surrogate (a hash),
                 square_queries, image_steps, queries, after {goal: {member: the contested measure after it}},
                 realisable {8 bits, JPEG 90: {columns, ers}}, doubts (what flags were raised from)

samples.safetensors has, for a protocol P, a column C, and the label L of a run, one row for each attacked sample:
`P/C` and `P/C/initial` (as fractions 0..1, cosine or distance), `L/ids`, `L/targets`, `L/shift` (distance to the
clean embedding); and `clean/r1` … of all queries. With several random starts `P/C` is the mean over them, and
`P/C/seeds` (starts, samples) is each. examples.safetensors has for each run the samples that withstood worst, in
the middle (of those that were kept) and best, in this order: `L/ids`, `L/clean` and `L/perturbed` (uint8 NHWC),
`L/asked` (whose list is shown: the sample itself, or the query a candidate attack aimed at), `L/before` and
`L/after` (gallery ids of its nearest neighbours, the query's own image left out). pictures.safetensors has small images
of all that the examples name, by side: `query/ids` and `query/images` (uint8 NHWC), the same for the gallery, and the
names of their classes as metadata. page.html shows it all.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import safetensors.torch
from torch import Tensor

from ..record import atomic
from .outcomes import NOT_PERCENT, Column, Outcome, RunRows, Score, by_start

if TYPE_CHECKING:
    from .receipts import Receipts
    from .shown import Pictures

__all__ = ["SCHEMA", "Audit", "Flag", "fraction"]

SCHEMA = "anchorhold.audit/1"

T = TypeVar("T")


class Flag(Protocol):
    """A reason not to trust the numbers."""

    @property
    def name(self) -> str: ...

    @property
    def message(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Audit:
    """A model's robustness, with everything needed to judge and to repeat it. `print` it, or `save` it."""

    settings: dict[str, Any]
    provenance: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    clean: dict[str, Column]
    protocols: dict[str, Outcome]
    runs: tuple[RunRows, ...]
    flags: tuple[Flag, ...]
    notes: tuple[str, ...]
    seconds: float
    image_steps: int
    clean_rows: dict[str, Tensor] = field(default_factory=dict)
    pictures: "Pictures | None" = None
    curve: Mapping[str, Any] | None = None
    strong: Mapping[str, Any] | None = None
    receipts: "Receipts | None" = None

    def to_dict(self) -> dict[str, Any]:
        """What audit.json holds; see the head of this module."""
        runs = [
            {
                "label": run.label,
                "attack": run.attack,
                "side": run.side,
                "start_seed": run.start_seed,
                "goals": run.goals,
                "samples": len(run.ids),
                "image_steps": run.image_steps,
                "seconds": round(run.seconds, 3),
            }
            for run in self.runs
        ]
        outcomes = {name: {k: v for k, v in asdict(o).items() if k != "notes"} for name, o in self.protocols.items()}
        return _finite(
            {
                "schema": SCHEMA,
                "settings": self.settings,
                **self.provenance,
                "model": self.model,
                "data": self.data,
                "clean": {name: {"value": c.value, "low": c.low, "high": c.high} for name, c in self.clean.items()},
                "protocols": outcomes,
                "runs": runs,
                "flags": [{"name": flag.name, "message": flag.message} for flag in self.flags],
                "notes": list(self.notes),
                "seconds": round(self.seconds, 3),
                "image_steps": self.image_steps,
            }
            | ({} if self.curve is None else {"curve": self.curve})
            | ({} if self.strong is None else {"strong": self.strong})
        )

    def save(self, folder: str | Path) -> Path:
        """Write audit.json, samples, examples and pictures, and page.html, which shows them; the folder is returned."""
        from ..report.audit_page import write_audit_page

        folder = Path(folder)
        samples = {f"clean/{name}": row for name, row in self.clean_rows.items()}
        examples: dict[str, Tensor] = {}
        for run in self.runs:
            samples |= {f"{run.label}/ids": run.ids, f"{run.label}/shift": run.shift}
            if run.targets is not None:
                samples[f"{run.label}/targets"] = run.targets
            for protocol in run.protocols:
                samples |= {f"{protocol}/{name}/initial": row for name, row in run.initial[protocol].items()}
            examples |= {f"{run.label}/{name}": row for name, row in run.examples.items()}
        for protocol in self.protocols:
            for name, rows in by_start(self.runs, protocol).items():
                samples[f"{protocol}/{name}"] = rows.mean(0)
                if len(rows) > 1:
                    samples[f"{protocol}/{name}/seeds"] = rows
        for name, tensors in (("samples", samples), ("examples", examples)):
            with atomic(folder / f"{name}.safetensors") as temporary:
                dense = {key: row.cpu().contiguous().clone() for key, row in tensors.items()}
                safetensors.torch.save_file(dense, temporary, {"schema": SCHEMA})
        with atomic(folder / "audit.json") as temporary:
            text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
            temporary.write_text(text + "\n", encoding="utf-8")
        if self.receipts is not None:
            self.receipts.save(folder / "receipts")
        if self.pictures is not None:
            self.pictures.save(folder / "pictures.safetensors")
        write_audit_page(folder)
        return folder

    def __str__(self) -> str:
        return _table(self)


def _finite(value: T) -> T:
    """The same with null for what JSON cannot say."""
    made: Any = value
    if isinstance(value, Mapping):
        made = {key: _finite(part) for key, part in value.items()}
    elif isinstance(value, list | tuple):
        made = [_finite(part) for part in value]
    elif isinstance(value, float) and not math.isfinite(value):
        made = None
    result: T = made
    return result


# ---------------------------------------------------------------- table


def _table(audit: Audit) -> str:
    s, data = audit.settings, audit.data
    queries, items = data["images"]
    asked, moved = data["attacked"]
    gallery = "" if data["same"] else f", {moved:,} of them as candidates"
    how = f"{s['method'].upper()}, ε {fraction(s['eps'])}"
    how += f", {s['steps']} steps of {fraction(s['alpha'])}" if s["method"] == "pgd" else ""
    several = s["seeds"] > 1
    how += f" from {s['seeds']} random starts" if several else " from a random start" if s["start"] == "random" else ""
    wide = 30 if several else 24
    lines = [
        f"{audit.model['kind']}, {audit.model['parameters']:,} parameters, on {data['query']['name']}",
        f"{asked:,} of {queries:,} queries against {items:,} images of {data['classes']} classes{gallery}",
        f"{how}, seed {s['seed']}; {'mean ± std, ' if several else ''}[95 % intervals]",
        "",
        "clean   " + "  ".join(f"{name} {column.value:.1f}" for name, column in audit.clean.items()),
        "",
        f"{'':12}" + "".join(f"{name:>{wide}}" for name in audit.protocols),
    ]
    names = list(dict.fromkeys(name for outcome in audit.protocols.values() for name in outcome.columns))
    for name in names:
        cells = [_cell(outcome.columns.get(name), name) for outcome in audit.protocols.values()]
        lines.append(f"{name:12}" + "".join(f"{cell:>{wide}}" for cell in cells))
    if "TMA" in names:
        cells = [f"{outcome.columns['TMA'].initial or 0.0:.3f}" for outcome in audit.protocols.values()]
        lines.append(f"{'TMA clean':12}" + "".join(f"{cell:>{wide}}" for cell in cells))
    if any(outcome.ers for outcome in audit.protocols.values()):
        kinds = {
            "ERS": [outcome.ers for outcome in audit.protocols.values()],
            "ARS print": [outcome.ars["constants"] for outcome in audit.protocols.values()],
            "ARS measured": [outcome.ars["measured"] for outcome in audit.protocols.values()],
        }
        lines.append("")
        for name, scores in kinds.items():
            lines.append(f"{name:12}" + "".join(f"{_cell(score, name):>{wide}}" for score in scores))
            for part in ("ranking", "recall"):
                cells = ["–" if score is None else f"{getattr(score, part):.1f}" for score in scores]
                lines.append(f"  {part:10}" + "".join(f"{cell:>{wide}}" for cell in cells))
    lines += ["", *(f"flag {flag.name}: {flag.message}" for flag in audit.flags)] if audit.flags else []
    lines += ["", *(f"note: {note}" for note in audit.notes)] if audit.notes else []
    return "\n".join(lines)


def _cell(number: Column | Score | None, name: str) -> str:
    if number is None:
        return "–"
    digits = 3 if name in NOT_PERCENT else 1
    span = "" if number.low is None or number.high is None else f" [{number.low:.{digits}f}, {number.high:.{digits}f}]"
    std = number.std if isinstance(number, Column) else None
    return f"{number.value:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}") + span


def fraction(pixels: float) -> str:
    """A length in pixels' own steps where it is a whole number of them.

    >>> fraction(8 / 255), fraction(0.5)
    ('8/255', '0.5')
    """
    steps = Fraction(pixels * 255).limit_denominator(4)
    return f"{steps}/255" if steps.denominator == 1 and abs(float(steps) - pixels * 255) < 1e-9 else f"{pixels:g}"
