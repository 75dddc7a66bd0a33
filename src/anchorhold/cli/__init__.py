"""The command line: parse, call, print. Torch is loaded only by the commands that need it."""

import os  # noqa: I001 (help lists commands in the order of their import)
import sys
import traceback

from . import train, audit, strong, index, results, about  # noqa: F401 (each adds its commands)
from .app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; of several ranks the first has a voice, the others for their errors only."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        app()
        return
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the end)
    code: object = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    except BaseException:  # left to itself it would wait for ranks that wait for it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Left to its own end, a process that gloo connected aborts now and then, long after the work is done.
    os._exit(code if isinstance(code, int) else 1)
