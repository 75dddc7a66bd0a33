"""`python -m anchorhold` and the command `anchorhold`. Importing takes a moment, and Ctrl-C may come within it."""

import os
import signal
import sys

__all__ = ["main"]

_begun = False


def _interrupted(number: int, frame: object) -> None:
    """End at once while anything is imported: nothing has to be saved, and libraries swallow the exception."""
    if _begun and not any(_half_imported(module) for module in list(sys.modules.values())):
        raise KeyboardInterrupt
    if os.environ.get("RANK", "0") == "0":  # all ranks stop together; one message is enough
        os.write(2, b"stopped\n")
    os._exit(130)


def _half_imported(module: object) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


_program = __name__ == "__main__" or os.path.basename(sys.argv[0]).startswith("anchorhold")
# Not where this is only imported, nor in a background job, which ignores Ctrl-C, nor where there is a handler already.
if _program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted)


def main() -> None:
    """Run the command line, once it is imported."""
    global _begun
    from .cli.main import main as run

    _begun = True
    try:
        run()
    except KeyboardInterrupt:  # between two steps of the command line, which catches its own
        _begun = False
        _interrupted(0, None)


if __name__ == "__main__":
    main()
