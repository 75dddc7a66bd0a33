"""Entry point of the command line. Only the commands that need torch load it."""

import os  # noqa: I001 (help lists commands in the order of their import)
import sys
import traceback

from ..errors import RunError, from_environment
from . import train, audit, listed, strong, index, push, results, about  # noqa: F401 (each adds its commands)
from .app import app

__all__ = ["app", "main"]


def _distributed() -> bool:
    try:
        return from_environment("WORLD_SIZE", 1, 1) > 1
    except RunError:  # the application reports it
        return False


def main() -> None:
    """Run the command line. With several ranks only the first prints; the others report errors only."""
    if not _distributed():
        app()
        return
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the end)
    code: object = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    except BaseException:  # a normal exit would deadlock with the other ranks
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit sometimes aborts in gloo, after the work is done.
    os._exit(code if isinstance(code, int) else 1)
