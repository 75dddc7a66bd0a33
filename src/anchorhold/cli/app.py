"""The Typer application: error handling, and the options that several commands share."""

import errno
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from ..config.numbers import parse_number
from ..console import Console, Patient, Visible, shown
from ..errors import AnchorholdError, Interrupted, RunError, from_environment, lacks_memory
from ..interface import command_line

__all__ = ["Commands", "app", "number", "numbers", "threat_options"]

Function = TypeVar("Function", bound=Callable[..., Any])

# Errors of the file system, not of the program: access denied, names too long, circular links, a full disk.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_REFUSED |= {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


# What typer raises for a command line that it cannot read. Some versions bring a click of their own.
_Misused: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "UsageError")
_PLAIN = {
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
    r" \(Possible options?: (--[\w-]+)\)": r", did you mean \1?",
    r"\. Did you mean '(\w+)'": r", did you mean \1",
}


class Commands(TyperGroup):
    """Handles errors: one line and exit code 2 if you can fix it, 130 after an interrupt, else a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # The stream is None if it is closed, e.g. by >&-
        with command_line(), redirect_stdout(sys.stdout and Patient(sys.stdout)):
            return super().main(*args, **kwargs)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:  # while help is drawn, or before a command begins
            Console().say("stopped")
            raise typer.Exit(130) from None
        except _Misused as error:  # an unknown option before the command
            if not (text := _message(error)):
                raise
            raise _told(text) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:  # accepted anywhere on the command line
            args = ["--debug", *(word for word in args if word != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Interrupted, KeyboardInterrupt) as error:  # typer would exit without a message
            if os.environ.get("RANK", "0") == "0":  # all ranks stop together; one message is enough
                Console().say(shown(str(error)) or "stopped")
            raise typer.Exit(130) from None
        except (Exception, SystemExit) as error:
            if isinstance(error, _Misused):
                error.ctx = getattr(error, "ctx", None) or ctx  # some have none
            text = _message(error)
            if ctx.params["debug"] or not text:
                raise
            raise _told(text) from None


def _told(text: str) -> typer.Exit:
    """Print the line of an error; the exit that follows."""
    rank = os.environ.get("RANK", "0")
    Console().say(f"error{f' on rank {rank}' if rank != '0' else ''}: {text}")
    return typer.Exit(2)


def _message(error: BaseException) -> str:
    """The one-line message for an error that the user can fix; "" if a traceback is more useful."""
    if isinstance(error, _Misused):
        return _misused(error)
    if isinstance(error, AnchorholdError):
        return shown(str(error))
    if isinstance(error, SystemExit):  # no command of ours ends this way
        return f"your own code called sys.exit({error.code!r}) while this command ran it; remove that call"
    if lacks_memory(error):
        reason = shown((str(error).strip().splitlines() or [type(error).__name__])[0][:160])
        return (
            f"out of memory ({reason}); free some memory, or use a smaller --batch; in training, set a smaller "
            "batch.pairs, fewer data.workers, or read images from disk with --set data.store=stream"
        )
    if not isinstance(error, OSError) or error.errno not in _REFUSED:
        return ""
    named = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return shown(f"{named}; run again with --debug to see where")


def _misused(error: Any) -> str:
    """What is wrong with a command line, and whose help to read; "" where the help itself is shown."""
    said = error.format_message().rstrip(".")
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    for theirs, ours in _PLAIN.items():
        said = re.sub(theirs, ours, said)
    command = "" if error.ctx is None else error.ctx.info_name if error.ctx.parent else error.ctx.invoked_subcommand
    return shown(f"{said[:1].lower()}{said[1:]}; see `anchorhold {f'{command} ' if command else ''}--help`")


class _Command(TyperCommand):
    """A command whose output has its control characters escaped; help keeps its colours."""

    def invoke(self, ctx: Any) -> Any:
        with redirect_stdout(sys.stdout and Visible(sys.stdout)):
            return super().invoke(ctx)


class _App(typer.Typer):
    def command(self, *args: Any, example: str = "", **kwargs: Any) -> Callable[[Function], Function]:
        """Register a command; help shows the example as a paragraph of its own, above the options."""

        def register(function: Function) -> Function:
            told = {"cls": _Command, "help": f"{cleandoc(function.__doc__ or '')}\n\nExample: {example}", **kwargs}
            return super(_App, self).command(*args, **told)(function)

        return register


app = _App(
    cls=Commands,
    help="Train image retrieval models that resist attacks, and measure how robust any model is.\n\n"
    "Example: anchorhold demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N")]
Model = Annotated[
    str,
    typer.Argument(
        help="A run folder, a model file, hf:owner/name, BACKBONE=FILE, module:function, a timm name, "
        "open_clip:NAME/TAG or transformers:OWNER/NAME"
    ),
]
Data = Annotated[
    str, typer.Option(help="cub, cars, sop, inshop, digits, …, a folder of class folders, a CSV, or module:function")
]
Root = Annotated[Path | None, typer.Option(help="Folder of the data set")]
HeldOut = Annotated[int, typer.Option(help="Evaluate on the last N training classes, not on the test split")]
ThreatName = Annotated[
    str, typer.Option(help="standard (ε 8/255, 32 steps) or adml (ε 0.01, 5 steps from a random start)")
]
Eps = Annotated[
    str, typer.Option(help="Largest change of a pixel (of the image with --norm l2), e.g. 4/255; default 8/255")
]
Alpha = Annotated[
    str, typer.Option(help="Step size of PGD, e.g. 1/255; default: 3/8 of ε (adml: 2/5), or 2.5 ε/steps with --norm l2")
]
Steps = Annotated[
    int | None,
    typer.Option(help="PGD steps (default 32), C&W iterations, or queries of square and nes (default 1000)"),
]
Norm = Annotated[str, typer.Option(help="linf limits the change of each pixel, l2 of the whole image; l2 needs --eps")]
Method = Annotated[str, typer.Option(help="pgd, fgsm (one step of ε), cw (C&W), square or nes (no gradients)")]
Mean = Annotated[str, typer.Option(help="Channel means that your own module expects, e.g. .485,.456,.406")]
Std = Annotated[str, typer.Option(help="Channel standard deviations that your own module expects, e.g. .229,.224,.225")]
Size = Annotated[str, typer.Option(help="Input size of the model: SIDE or HEIGHT,WIDTH")]
Resize = Annotated[int | None, typer.Option(help="Resize image files to this square; default: the model's own")]
Crop = Annotated[int | None, typer.Option(help="After resizing, keep this central square; default: the model's own")]
Classes = Annotated[
    str,
    typer.Option(help="For a folder or CSV that the model was trained on: unseen (only its test classes) or all"),
]
Track = Annotated[
    list[str], typer.Option(metavar="NAME", help="Track every epoch: tensorboard, or module:thing of yours; repeatable")
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, e.g. train.seed=1; repeatable; `anchorhold settings` lists all",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from ..version import __version__

        print(f"anchorhold {__version__}")
        raise typer.Exit


RANKED = ("train", "resume", "audit", "embed")  # the commands that torchrun can start


@app.callback()
def _options(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="ANCHORHOLD_DEBUG", help="Show the full traceback of an error")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Options of every command; `Commands` reads them."""
    if from_environment("WORLD_SIZE", 1, 1) > 1 and ctx.invoked_subcommand not in RANKED:
        raise RunError(f"{ctx.invoked_subcommand} runs in one process; use torchrun only for {', '.join(RANKED)}")


