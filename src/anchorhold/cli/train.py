"""demo, train and resume."""

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from .app import Device, Set, app


@app.command()
def demo(
    what: Annotated[str, typer.Argument(help="digits, or gaussians: the toy of paper 003")] = "digits",
    seed: Annotated[int, typer.Option(help="Another seed trains and attacks other models")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where the run folders go (runs/demo or runs/gaussians)")] = None,
    side: Annotated[int | None, typer.Option(help="gaussians: 3 × side × side inputs (side 112)")] = None,
) -> None:
    """Train on handwritten digits, naturally and robustly, and attack both: a minute or two, no download."""
    from ..console import Console
    from ..demo import run_demo, table, write_pages
    from ..settings import check, nearest

    check(what in ("digits", "gaussians"), f"no demonstration {what!r}; {nearest(what, ('digits', 'gaussians'))}")
    if what == "gaussians":
        _gaussians(seed, out or Path("runs/gaussians"), side)
        return
    check(side is None, "--side is of the demonstration gaussians: leave it out")
    out = out or Path("runs/demo")
    result = run_demo(out, seed=seed, report=Console())
    print(table(result))
    pages = write_pages(out, result, Console())
    print(f"\nruns: {result['natural']['run']} and {result['robust']['run']}; numbers: {out / 'demo.json'}")
    print(f"the pages, to open in a browser: {' and '.join(map(str, pages))}")
    print("next: anchorhold train FOLDER, with a folder of images for each class")


def _gaussians(seed: int, out: Path, side: int | None) -> None:
    from ..console import Console
    from ..demo_gaussians import SIDE, run_gaussians, table

    result = run_gaussians(out, seed=seed, side=SIDE if side is None else side, report=Console())
    print(table(result))
    print(f"\nruns: {result['natural']['run']} and {result['robust']['run']}; numbers: {out / 'gaussians.json'}")
    if "figure" in result:
        print(f"the figure: {result['figure']}")


@app.command()
def train(
    data: Annotated[str, typer.Argument(help="cub, cars, sop, inshop, digits, …, a folder of class folders, or a CSV")],
    root: Annotated[Path | None, typer.Option(help="Where the data set lies")] = None,
    recipe: Annotated[str | None, typer.Option(help="One of `anchorhold recipes` (hm-lga), or a TOML file")] = None,
    row: Annotated[str | None, typer.Option(help="Instead: a published row, one of `anchorhold recipes rows`")] = None,
    weights: Annotated[str | None, typer.Option(help="imagenet, timm:NAME, a file, a run folder, or none")] = None,
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
    from ..layers import parse_assignments, settings_from
    from ..rows import check_row, row_named, row_settings
    from ..settings import check
    from ..training import fit

    check(recipe is None or row is None, "--row brings its recipe along: leave out --recipe")
    published = None if row is None else row_named(row)
    changes = parse_assignments(set_) if published is None else row_settings(published, set_)
    _put(changes, "train", "epochs", epochs)
    _put(changes, "train", "seed", seed)
    _put(changes, "data", "on_bad_image", on_bad_image)
    _put(changes, "model", "weights", "" if weights == "none" else weights)
    _put_data(changes, data, root)
    settings = settings_from(published.recipe if published else recipe or "hm-lga", changes)
    if published is not None:
        check_row(published, settings)
        row = published.id
        out = out or Path("runs") / f"{row.replace('/', '-')}-{settings.train.seed}"
    images = dataset(settings.data.name, settings.data.root or None, held_out=settings.data.held_out)
    run = fit(None, images, settings=settings, out=out or "", row=row or "", device=device, report=Console())
    if published is not None and published.data == settings.data.name:
        numbers = [f"{name} {published.printed[name]:.1f}" for name in ("R@1", "ERS") if name in published.printed]
        print(f"{row} in print: {', '.join(numbers) or published.note}")
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

    table = data not in DATASETS and data.endswith(".csv")
    folder = table or (data not in DATASETS and Path(data).is_dir())
    name = "csv" if table else "folder" if folder else data
    said = tree["data"] if isinstance(tree.get("data"), dict) else {}
    other = said.get("name", name)
    check(other == name, f"two data sets: {data} and --set data.name={other}; leave out the --set")
    placed = root is not None or "root" in said
    check(not (folder and placed), f"{data} is a {name} already: leave out --root and data.root")
    _put(tree, "data", "name", name)
    _put(tree, "data", "root", data if folder else root and str(root))


def _finished(path: Path) -> None:
    from ..ranks import Ranks, started
    from ..record import Run
    from ..stopping import lost

    if not Ranks(*started()).first:  # it may not see the folder
        return
    info = Run(path).read_json()
    final, before = info.get("final", {}), info.get("start", {}).get("features_r1")
    epochs = "1 epoch" if final.get("epoch") == 1 else f"{final.get('epoch')} epochs"
    lines = {
        "r1": "R@1 {r1:.1f}, R@2 {r2:.1f}, mAP@R {map_r:.1f}",
        "accuracy": "accuracy {accuracy:.1f} %, under attack {accuracy_attacked:.1f} %, on held-out images",
        "drift": "feature drift {drift:.3f}, under attack {drift_attacked:.3f}, on held-out images",
        "features_r1": "R@1 {features_r1:.1f} on the test images by the features, without a head,",
    }
    for name, text in lines.items():
        if final.get(name) is not None:
            print(f"{text.format(**final)} after {epochs}")
    print(f"run folder: {path}")
    if text := lost(before, final.get("features_r1")):
        print(text)
    elif "accuracy" in final or "drift" in final:  # a backbone to start from; its head is not trained
        print(f"next: anchorhold train DATA --weights {quote(str(path))}")
    else:
        print(f"the model:  anchorhold.load({str(path)!r})")
