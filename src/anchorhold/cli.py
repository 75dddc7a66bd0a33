"""The command line: parse, call, print. Torch is loaded only by the commands that need it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .errors import AnchorholdError, Interrupted

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """How a command may fail: one line and exit code 2 where the user can mend it, 130 where they stopped it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--debug" in args:  # it may stand anywhere
            args = ["--debug", *(word for word in args if word != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Interrupted, KeyboardInterrupt) as error:  # left to itself, typer exits without a word
            print(str(error) or "stopped", file=sys.stderr)
            raise typer.Exit(130) from None
        except AnchorholdError as error:
            if ctx.params["debug"]:
                raise
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Image retrieval that holds under attack: train, attack and score embedding models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Model = Annotated[str, typer.Argument(help="A run folder, a model file, BACKBONE=FILE, module:function or a timm name")]
Data = Annotated[str, typer.Option(help="cub, digits, gaussians, or a folder with a folder for each class")]
Root = Annotated[Path | None, typer.Option(help="Where the data set lies")]
Eps = Annotated[str, typer.Option(help="How far a pixel may move, of 1")]
Steps = Annotated[int, typer.Option(help="Steps of PGD")]
Method = Annotated[str, typer.Option(help="pgd or fgsm")]
Mean = Annotated[str, typer.Option(help="For your own module: the channels' means, such as .485,.456,.406")]
Std = Annotated[str, typer.Option(help="For your own module: their standard deviations")]
Size = Annotated[str, typer.Option(help="Side of the images it takes, or HEIGHT,WIDTH")]
Resize = Annotated[int | None, typer.Option(help="Files are resized to this square; by default to fit the model")]
Crop = Annotated[int | None, typer.Option(help="And this square is cut out of its middle")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated")]


def main() -> None:
    """Run the command line."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"anchorhold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="ANCHORHOLD_DEBUG", help="Show the traceback of an error, in any command")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit")
    ] = False,
) -> None:
    """Options of every command; `_Commands` reads them."""


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
    _put_data(changes, data, root)
    settings = settings_from(recipe, changes)
    images = dataset(settings.data.name, settings.data.root or None)
    run = fit(None, images, settings=settings, out=out or "", device=device, report=Console())
    _finished(run.path)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The run folder")],
    root: Annotated[Path | None, typer.Option(help="Where the data set lies now, if it has moved")] = None,
    device: Device = "auto",
) -> None:
    """Go on with a training that was stopped or killed."""
    from .console import Console
    from .training import resume as resume_run

    _finished(resume_run(run, root=root, device=device, report=Console()).path)


@app.command()
def audit(
    model: Model,
    data: Data,
    root: Root = None,
    protocol: Annotated[str, typer.Option(help="both, published (as in print) or corrected")] = "both",
    attacks: Annotated[
        str, typer.Option(help="Some of them, such as CA+,ES or CA+:w=5,QA-:m=2; by default the nine of ERS")
    ] = "",
    limit: Annotated[int, typer.Option(help="How many images are attacked, a sample over all classes")] = 1000,
    full: Annotated[bool, typer.Option("--full", help="Attack all images")] = False,
    eps: Eps = "8/255",
    alpha: Annotated[str, typer.Option(help="Length of a step")] = "3/255",
    steps: Steps = 32,
    method: Method = "pgd",
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    on_bad_image: Annotated[str, typer.Option(help="fail or skip")] = "fail",
    seed: Annotated[int, typer.Option(help="Another seed draws other samples and targets")] = 0,
    batch: Annotated[int, typer.Option(help="How many images are attacked at a time")] = 128,
    precision: Annotated[str, typer.Option(help="Of the ascent: auto (bf16 on a GPU), fp32 or bf16")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Where it is written; the same one again goes on")] = None,
    device: Device = "auto",
) -> None:
    """Say how robust a model is: clean metrics, the attacks of the papers, ERS and ARS with intervals."""
    from .auditing import audit as run_audit
    from .console import Console

    protocols = ("published", "corrected") if protocol == "both" else (protocol,)
    victim = _model(model, mean, std, size)
    out = out or Path("audits") / f"{_slug(model)}-{_slug(data)}"
    found = run_audit(
        victim,
        _data(data, root),
        protocols=protocols,
        attacks=_attacks(attacks),
        limit=0 if full else limit,
        eps=_number("--eps", eps),
        alpha=_number("--alpha", alpha),
        steps=steps,
        method=method,  # type: ignore[arg-type]  # it is checked there
        seed=seed,
        batch=batch,
        device=device,
        precision=precision,  # type: ignore[arg-type]
        out=out,
        resize=resize,
        crop=crop,
        on_bad_image=on_bad_image,  # type: ignore[arg-type]
        report=Console(),
    )
    print(found)
    print(f"\nwritten: {out / 'audit.json'}, samples.safetensors and examples.safetensors beside it")


@app.command()
def attack(
    model: Model,
    image: Annotated[str, typer.Argument(help="A file, or the number of an image in the data")],
    data: Data,
    goal: Annotated[str, typer.Option(help="CA+, CA-, QA+, QA-, TMA, ES, LTM, GTM, GTT, nearest or margin")] = "ES",
    root: Root = None,
    protocol: Annotated[str, typer.Option(help="published (as in print) or corrected")] = "corrected",
    class_: Annotated[str, typer.Option("--class", help="The class of a file that is not in the data")] = "",
    eps: Eps = "8/255",
    alpha: Annotated[str, typer.Option(help="Length of a step")] = "3/255",
    steps: Steps = 32,
    method: Method = "pgd",
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    seed: Annotated[int, typer.Option(help="Another seed draws other targets")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the perturbed image there, as PNG")] = None,
    device: Device = "auto",
) -> None:
    """Attack one image against a gallery, and show the list before and after."""
    from .auditing.single import attack_one
    from .console import Console
    from .settings import check

    check(save is None or save.suffix.lower() == ".png", "--save wants a .png: other formats lose the perturbation")
    done = attack_one(
        _model(model, mean, std, size),
        image,
        _data(data, root),
        goal,
        protocol=protocol,  # type: ignore[arg-type]  # it is checked there
        label=class_,
        eps=_number("--eps", eps),
        alpha=_number("--alpha", alpha),
        steps=steps,
        method=method,  # type: ignore[arg-type]
        seed=seed,
        device=device,
        resize=resize,
        crop=crop,
        report=Console(),
    )
    print(done)
    if save is not None:
        print(f"\nthe perturbed image: {done.save(save)}")


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
    branch = tree.setdefault(section, {}) if value is not None else None
    if isinstance(branch, dict):  # a section that --set made a value is named where the settings are built
        branch[key] = value


def _put_data(tree: dict[str, Any], data: str, root: Path | None) -> None:
    """DATA says which set it is and, where it is a folder, where it lies; --set must not say otherwise."""
    from .data.datasets import DATASETS
    from .settings import check

    folder = data not in DATASETS and Path(data).is_dir()
    name = "folder" if folder else data
    said = tree["data"] if isinstance(tree.get("data"), dict) else {}
    other = said.get("name", name)
    check(other == name, f"two data sets: {data} and --set data.name={other}; leave out the --set")
    placed = root is not None or "root" in said
    check(not (folder and placed), f"{data} is a folder already: leave out --root and data.root")
    _put(tree, "data", "name", name)
    _put(tree, "data", "root", data if folder else root and str(root))


def _attacks(text: str) -> dict[str, dict[str, Any]] | None:
    """`CA+:w=5,ES` as names with their settings; None where nothing was said."""
    from .settings import check

    chosen: dict[str, dict[str, Any]] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, *changes = each.split(":")
        # ES:D and ES:R are columns of one attack, and their letter is no setting.
        check(all("=" in change for change in changes), f"--attacks {each}: write settings as in CA+:w=5")
        pairs = (change.split("=", 1) for change in changes)
        chosen[name] = {key: int(value) if value.isdigit() else _number(f"{name}:{key}", value) for key, value in pairs}
    return chosen or None


def _number(option: str, text: str) -> float:
    """A number, or a fraction such as 8/255."""
    from fractions import Fraction

    from .settings import check

    try:
        return float(Fraction(text.replace(" ", "")))
    except (ValueError, ZeroDivisionError):
        check(False, f"{option} wants a number such as 8/255, got {text!r}")
        raise


def _numbers(option: str, text: str) -> list[float] | None:
    return [_number(option, part) for part in text.split(",")] if text else None


def _model(spec: str, mean: str, std: str, size: str) -> Any:
    from .model.named import load_model

    sides = _numbers("--size", size)
    return load_model(
        spec,
        mean=_numbers("--mean", mean),
        std=_numbers("--std", std),
        size=None if sides is None else [int(side) for side in (sides * 2 if len(sides) == 1 else sides)],
    )


def _data(name: str, root: Path | None) -> Any:
    """A data set by name; a folder, as audits take all of its images."""
    from .data.datasets import dataset

    return name if Path(name).is_dir() and root is None else dataset(name, root)


def _slug(text: str) -> str:
    """A name for a folder: a model in a run folder is called after that."""
    path = Path(text)
    path = path.parent if path.name == "model.safetensors" else path
    return path.name.removesuffix(".safetensors").replace(":", "-").replace("=", "-") or "here"


def _finished(path: Path) -> None:
    from .record import Run

    final = Run(path).read_json().get("final", {})
    if "r1" in final:
        epochs = "1 epoch" if final["epoch"] == 1 else f"{final['epoch']} epochs"
        print(f"R@1 {final['r1']:.1f}, R@2 {final['r2']:.1f}, mAP@R {final['map_r']:.1f} after {epochs}")
    print(f"run folder: {path}")
    print(f"the model:  anchorhold.load({str(path)!r})")


if __name__ == "__main__":
    main()