def number(option: str, text: str) -> float:
    """A number from the command line, as a decimal or a fraction such as 8/255."""
    from ..errors import brief, check

    try:
        return float(parse_number(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        check(False, f"{option} needs a number such as 8/255, got {brief(text)}")
        raise


def numbers(option: str, text: str) -> list[float] | None:
    """Numbers from the command line, separated by commas; None for empty text."""
    return [number(option, part) for part in text.split(",")] if text else None


def model_of(spec: str, mean: str, std: str, size: str, option: str = "--") -> Any:
    """The model that a command line names, with what is said around it."""
    from ..model.load import load_model

    sides = numbers("--size", size)
    return load_model(
        spec,
        mean=numbers(f"{option}mean", mean),
        std=numbers(f"{option}std", std),
        size=None if sides is None else [int(side) for side in (sides * 2 if len(sides) == 1 else sides)],
    )


def threat_options(name: str, eps: str, norm: str, alpha: str, steps: int | None) -> dict[str, Any]:
    """What a command line says about the threat, as arguments of `audit` and `attack`."""
    from ..errors import check
    from ..perturb.settings import Threat

    check(norm in ("linf", "l2"), f"--norm {norm}: there are linf and l2")
    check(norm == "linf" or bool(eps), "--norm l2 needs --eps, the length of the whole change, such as --eps 0.5")
    check(norm == "linf" or name == "standard", f"--threat {name} is a threat in Linf: leave --norm out")
    radius, step = (number(option, text) if text else None for option, text in (("--eps", eps), ("--alpha", alpha)))
    threat = name if norm == "linf" else Threat(radius or 0.0, "l2")
    return {"threat": threat, "eps": radius, "alpha": step, "steps": steps}
