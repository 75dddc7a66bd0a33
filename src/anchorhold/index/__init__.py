"""A model at work: embed images into an index, search it, export the model."""

from .embedding import embed
from .exporting import export
from .folder import Index, Named
from .searching import Found, Hit, search

__all__ = ["Found", "Hit", "Index", "Named", "embed", "export", "search"]
