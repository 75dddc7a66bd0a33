"""The result of an audit: its numbers, its table, and its files.

audit.json, schema "anchorhold.audit/1". Percentages are 0..100; low and high are the ends of 95 % bootstrap
intervals over queries (null where there is none). It contains no paths, except those that you typed.

    schema       "anchorhold.audit/1"
    settings     protocols, attacks, limit, eps, alpha, steps, method, seed, batch, precision, resize, crop, resamples,
                 start (zero or random), seeds (number of random starts), classes (unseen or all)
    versions, device, commit     of the computation
    command      what you typed: {model, data, root, mean, std, size, surrogate, held-out …}, as far as given; {} if the
                 audit was made in Python; absent from files of older versions
    model        kind, parameters, dim, weights (their hash; of a function that of its code; with the code and values
                 of before and backward), config of our own
                 models, gradients (false where it gives none), notes, wrap (mean, std and size of a
                 wrapper); hub: its name with the commit, if it was loaded from the Hugging Face Hub
    data         query and gallery {name, fingerprint, resize and crop where images were resized},
                 images [queries, gallery], classes, same, part (the attacked part, in words), attacked [q, g]
    clean        {R@1, R@2, mAP, mAP@R, mAP@10, NMI: {value, low, high}} of all queries, percent
    protocols    {published, corrected: {columns, ers, ars}}
      columns    {CA+ … GTT …: {value, low, high, initial, std, seeds}}; initial: the same measure on the clean
                 embeddings. With several random starts, seeds are their values, value their mean, std their sample
                 standard deviation, and low, high the interval of the mean over the starts; null otherwise.
                 In percent, but TMA is a cosine and ES:D a distance. published: means over groups of 112 samples
                 in data-set order, averaged; corrected: means over samples
      ers        {value, low, high, terms, ranking, recall} of those values, or null where attacks are missing
      ars        {constants, measured: {value, low, high, terms, ranking, recall, initial}}, each null where ARS
                 is not defined; constants: the published initial ranks (50, 1, 50, 1), measured: those of this
                 model. Both are ratios of means. per_sample is the mean of the samples' own ratios; left_out counts
                 the samples of each column that started at their goal (absent from files of older versions)
    runs         [{label, attack, side, start_seed, goals, samples, image_steps (of square and nes: queries),
                 seconds}]: one run may serve two protocols; goals {protocol: the settings of the attack, and its
                 published defects}; side query or gallery; start_seed 0, 1 …
    flags        [{name, message}]      checked    whether flags were looked for (absent from files of older versions)
    notes        sentences              seconds, image_steps    of all runs; seconds also of the checks
    curve        R@1 against ε under the strong attack, unless left out: {about, eps [0, …], lines {R@1: [percent …]},
                 intervals {R@1: [[low, high] …]}, classes {worst (mean R@1 of the worst tenth of the classes at each
                 ε), counted, of; only with five queries of a class on average}, protocol, queries (number of
                 attacked queries, the same at every ε including 0), attacks {R@1: the attacks of which the worst
                 counts}, doubts (the input of flags)}. Files of older versions may have further lines, and no intervals
    strong       of a strong audit, whose columns are under protocols.strong: members, surrogate (a hash),
                 square_queries, image_steps, queries, after {goal: {member: the contested measure after it}},
                 realisable {8 bits, JPEG 90 (of 1 or 3 channels): {columns, ers}}, doubts (the input of the flags:
                 shares in percent; rejected: of samples with a changed image whose embedding is not finite)

samples.safetensors has, for a protocol P, a column C, and the label L of a run, one row for each attacked sample: `P/C`
and `P/C/initial` (as fractions 0..1, cosine or distance), `L/ids`, `L/targets`, `L/shift` (distance to the clean
embedding); and `clean/r1` … of all queries; `curve/ids` and `curve/R@1` (ε, samples) of the curve. With several random
starts `P/C` is the mean over them, and `P/C/seeds` (starts, samples) is each. examples.safetensors has for each run the
worst, the median (of those kept) and the best sample, in this order: `L/ids`, `L/clean` and `L/perturbed` (uint8 NHWC),
`L/asked` (the query whose list is shown: the sample itself, or the target of a candidate attack), `L/before` and
`L/after` (gallery ids of its nearest neighbours, the query's own image left out). pictures.safetensors has small images
of all items in the examples, by side: `query/ids` and `query/images` (uint8 NHWC), the same for the gallery, and the
names of their classes as metadata. page.html shows everything.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import safetensors.torch
from torch import Tensor

from ..columns import as_text, length
from ..display import frame_of
from ..interface import worded
from ..perturb.settings import VALUES_ONLY
from ..report.audit_page import verdict_of, write_audit_page
from ..report.curve import table_of_curve
from ..runs.audits import attack_in_words
from ..runs.schemas import AUDIT_SCHEMA
from ..runs.writing import atomic
from .ensemble import RECALL
from .outcomes import ColumnValue, Outcome, RunRows, Score, by_start
from .showing import COLUMNS, frame_rows, html_of, line_of, number_in_words

if TYPE_CHECKING:
    from pandas import DataFrame

    from ..report.pictures import Pictures
    from .receipts import Receipts

__all__ = ["AUDIT_SCHEMA", "Audit", "Flag"]

HEAD = 16  # width of the first column of the table
WIDTH = 96  # of the verdict's lines: near that of the table

T = TypeVar("T")


class Flag(Protocol):
    """A reason not to trust the numbers."""

    @property
    def name(self) -> str: ...

    @property
    def message(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Audit:
    """A model's robustness, with everything needed to judge and repeat it. `print` it, or `save` it.

    `audit.protocols["corrected"].columns["GTM"].value` is one number, `audit.clean["R@1"].value` another.

    Attributes:
        settings: attacks, ε, steps, seed and so on.
        provenance: versions, device and commit.
        model: kind, number of parameters, dimension, and the hash of the weights.
        data: names, fingerprints and sizes of queries and gallery, and how many of each were attacked.
        clean: R@1, R@2, mAP, mAP@R, mAP@10 and NMI without an attack, in percent.
        protocols: the results under attack: "published", "corrected", and "strong" after a strong audit.
        runs: the attack runs, with their results for each sample.
        flags: reasons not to trust the numbers; each has a `name` and a `message`.
        notes: what else you should know, as sentences.
        seconds: the time it took, with the checks.
        image_steps: forward and backward passes of one image, over all runs.
        clean_rows: the clean metrics of each query.
        pictures: small images for the page.
        curve: R@1 against ε under the strong attack: `eps`, `lines["R@1"]`, `intervals["R@1"]`; None if left out.
        curve_rows: whether each attacked query is still right at each ε.
        strong: of a strong audit: what each member of the ensemble leaves.
        receipts: of a strong audit: the perturbed images, for `anchorhold verify`.
        command: what you typed, by option; empty for an audit made in Python.
        checked: whether flags were looked for: False after `examine=None`, where no flag means nothing.
    """

    settings: dict[str, Any]
    provenance: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    clean: dict[str, ColumnValue]
    protocols: dict[str, Outcome]
    runs: tuple[RunRows, ...]
    flags: tuple[Flag, ...]
    notes: tuple[str, ...]
    seconds: float
    image_steps: int
    clean_rows: dict[str, Tensor] = field(default_factory=dict)
    pictures: "Pictures | None" = None
    curve: Mapping[str, Any] | None = None
    curve_rows: dict[str, Tensor] = field(default_factory=dict)
    strong: Mapping[str, Any] | None = None
    receipts: "Receipts | None" = None
    command: Mapping[str, str] = field(default_factory=dict)  # what you typed, by option
    checked: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The content of audit.json; see the head of this module."""
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
                "schema": AUDIT_SCHEMA,
                "settings": self.settings,
                **self.provenance,
                "command": dict(self.command),
                "model": self.model,
                "data": self.data,
                "clean": {name: {"value": c.value, "low": c.low, "high": c.high} for name, c in self.clean.items()},
                "protocols": outcomes,
                "runs": runs,
                "flags": [{"name": flag.name, "message": flag.message} for flag in self.flags],
                "checked": self.checked,
                "notes": list(self.notes),
                "seconds": round(self.seconds, 3),
                "image_steps": self.image_steps,
            }
            | ({} if self.curve is None else {"curve": self.curve})
            | ({} if self.strong is None else {"strong": self.strong})
        )

    def save(self, folder: str | Path) -> Path:
        """Write audit.json, samples, examples and pictures, and page.html, which shows them; the folder is returned."""
        folder = Path(folder)
        samples = {f"clean/{name}": row for name, row in self.clean_rows.items()}
        samples |= {f"curve/{name}": row for name, row in self.curve_rows.items()}
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
                safetensors.torch.save_file(dense, temporary, {"schema": AUDIT_SCHEMA})
        with atomic(folder / "audit.json") as temporary:
            text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
            temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        if self.receipts is not None:
            self.receipts.save(folder / "receipts")
        if self.pictures is not None:
            self.pictures.save(folder / "pictures.safetensors")
        write_audit_page(folder)
        return folder

    def to_frame(self) -> "DataFrame":
        """All numbers as a pandas DataFrame, a row for each; pandas has to be installed.

        `kind` is clean, attack, score or curve. `attack` is the column of the table, or the name of a metric or score.
        `before` and `after` are the values without and under attack. `low` and `high` are the 95 % interval.
        `std` is over random starts. Further columns are `protocol`, `eps` and `unit`. A curve has a row for each ε.
        Clean metrics are under `before`.
        """
        return frame_of(frame_rows(self), COLUMNS)

    def __str__(self) -> str:
        return _table(self)

    def __repr__(self) -> str:
        return line_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)


