"""The commands demo, train and resume."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Device, Mean, Set, Size, Std, Track, app, model_of

if TYPE_CHECKING:
    from ..data.splits import Dataset


@app.command(example="anchorhold demo")
def demo(
    what: Annotated[str, typer.Argument(help="digits, or gaussians: the toy data of ADML")] = "digits",
    seed: Annotated[int, typer.Option(help="Seed of training and attacks")] = 0,
    out: Annotated[Path | None, typer.Option(help="Output folder; default: runs/demo or runs/gaussians")] = None,
    side: Annotated[
        int | None, typer.Option(help="With gaussians: height and width of the inputs; default: 112")
    ] = None,
) -> None:
    """See in a minute or two what robust training does, on handwritten digits, without a download.

    The demo trains a natural and a robust model, attacks both, and writes a report page for each.
    """
    from ..console import Console
    from ..demo.digits import run_demo, table, write_pages
    from ..errors import check, nearest

    check(what in ("digits", "gaussians"), f"no demo {what!r}; {nearest(what, ('digits', 'gaussians'))}")
    if what == "gaussians":
        _gaussians(seed, out or Path("runs/gaussians"), side)
        return
    check(side is None, "--side is only for `anchorhold demo gaussians`; leave it out")
    out = out or Path("runs/demo")
    result = run_demo(out, seed=seed, report=Console())
    print(table(result))
    pages = write_pages(out, result, Console())
    print(f"\nruns: {result['natural']['run']} and {result['robust']['run']}; numbers: {out / 'demo.json'}")
    print(f"report pages, for your browser: {' and '.join(map(str, pages))}")
    print("next: anchorhold train FOLDER, where FOLDER has one folder of images for each class")


def _gaussians(seed: int, out: Path, side: int | None) -> None:
    from ..console import Console
    from ..demo.gaussians import SIDE, run_gaussians, table

    result = run_gaussians(out, seed=seed, side=SIDE if side is None else side, report=Console())
    print(table(result))
    print(f"\nruns: {result['natural']['run']} and {result['robust']['run']}; numbers: {out / 'gaussians.json'}")
    if "figure" in result:
        print(f"figure: {result['figure']}")


@app.command(example="anchorhold train digits --epochs 3 --out runs/digits")
def train(
    data: Annotated[
        str,
        typer.Argument(help="cub, cars, sop, inshop, digits, …, a folder of class folders, a CSV, or module:function"),
    ],
    root: Annotated[Path | None, typer.Option(help="Folder of the data set")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe from `anchorhold recipes`, or a TOML file; default: robust")
    ] = None,
    row: Annotated[
        str | None, typer.Option(help="Reproduce a published result; `anchorhold recipes rows` lists their names")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model to start from: your own, module:function, or as `audit` takes it")
    ] = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    weights: Annotated[
        str | None,
        typer.Option(help="Weights to start from: imagenet, timm:NAME, hf:owner/name, a file, a run folder or none"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/DATA-RECIPE-SEED")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Number of passes over the training images; same as --set train.epochs=N")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random choices; same as --set train.seed=N")] = None,
    on_bad_image: Annotated[str | None, typer.Option(help="Unreadable images: fail or skip")] = None,
    set_: Set = [],  # noqa: B006
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time a few steps and say how long training will take; write nothing")
    ] = False,
    track: Track = [],  # noqa: B006
    device: Device = "auto",
) -> None:
    """Train a robust image retrieval model on a data set or on your own folder of images.

    Your folder needs one folder of images for each class. Settings, metrics and weights go into a run folder.
    """
    from ..config.recipes import parse_assignments, settings_from, usual_recipe
    from ..console import Console
    from ..data.datasets import dataset
    from ..errors import check
    from ..reproduce.rows import check_row, row_named, row_settings
    from ..training.estimating import estimate
    from ..training.fit import fit
    from ..training.preparing import uses_no_labels

    check(
        model is None or (weights is None and row is None), "--model brings its weights: leave out --weights and --row"
    )
    check(model is not None or not (mean or std or size), "--mean, --std and --size are for --model: leave them out")
    check(recipe is None or row is None, "--row has its own recipe; leave out --recipe")
    published = None if row is None else row_named(row)
    changes = parse_assignments(set_) if published is None else row_settings(published, set_)
    _put(changes, "train", "epochs", epochs)
    _put(changes, "train", "seed", seed)
    _put(changes, "data", "on_bad_image", on_bad_image)
    _put(changes, "model", "weights", "" if weights == "none" else weights)
    changes, images = _with_own_data(_put_data(changes, data, root))
    by = published.recipe if published else recipe or usual_recipe(changes)
    settings = settings_from(by, changes)
    if published is not None:
        check_row(published, settings)
        row = published.id
        out = out or Path("runs") / f"{row.replace('/', '-')}-{settings.train.seed}"
    loose = settings.data.name == "folder" and uses_no_labels(by, changes)
    options: dict[str, Any] = {"held_out": settings.data.held_out} | ({"labels": False} if loose else {})
    images = images or dataset(settings.data.name, settings.data.root or None, **options)
    own = model_of(model, mean, std, size) if model else None
    how: dict[str, Any] = {"overrides": changes, "row": row or "", "device": device, "report": Console()}
    if dry_run:
        print(estimate(own, images, by, **how))
        return
    run = fit(own, images, by, out or "", callbacks=track, **how)
    if published is not None and published.data == settings.data.name:
        numbers = [f"{name} {published.published[name]:.1f}" for name in ("R@1", "ERS") if name in published.published]
        print(f"{row}: the paper reports {', '.join(numbers) or published.note}")
    _finished(run.path)


@app.command(example="anchorhold resume runs/digits")
def resume(
    run: Annotated[Path, typer.Argument(help="Run folder")],
    root: Annotated[Path | None, typer.Option(help="New location of the data set, if it has moved")] = None,
    model: Annotated[str | None, typer.Option(help="Your own module, if the run trains one: module:function")] = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    teacher: Annotated[Path | None, typer.Option(help="New location of defence.teacher, if it has moved")] = None,
    allow: Annotated[
        list[str],
        typer.Option(metavar="MODULE:THING", help="Code or hf: weights named in run.json that you trust; repeatable"),
    ] = [],  # noqa: B006
    track: Track = [],  # noqa: B006
    device: Device = "auto",
) -> None:
    """Resume a training that was stopped or killed, from its last checkpoint."""
    from ..console import Console
    from ..training.fit import resume as resume_run

    mine = model_of(model, mean, std, size) if model else None
    own = {"teacher": str(teacher)} if teacher else {}
    found = resume_run(
        run, model=mine, root=root, device=device, report=Console(), allow=allow, own=own, callbacks=track
    )
    _finished(found.path)


def _put(tree: dict[str, Any], section: str, key: str, value: object) -> None:
    """Set a key; a dedicated option such as --epochs overrides the same key under --set."""
    branch = tree.setdefault(section, {}) if value is not None else None
    if isinstance(branch, dict):  # otherwise --set gave the section a value, which `build` reports
        branch[key] = value


def _put_data(tree: dict[str, Any], data: str, root: Path | None) -> dict[str, Any]:
    """Set data.name and data.root from DATA and --root; refuse a --set that contradicts them."""
    from ..data.datasets import DATASETS
    from ..errors import check

    table = data not in DATASETS and data.endswith(".csv")
    folder = table or (data not in DATASETS and Path(data).is_dir())
    name = "csv" if table else "folder" if folder else data
    given = tree["data"] if isinstance(tree.get("data"), dict) else {}
    other = given.get("name", name)
    check(other == name, f"you gave two data sets, {data} and --set data.name={other}; leave out the --set")
    placed = root is not None or "root" in given
    check(not (folder and placed), f"{data} is the {name} itself; leave out --root and data.root")
    _put(tree, "data", "name", name)
    _put(tree, "data", "root", data if folder else root and str(root))
    return tree


def _with_own_data(changes: dict[str, Any]) -> "tuple[dict[str, Any], Dataset | None]":
    """A data set of the user's is loaded before the settings: what it holds decides whether images are resized."""
    from ..data.own import is_own
    from ..training.preparing import data_from, with_data

    section = changes.get("data")
    if not isinstance(section, dict) or not is_own(section.get("name")):
        return changes, None
    images = data_from(section["name"], section)
    return with_data(changes, images), images


