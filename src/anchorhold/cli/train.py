"""demo, train and resume."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Device, Set, app


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Another seed trains and attacks other models")] = 0,
    out: Annotated[Path, typer.Option(help="Where the run folders go")] = Path("runs/demo"),
) -> None:
    """Train on handwritten digits, naturally and robustly, and attack both: two minutes, no download."""
    from ..console import Console
    from ..demo import run_demo, table

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
    from ..console import Console
    from ..data.datasets import dataset
    from ..settings import parse_assignments, settings_from
    from ..training import fit

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
    from ..console import Console
    from ..training import resume as resume_run

    _finished(resume_run(run, root=root, device=device, report=Console()).path)


def _put(tree: dict[str, Any], section: str, key: str, value: object) -> None:
    """An option of its own beats the same key under --set."""
    branch = tree.setdefault(section, {}) if value is not None else None
    if isinstance(branch, dict):  # a section that --set made a value is named where the settings are built
        branch[key] = value


def _put_data(tree: dict[str, Any], data: str, root: Path | None) -> None:
    """DATA says which set it is and, where it is a folder, where it lies; --set must not say otherwise."""
    from ..data.datasets import DATASETS
    from ..settings import check

    folder = data not in DATASETS and Path(data).is_dir()
    name = "folder" if folder else data
    said = tree["data"] if isinstance(tree.get("data"), dict) else {}
    other = said.get("name", name)
    check(other == name, f"two data sets: {data} and --set data.name={other}; leave out the --set")
    placed = root is not None or "root" in said
    check(not (folder and placed), f"{data} is a folder already: leave out --root and data.root")
    _put(tree, "data", "name", name)
    _put(tree, "data", "root", data if folder else root and str(root))


def _finished(path: Path) -> None:
    from ..record import Run

    final = Run(path).read_json().get("final", {})
    if "r1" in final:
        epochs = "1 epoch" if final["epoch"] == 1 else f"{final['epoch']} epochs"
        print(f"R@1 {final['r1']:.1f}, R@2 {final['r2']:.1f}, mAP@R {final['map_r']:.1f} after {epochs}")
    print(f"run folder: {path}")
    print(f"the model:  anchorhold.load({str(path)!r})")
