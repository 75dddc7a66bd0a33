"""Anchorhold: image retrieval that holds under attack.

The public names are loaded when they are first used, so `import anchorhold` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auditing import audit
    from .data.datasets import Dataset, Split, dataset
    from .errors import AnchorholdError
    from .index import embed, export, search
    from .model.embedder import Embedder
    from .model.embedder import load_embedder as load
    from .model.victim import wrap
    from .perturb.ascend import Ascent, Budget, Objective, ascend
    from .perturb.ball import Ball
    from .scores import ars, ers
    from .training import fit, resume

__version__ = "0.1.0"

_PLACES = {
    "AnchorholdError": ("errors", "AnchorholdError"),
    "Ascent": ("perturb.ascend", "Ascent"),
    "Ball": ("perturb.ball", "Ball"),
    "Budget": ("perturb.ascend", "Budget"),
    "Dataset": ("data.datasets", "Dataset"),
    "Embedder": ("model.embedder", "Embedder"),
    "Objective": ("perturb.ascend", "Objective"),
    "Split": ("data.datasets", "Split"),
    "ars": ("scores", "ars"),
    "ascend": ("perturb.ascend", "ascend"),
    "audit": ("auditing", "audit"),
    "dataset": ("data.datasets", "dataset"),
    "embed": ("index", "embed"),
    "ers": ("scores", "ers"),
    "export": ("index", "export"),
    "fit": ("training", "fit"),
    "load": ("model.embedder", "load_embedder"),
    "resume": ("training", "resume"),
    "search": ("index", "search"),
    "wrap": ("model.victim", "wrap"),
}

__all__ = [
    "AnchorholdError",
    "Ascent",
    "Ball",
    "Budget",
    "Dataset",
    "Embedder",
    "Objective",
    "Split",
    "__version__",
    "ars",
    "ascend",
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
