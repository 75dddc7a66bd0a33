"""Anchorhold: image retrieval that holds under attack.

The public names are loaded when they are first used, so `import anchorhold` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .auditing.list_attack import attack_list
    from .auditing.run import audit
    from .data.datasets import dataset
    from .data.splits import Dataset, Split
    from .errors import AnchorholdError
    from .index.embedding import embed
    from .index.exporting import export
    from .index.searching import search
    from .model.embedder import Embedder
    from .model.load import load
    from .model.wrap import wrap
    from .perturb.ascend import ascend
    from .perturb.ball import Ball
    from .perturb.problem import Ascent, Objective, Problem
    from .perturb.settings import Budget
    from .scores import ars, ers
    from .training.fit import fit, resume

_PLACES = {
    "AnchorholdError": ("errors", "AnchorholdError"),
    "Ascent": ("perturb.problem", "Ascent"),
    "Ball": ("perturb.ball", "Ball"),
    "Budget": ("perturb.settings", "Budget"),
    "Dataset": ("data.datasets", "Dataset"),
    "Embedder": ("model.embedder", "Embedder"),
    "Objective": ("perturb.problem", "Objective"),
    "Problem": ("perturb.problem", "Problem"),
    "Split": ("data.datasets", "Split"),
    "ars": ("scores", "ars"),
    "ascend": ("perturb.ascend", "ascend"),
    "attack_list": ("auditing.list_attack", "attack_list"),
    "audit": ("auditing.run", "audit"),
    "dataset": ("data.datasets", "dataset"),
    "embed": ("index.embedding", "embed"),
    "ers": ("scores", "ers"),
    "export": ("index.exporting", "export"),
    "fit": ("training.fit", "fit"),
    "load": ("model.load", "load"),
    "resume": ("training.fit", "resume"),
    "search": ("index.searching", "search"),
    "wrap": ("model.wrap", "wrap"),
}

__all__ = [
    "AnchorholdError",
    "Ascent",
    "Ball",
    "Budget",
    "Dataset",
    "Embedder",
    "Objective",
    "Problem",
    "Split",
    "__version__",
    "ars",
    "ascend",
    "attack_list",
    "audit",
    "dataset",
    "embed",
    "ers",
    "export",
    "fit",
    "load",
    "resume",
    "search",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'anchorhold' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
