"""Class entanglement of each run (Tian et al. 2024, table 5)."""

from collections.abc import Sequence

from ..errors import RunError
from ..runs.fields import dig, number
from .collect import Entry
from .tables import Column, Link, Table

__all__ = ["entanglement"]


def entanglement(entries: Sequence[Entry]) -> Table:
    """Distances between and within classes and their ratio d_intra / d_inter, at the end of each run.

    From the logged columns `inter_distance` and `intra_distance` where a run has them. Otherwise estimated from the
    mean distance d̄ over all pairs of a clean batch (`mean_distance`) and the separability s = (d_inter − d_intra) / d̄.
    Nearly all pairs are of two classes, so d_inter ≈ d̄ and d_intra ≈ d̄·(1 − s). With a share q of pairs within a class
    (1 % on CUB, a fifth on digits) both are too small by q·s·d̄. Where s ≥ 1 there is no estimate.
    """
    runs = [entry for entry in entries if entry.info]
    if not runs:
        raise RunError("entanglement needs the logs of runs, and these are audits; give run folders")
    columns = (
        *(Column(key, head) for key, head in (("name", "run"), ("data", "data"))),
        *(Column(key, f"{key}-class", 3) for key in ("inter", "intra")),
        Column("entanglement", "entanglement", 2),
        Column("attention", "λ"),
        Column("status", "status"),
    )
    rows, guessed = [], []
    for entry in runs:
        inter, intra = entry.last("inter_distance"), entry.last("intra_distance")
        if inter is None or intra is None:
            inter, apart = entry.last("mean_distance"), entry.last("separability")
            intra = inter * (1 - apart) if inter is not None and apart is not None and apart < 1 else None
            guessed.append(entry.name)
        ratio = intra / inter if intra is not None and inter else None
        λ = number(entry.setting("attention"))
        rows.append(
            (
                Link(entry.name, entry.path / "run.json"),
                dig(entry.info, "data", "name"),
                inter,
                intra,
                ratio,
                λ,
                entry.status,
            )
        )
    notes = ["mean distances of clean training images after the last epoch"]
    notes += [f"estimated from d̄ and separability, too small for few classes: {', '.join(guessed)}"] if guessed else []
    return Table(columns, tuple(rows), tuple(notes))
