"""The command line: parse, call, print. Torch is loaded only by the commands that need it."""

from . import train, audit, strong, index, results, about  # noqa: F401, I001 (each adds its commands, in the order that help lists them)
from .app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    app()