def _finished(path: Path) -> None:
    from ..distributed import Ranks, started
    from ..runs.fields import dig, number
    from ..runs.folder import Run
    from ..runs.health import lost

    if not Ranks(*started()).first:  # another rank may not see the folder
        return
    info = Run(path).read_json()
    before = number(dig(info, "start", "features_r1"))
    last = dig(info, "final")
    final = {name: value for name, value in last.items() if number(value) is not None} if isinstance(last, dict) else {}
    epochs = "1 epoch" if final.get("epoch") == 1 else f"{final.get('epoch')} epochs"
    lines = (
        (("r1", "r2", "map_r"), "R@1 {:.1f}, R@2 {:.1f}, mAP@R {:.1f}"),
        (("accuracy", "accuracy_attacked"), "accuracy {:.1f} %, under attack {:.1f} %, on held-out images"),
        (("drift", "drift_attacked"), "feature drift {:.3f}, under attack {:.3f}, on held-out images"),
        (("agreement", "agreement_attacked"), "agreement {:.1f} %, under attack {:.1f} %, on held-out images"),
        (("features_r1",), "R@1 {:.1f} of the backbone features on the test images, without a head,"),
    )
    for names, text in lines:
        if all(name in final for name in names):
            print(f"{text.format(*(final[name] for name in names))} after {epochs}")
    print(f"run folder: {path}")
    if text := lost(before, final.get("features_r1"), finished="r1" in final):
        print(text)
    elif {"accuracy", "drift", "agreement"} & set(final):  # a pretrained backbone, whose head is not trained
        print(f"next: anchorhold train DATA --weights {quote(str(path))}")
    else:
        own = ", module=…" if isinstance(dig(info, "model", "config", "module"), str) else ""
        print(f"to load the model: anchorhold.load({str(path)!r}{own})")
