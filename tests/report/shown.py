"""Pages to look at: an audit whose names are hostile, a run that collapses, and a comparison of both with others."""

from pathlib import Path
from typing import Any

import torch

from anchorhold.auditing.run import audit
from anchorhold.data.splits import Split
from anchorhold.model.embedder import Embedder
from tests.report.invented import a_run, an_audit

HOSTILE = (
    "<script>alert(1)</script>",
    "\"quotes\" 'and' &amp; more",
    "עברית وعربي \u202e turned",
    "emoji 🐦\u200d🔥 🏳️",
    "long " + "x" * 295,
)
FOLDER = "<img src=x onerror=alert(1)>"


def images(count: int = 40, size: int = 8, channels: int = 1) -> torch.Tensor:
    made = torch.randint(0, 256, (count, size, size, channels), generator=torch.Generator().manual_seed(0))
    return made.to(torch.uint8)


def a_hostile_audit(path: Path, **changes: Any) -> Path:
    labels = torch.arange(40) % len(HOSTILE)
    split = Split("<b>data</b>", labels, HOSTILE, images=images())
    settings: dict[str, Any] = {"attacks": ["ES", "CA+", "QA-"], "limit": 12, "steps": 2, "resamples": 20}
    audit(Embedder("small", 8, channels=1, size=8), split, out=path, device="cpu", **(settings | changes))
    return path


def a_collapsing_run(path: Path) -> Path:
    """Twelve epochs, of which the last five are flat."""
    rows = [
        {
            "epoch": epoch,
            "step": 10 * epoch,
            "loss": 0.2,
            "r1": 60.0 - epoch,
            "collapseness": -1 / epoch,
            "separability": 0.4 if epoch <= 7 else 0.01,
            "mean_distance": 1.0 / epoch,
            "shift_all": 0.1 * epoch,
            "active_first": 1.0,
            "active_last": 0.5,
        }
        for epoch in range(1, 13)
    ]
    return a_run(path, rows, status="training", train={"collapse_warmup": 2})


def runs_to_compare(path: Path) -> Path:
    """ERS of a and b differ beyond their intervals, those of a and c do not; d has none."""
    for name, ers in (("a", 30.0), ("b", 40.0), ("c", 31.0)):
        an_audit(a_run(path / name, [{"epoch": 1, "r1": ers}]), ers, ers)
    a_run(path / FOLDER, [{"epoch": 1, "r1": 9.0}])
    return path
