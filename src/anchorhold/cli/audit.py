"""audit and attack."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import (
    Alpha,
    Budget,
    Crop,
    Data,
    Device,
    Eps,
    HeldOut,
    Mean,
    Method,
    Model,
    Resize,
    Root,
    Size,
    Std,
    Steps,
    app,
    number,
    numbers,
)


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
    budget: Budget = "standard",
    eps: Eps = "",
    alpha: Alpha = "",
    steps: Steps = None,
    method: Method = "pgd",
    strength: Annotated[str, typer.Option(help="standard, or strong: an ensemble on every goal")] = "standard",
    surrogate: Annotated[str, typer.Option(help="A second model, whose perturbations strong tries too")] = "",
    surrogate_mean: Annotated[
        str, typer.Option(help="Its channels' means; by default its own, else those of --mean")
    ] = "",
    surrogate_std: Annotated[str, typer.Option(help="Their standard deviations")] = "",
    curve: Annotated[str, typer.Option(help="Several ε in one call, such as 2/255,4/255,8/255")] = "",
    until: Annotated[float | None, typer.Option(help="More queries until ERS is known to ± so many points")] = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    on_bad_image: Annotated[str, typer.Option(help="fail or skip")] = "fail",
    held_out: HeldOut = 0,
    seed: Annotated[int, typer.Option(help="Another seed draws other samples, targets and starts")] = 0,
    seeds: Annotated[int, typer.Option(help="Attack from so many random starts: mean ± std")] = 1,
    batch: Annotated[int, typer.Option(help="How many images are attacked at a time")] = 128,
    precision: Annotated[str, typer.Option(help="Of the ascent: auto (bf16 on a GPU), fp32 or bf16")] = "auto",
    compile: Annotated[str, typer.Option(help="The ascent: auto (on a GPU, for long audits), on or off")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Where it is written; the same one again goes on")] = None,
    device: Device = "auto",
) -> None:
    """Say how robust a model is: clean metrics, the attacks of the papers, ERS and ARS with intervals."""
    from ..auditing import audit as run_audit
    from ..auditing.until import check_until
    from ..console import Console
    from .strong import print_tables, second_model

    chosen = _attacks(attacks)
    check_until(until, chosen)
    protocols = ("published", "corrected") if protocol == "both" else (protocol,)
    victim = _model(model, mean, std, size)
    apart = f"-held-out-{held_out}" if held_out else ""
    out = out or Path("audits") / f"{_slug(model)}-{_slug(data)}{apart}"
    images = _data(data, root, held_out, (model,))
    _say_what_was_seen(model, data, held_out)
    found = run_audit(
        victim,
        images,
        protocols=protocols,
        attacks=chosen,
        limit=0 if full else limit,
        budget=budget,
        eps=number("--eps", eps) if eps else None,
        alpha=number("--alpha", alpha) if alpha else None,
        steps=steps,
        method=method,  # type: ignore[arg-type]  # it is checked there
        strength=strength,  # type: ignore[arg-type]
        surrogate=second_model(surrogate, (surrogate_mean, surrogate_std), (mean, std), size) if surrogate else None,
        epsilons=numbers("--curve", curve) or (),
        until=until,
        seed=seed,
        seeds=seeds,
        batch=batch,
        device=device,
        precision=precision,  # type: ignore[arg-type]
        compile=compile,  # type: ignore[arg-type]
        out=out,
        resize=resize,
        crop=crop,
        on_bad_image=on_bad_image,  # type: ignore[arg-type]
        report=Console(),
    )
    print(found)
    print_tables(found.to_dict())
    print(f"\nwritten: {out / 'audit.json'}, samples.safetensors and examples.safetensors beside it")
    print(f"the page: {out / 'page.html'}")
    if strength == "strong":
        at = (f" --root {root}" if root is not None else "") + (f" --held-out {held_out}" if held_out else "")
        print(f"receipts, for `anchorhold verify {out} --model {model} --data {data}{at}`: {out / 'receipts'}")


@app.command()
def attack(
    model: Model,
    image: Annotated[str, typer.Argument(help="A file, or the number of an image in the data")],
    data: Data,
    goal: Annotated[str, typer.Option(help="CA+, CA-, QA+, QA-, TMA, ES, LTM, GTM, GTT, nearest, margin, …")] = "ES",
    root: Root = None,
    protocol: Annotated[str, typer.Option(help="published (as in print) or corrected")] = "corrected",
    class_: Annotated[str, typer.Option("--class", help="The class of a file that is not in the data")] = "",
    budget: Budget = "standard",
    eps: Eps = "",
    alpha: Alpha = "",
    steps: Steps = None,
    method: Method = "pgd",
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    held_out: HeldOut = 0,
    seed: Annotated[int, typer.Option(help="Another seed draws other targets and starts")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the perturbed image there, as PNG")] = None,
    device: Device = "auto",
) -> None:
    """Attack one image against a gallery, and show the list before and after."""
    from ..auditing.single import attack_one
    from ..console import Console
    from ..settings import check

    check(save is None or save.suffix.lower() == ".png", "--save wants a .png: other formats lose the perturbation")
    done = attack_one(
        _model(model, mean, std, size),
        image,
        _data(data, root, held_out),
        goal,
        protocol=protocol,  # type: ignore[arg-type]  # it is checked there
        label=class_,
        budget=budget,
        eps=number("--eps", eps) if eps else None,
        alpha=number("--alpha", alpha) if alpha else None,
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


def _attacks(text: str) -> dict[str, dict[str, Any]] | None:
    """`CA+:w=5,ES` as names with their settings; None where nothing was said."""
    from ..settings import check

    chosen: dict[str, dict[str, Any]] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, *changes = each.split(":")
        # ES:D and ES:R are columns of one attack, and their letter is no setting.
        check(all("=" in change for change in changes), f"--attacks {each}: write settings as in CA+:w=5")
        pairs = (change.split("=", 1) for change in changes)
        chosen[name] = {key: int(value) if value.isdigit() else number(f"{name}:{key}", value) for key, value in pairs}
    check(bool(chosen) or not text, f"--attacks {text} names none: give some, such as CA+,ES, or leave it out")
    return chosen or None


def _model(spec: str, mean: str, std: str, size: str, option: str = "--") -> Any:
    from ..model.named import load_model

    sides = numbers("--size", size)
    return load_model(
        spec,
        mean=numbers(f"{option}mean", mean),
        std=numbers(f"{option}std", std),
        size=None if sides is None else [int(side) for side in (sides * 2 if len(sides) == 1 else sides)],
    )


def _data(name: str, root: Path | None, held_out: int = 0, models: Sequence[str] = ()) -> Any:
    """A data set by name; a folder or a CSV, of which audits take what a model was not trained on, or else all."""
    from ..data.datasets import DATASETS, dataset
    from ..settings import check

    check(held_out >= 0, f"--held-out {held_out}: say how many training classes to test on, 2 or more")
    whole = root is None and not held_out and name not in DATASETS and (Path(name).is_dir() or name.endswith(".csv"))
    if not whole:
        return dataset(name, root, held_out=held_out)
    return next((own for own in (_tested_on(name, model) for model in models) if own is not None), name)


def _tested_on(name: str, model: str) -> Any:
    """The folder or CSV as the data set that it was to this run, or None where the run was not tested on it."""
    from ..data.datasets import dataset
    from ..errors import DataError, RunError
    from ..record import Run
    from ..report.collect import dig

    place = _run_of(model)
    if place is None or all((Path(name) / part).is_dir() for part in ("train", "test")):
        return None  # of train/ and test/ test/ is taken anyway
    kind = "csv" if name.endswith(".csv") else "folder"
    try:
        info = Run(place).read_json()
        known = dataset(kind, name, held_out=dig(info, "settings", "data", "held_out") or 0)
        own = dataset(kind, name)
    except (DataError, RunError):  # too small for a run to be trained on it, or no run of this version
        return None
    if known.test.fingerprint() != dig(info, "data", "test"):
        return None
    note = f"{place} was trained on a part of {name}: the test split, which it has never seen, is audited"
    return replace(own, notes=(note, *own.notes))


def _run_of(model: str) -> Path | None:
    """The run folder that a model is, or lies in as its export."""
    path = Path(model)
    path = path.parent if path.name == "model.safetensors" else path
    return path if (path / "run.json").is_file() else None


def _say_what_was_seen(model: str, data: str, held_out: int) -> None:
    """Classes are held out to choose by: say where the run knows them already, and where the test split is used up."""
    from ..errors import RunError
    from ..record import Run
    from ..report.collect import dig

    place = _run_of(model)
    if place is None:
        return
    try:
        info = Run(place).read_json()
    except RunError:  # of another version: its model is audited all the same
        return
    trained = dig(info, "settings", "data", "held_out") or 0
    if trained < held_out:
        on = f"with only {trained} classes held out" if trained else "without holding out classes"
        print(f"note: {place} was trained {on}: it knows classes that are attacked here")
    own = {dig(info, "settings", "data", which) for which in ("name", "root")}  # a folder is named by where it lies
    if trained and not held_out and data in own:
        print(
            f"note: this audits the test split, not the {trained} classes that {place} held out; "
            f"for those: --held-out {trained}"
        )


def _slug(text: str) -> str:
    """A name for a folder: a model in a run folder is called after that."""
    path = Path(text)
    path = path.parent if path.name == "model.safetensors" else path
    return path.name.removesuffix(".safetensors").replace(":", "-").replace("=", "-") or "here"
