"""The version, in a module of its own: records carry it, and the package loads nothing for it."""

__all__ = ["__version__"]

__version__ = "0.2.0"
