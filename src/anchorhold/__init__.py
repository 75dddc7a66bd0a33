"""Anchorhold: image retrieval that holds under attack.

The public names are loaded when they are first used, so `import anchorhold` costs next to nothing.
"""

from .version import __version__

TYPE_CHECKING = False  # typing takes a while to import, in which Ctrl-C would be a traceback
if TYPE_CHECKING:
    from typing import Any

    from .auditing.adml_table import algorithm1
    from .auditing.list_attack import attack_list
    from .auditing.one_image import attack
    from .auditing.run import audit
    from .auditing.smallest import smallest_perturbation
    from .config.listing import list_settings
    from .console import Console
    from .data.datasets import dataset
    from .data.splits import Dataset, Split
    from .errors import AnchorholdError
    from .index.embedding import embed
    from .index.exporting import export
    from .index.searching import search
    from .mining import mine
    from .model.card import model_card
    from .model.embedder import Embedder
    from .model.load import load
    from .model.wrap import wrap
    from .perturb.ascend import ascend
    from .perturb.ball import Ball
    from .perturb.problem import Ascent, Objective, Problem
    from .perturb.settings import Budget, Threat
    from .scores import ars, ers
    from .training.callbacks import Callback
    from .training.estimating import estimate
    from .training.fit import fit, resume
    from .training.own_loop import AdversarialBatch, adversary
    from .training.sweeping import sweep

_PLACES = {
    "AdversarialBatch": ("training.own_loop", "AdversarialBatch"),
    "AnchorholdError": ("errors", "AnchorholdError"),
    "Ascent": ("perturb.problem", "Ascent"),
    "Ball": ("perturb.ball", "Ball"),
    "Budget": ("perturb.settings", "Budget"),
    "Callback": ("training.callbacks", "Callback"),
    "Console": ("console", "Console"),
    "Dataset": ("data.datasets", "Dataset"),
    "Embedder": ("model.embedder", "Embedder"),
    "Objective": ("perturb.problem", "Objective"),
    "Problem": ("perturb.problem", "Problem"),
    "Split": ("data.datasets", "Split"),
    "Threat": ("perturb.settings", "Threat"),
    "adversary": ("training.own_loop", "adversary"),
    "algorithm1": ("auditing.adml_table", "algorithm1"),
    "ars": ("scores", "ars"),
    "ascend": ("perturb.ascend", "ascend"),
    "attack": ("auditing.one_image", "attack"),
    "attack_list": ("auditing.list_attack", "attack_list"),
    "audit": ("auditing.run", "audit"),
    "dataset": ("data.datasets", "dataset"),
    "embed": ("index.embedding", "embed"),
    "ers": ("scores", "ers"),
    "estimate": ("training.estimating", "estimate"),
    "export": ("index.exporting", "export"),
    "fit": ("training.fit", "fit"),
    "list_settings": ("config.listing", "list_settings"),
    "load": ("model.load", "load"),
    "mine": ("mining", "mine"),
    "model_card": ("model.card", "model_card"),
    "resume": ("training.fit", "resume"),
    "search": ("index.searching", "search"),
    "smallest_perturbation": ("auditing.smallest", "smallest_perturbation"),
    "sweep": ("training.sweeping", "sweep"),
    "wrap": ("model.wrap", "wrap"),
}

__all__ = [
    "AdversarialBatch",
    "AnchorholdError",
    "Ascent",
    "Ball",
    "Budget",
    "Callback",
    "Console",
    "Dataset",
    "Embedder",
    "Objective",
    "Problem",
    "Split",
    "Threat",
    "__version__",
    "adversary",
    "algorithm1",
    "ars",
    "ascend",
    "attack",
    "attack_list",
    "audit",
    "dataset",
    "embed",
    "ers",
    "estimate",
    "export",
    "fit",
    "list_settings",
    "load",
    "mine",
    "model_card",
    "resume",
    "search",
    "smallest_perturbation",
    "sweep",
    "wrap",
]


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module 'anchorhold' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