def _finite(value: T) -> T:
    """The same with null for numbers that are not finite."""
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
    how, several = attack_in_words(s), s["seeds"] > 1
    wide = 30 if several else 24
    lines = [
        f"{audit.model['kind']}, {audit.model['parameters']:,} parameters, on {data['query']['name']}",
        f"{asked:,} of {queries:,} queries against {items:,} images of {data['classes']} classes{gallery}",
        *([f"attacked: {data['part']}"] if data.get("part") else []),
        f"{how}, seed {s['seed']}; {'mean ± std, ' if several else ''}[95 % intervals]",
        "",
        *wrap(f"verdict: {verdict_of(audit.to_dict())}", WIDTH, break_on_hyphens=False),
        "",
        "clean   " + "  ".join(f"{name} {as_text(column.value, name)}" for name, column in audit.clean.items()),
        "",
        *_headline(audit, queries),
        f"{'':{HEAD}}" + "".join(f"{name:>{wide}}" for name in audit.protocols),
    ]
    names = list(dict.fromkeys(name for outcome in audit.protocols.values() for name in outcome.columns))
    for name in names:
        cells = [_cell(outcome.columns.get(name), name) for outcome in audit.protocols.values()]
        lines.append(f"{name:{HEAD}}" + "".join(f"{cell:>{wide}}" for cell in cells))
    # All goals of R@1 share the value before the attack. It is of the attacked queries, and R@1 above of all.
    recall = next((name for name in names if name in ("ES:R", *RECALL)), "")
    for head, name in (("R@1 clean", recall), ("TMA clean", "TMA")):
        if name in names:
            before = [outcome.columns.get(name) for outcome in audit.protocols.values()]
            cells = ["–" if each is None else as_text(each.initial, name) for each in before]
            lines.append(f"{head:{HEAD}}" + "".join(f"{cell:>{wide}}" for cell in cells))
    if any(outcome.ers for outcome in audit.protocols.values()):
        kinds = {
            "ERS": [outcome.ers for outcome in audit.protocols.values()],
            "ARS constants": [outcome.ars["constants"] for outcome in audit.protocols.values()],
            "ARS measured": [outcome.ars["measured"] for outcome in audit.protocols.values()],
            "ARS per sample": [outcome.ars.get("per_sample") for outcome in audit.protocols.values()],
        }
        lines.append("")
        for name, scores in kinds.items():
            lines.append(f"{name:{HEAD}}" + "".join(f"{_cell(score, name):>{wide}}" for score in scores))
            for part in ("ranking", "recall"):
                cells = ["–" if score is None else f"{getattr(score, part):.1f}" for score in scores]
                lines.append(f"  {part:{HEAD - 2}}" + "".join(f"{cell:>{wide}}" for cell in cells))
    lines += ["", *(f"flag {flag.name}: {flag.message}" for flag in audit.flags)] if audit.flags else []
    lines += ["", *(f"note: {note}" for note in audit.notes)] if audit.notes else []
    lines += ["", missing] if (missing := _without_curve(audit)) else []
    return "\n".join(lines)


def _without_curve(audit: Audit) -> str:
    """A line of an audit without R@1 against ε that could have it."""
    s = audit.settings
    able = "corrected" in s["protocols"] and s["method"] in ("pgd", *VALUES_ONLY) and s["eps"] and s["steps"]
    if audit.curve is not None or not able:
        return ""
    more = "" if {*RECALL} & {*s["attacks"]} else ", and margin to the attacks"
    eps = length(s["eps"], s.get("norm", "linf"))
    return f"R@1 against ε was not measured; add {worded(f'--curve {eps}', f'epsilons=[{eps}]')}{more}"


def _headline(audit: Audit, queries: int) -> list[str]:
    """R@1 against ε, before everything else."""
    if audit.curve is None:
        return []
    clean, norm = audit.clean.get("R@1"), audit.settings.get("norm", "linf")
    return [*table_of_curve(audit.curve, None if clean is None else clean.value, queries, norm), ""]


def _cell(number: ColumnValue | Score | None, name: str) -> str:
    return "–" if number is None else number_in_words(number, name)
