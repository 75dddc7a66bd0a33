"""The command line: parse, call, print. Torch is loaded only by the commands that need it."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import AnchorholdError, Interrupted

__all__ = ["app", "main"]

app = typer.Typer(
    help="Image retrieval that holds under attack: train, attack and score embedding models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated")]


def main() -> None:
    """Run the command line; an error the user can mend is one line and exit code 2."""
    try:
        app()
    except Interrupted as error:
        print(error, file=sys.stderr)
        sys.exit(130)
    except AnchorholdError as error:
        if os.environ.get("ANCHORHOLD_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"anchorhold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit")
    ] = False,
) -> None:
    if debug:
        os.environ["ANCHORHOLD_DEBUG"] = "1"


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Another seed trains and attacks other models")] = 0,
    out: Annotated[Path, typer.Option(help="Where the run folders go")] = Path("runs/demo"),
) -> None:
    """Train on handwritten digits, naturally and robustly, and attack both: two minutes, no download."""
    from .console import Console
    from .demo import run_demo, table

    result = run_demo(out, seed=seed, report=Console())
    print(table(result))
    print(f"\nruns: {result['natural']['run']} and {result['robust']['run']}; numbers: {out / 'demo.json'}")
    print("next: anchorhold train FOLDER, with a folder of images for each class")


@app.command()
def train(
    data: Annotated[str, typer.Argument(help="cub, digits, gaussians, or a folder with a folder for each class")],
    root: Annotated[Path | None, typer.Option(help="Where the data set lies")] = None,
    recipe: Annotated[str, typer.Option(help="A name from `anchorhold recipes`, or a TOML file")] = "hm-lga",
    weights: Annotated[str | None, typer.Option(help="imagenet, timm:NAME, a weights file, or none")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder")] = None,
    epochs: Annotated[int | None, typer.Option(help="Short for --set train.epochs=N")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set train.seed=N")] = None,
    on_bad_image: Annotated[str | None, typer.Option(help="fail or skip")] = None,
    set_: Set = [],  # noqa: B006
    device: Device = "auto",
) -> None:
    """Train a robust embedding model; everything about it goes into a run folder."""
    from .console import Console
    from .data.datasets import dataset
    from .settings import parse_assignments, settings_from
    from .training import fit

    changes = parse_assignments(set_)
    _put(changes, "train", "epochs", epochs)
    _put(changes, "train", "seed", seed)
    _put(changes, "data", "on_bad_image", on_bad_image)
    _put(changes, "model", "weights", "" if weights == "none" else weights)
    folder = Path(data).is_dir() and data not in ("cub", "digits", "gaussians")
    _put(changes, "data", "name", "folder" if folder else data)
    _put(changes, "data", "root", data if folder else str(root or ""))
    settings = settings_from(recipe, changes)
    images = dataset(settings.data.name, settings.data.root or None, seed=settings.train.seed)
    run = fit(None, images, settings=settings, out=out or "", device=device, report=Console())
    _finished(run.path)


@app.command()
def resume(run: Annotated[Path, typer.Argument(help="The run folder")], device: Device = "auto") -> None:
    """Go on with a training that was stopped or killed."""
    from .console import Console
    from .training import resume as resume_run

    _finished(resume_run(run, device=device, report=Console()).path)


@app.command()
def recipes(
    action: Annotated[str, typer.Argument(help="`show` to see one")] = "",
    name: Annotated[str, typer.Argument(help="Which")] = "",
) -> None:
    """List the recipes, or show one: `anchorhold recipes show hm-lga`."""
    import tomllib

    from .settings import check, recipe_names, recipe_text

    if action:
        check(action == "show" and bool(name), "usage: anchorhold recipes, or anchorhold recipes show NAME")
        print(recipe_text(name).rstrip())
        return
    for each in recipe_names():
        about = tomllib.loads(recipe_text(each)).get("about")
        if about:  # a recipe without it is a base for others
            print(f"{each:12} {about}")


@app.command()
def doctor() -> None:
    """Say what this machine has, and what is missing."""
    from .doctor import findings

    healthy = True
    for sign, text in findings():
        print(f"{sign} {text}")
        healthy = healthy and sign != "✗"
    raise typer.Exit(0 if healthy else 1)


def _put(tree: dict[str, Any], section: str, key: str, value: object) -> None:
    """An option of its own beats the same key under --set."""
    if value is not None:
        tree.setdefault(section, {})[key] = value


def _finished(path: Path) -> None:
    from .record import Run

    final = Run(path).read_json().get("final", {})
    if "r1" in final:
        print(f"R@1 {final['r1']:.1f}, R@2 {final['r2']:.1f}, mAP@R {final['map_r']:.1f} after {final['epoch']} epochs")
    print(f"run folder: {path}")
    print(f"the model:  anchorhold.load({str(path)!r})")


if __name__ == "__main__":
    main()
