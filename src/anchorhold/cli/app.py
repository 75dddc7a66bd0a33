"""The application: how a command fails, and the options that several commands share."""

import errno
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..console import Console, Patient
from ..errors import AnchorholdError, Interrupted, RunError

__all__ = ["Commands", "app", "number", "numbers"]


# What the system refuses and no code of ours is to blame for: access, names too long even to look for, a full disk.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOSPC}


class Commands(TyperGroup):
    """How a command may fail: one line and exit code 2 where the user can mend it, 130 where they stopped it."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with redirect_stdout(sys.stdout and Patient(sys.stdout)):  # None where it is closed, as by >&-
            return super().main(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:  # it may stand anywhere
            args = ["--debug", *(word for word in args if word != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Interrupted, KeyboardInterrupt) as error:  # left to itself, typer exits without a word
            if os.environ.get("RANK", "0") == "0":  # all ranks stop together
                Console().say(str(error) or "stopped")
            raise typer.Exit(130) from None
        except (AnchorholdError, OSError) as error:
            text = _told(error)
            if ctx.params["debug"] or not text:
                raise
            rank = os.environ.get("RANK", "0")
            Console().say(f"error{f' on rank {rank}' if rank != '0' else ''}: {text}")
            raise typer.Exit(2) from None


def _told(error: AnchorholdError | OSError) -> str:
    """The one line for an error that the user can mend; "" where a traceback says more."""
    if isinstance(error, AnchorholdError):
        return str(error)
    if error.errno not in _REFUSED:
        return ""
    said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{said}; --debug says where it is needed"


app = typer.Typer(
    cls=Commands,
    help="Image retrieval that holds under attack: train, attack and score embedding models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Model = Annotated[str, typer.Argument(help="A run folder, a model file, BACKBONE=FILE, module:function or a timm name")]
Data = Annotated[str, typer.Option(help="cub, cars, sop, inshop, digits, …, a folder of class folders, or a CSV")]
Root = Annotated[Path | None, typer.Option(help="Where the data set lies")]
HeldOut = Annotated[int, typer.Option(help="Test on the last so many training classes, not on the test split")]
Budget = Annotated[
    str, typer.Option(help="standard: ε 8/255, 32 steps of 3/255; adml: ε 0.01, 5 steps of 2ε/5 from a random start")
]
Eps = Annotated[str, typer.Option(help="How far a pixel may move, of 1, instead of the budget's")]
Alpha = Annotated[str, typer.Option(help="Length of a step, instead of the budget's")]
Steps = Annotated[int | None, typer.Option(help="Steps of PGD, instead of the budget's")]
Method = Annotated[str, typer.Option(help="pgd, fgsm or cw (C&W, 50 iterations)")]
Mean = Annotated[str, typer.Option(help="For your own module: the channels' means, such as .485,.456,.406")]
Std = Annotated[str, typer.Option(help="For your own module: their standard deviations")]
Size = Annotated[str, typer.Option(help="Side of the images it takes, or HEIGHT,WIDTH")]
Resize = Annotated[int | None, typer.Option(help="Files are resized to this square; by default to fit the model")]
Crop = Annotated[int | None, typer.Option(help="And this square is cut out of its middle")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated")]


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        print(f"anchorhold {__version__}")
        raise typer.Exit


RANKED = ("train", "resume", "audit", "embed")  # what several ranks can do together


@app.callback()
def _options(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="ANCHORHOLD_DEBUG", help="Show the traceback of an error, in any command")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit")
    ] = False,
) -> None:
    """Options of every command; `Commands` reads them."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and ctx.invoked_subcommand not in RANKED:
        raise RunError(f"{ctx.invoked_subcommand} is for one process; torchrun is for {', '.join(RANKED)}")


def number(option: str, text: str) -> float:
    """A number, or a fraction such as 8/255."""
    from fractions import Fraction

    from ..settings import check

    try:
        return float(Fraction(text.replace(" ", "")))
    except (ValueError, ZeroDivisionError):
        check(False, f"{option} wants a number such as 8/255, got {text!r}")
        raise


def numbers(option: str, text: str) -> list[float] | None:
    return [number(option, part) for part in text.split(",")] if text else None
