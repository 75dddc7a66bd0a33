"""verify and algorithm1, and what `audit` says of a strong one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Crop, Data, Device, Eps, HeldOut, Mean, Resize, Root, Size, Std, app, number, numbers
from .audit import _data, _model, _slug


def second_model(spec: str, own: tuple[str, str], victims: tuple[str, str], size: str) -> Any:
    """The surrogate, with a mean and std of its own: as given, as it knows them, or else the victim's."""
    from ..model.embedder import Embedder
    from ..model.victim import Victim, wrap

    model = _model(spec, *own, size, "--surrogate-")
    known = not isinstance(model, Victim) or model.mean is not None or isinstance(model.module, Embedder)
    if known or not any(victims):
        return model
    mean, std = (numbers(option, text) for option, text in zip(("--mean", "--std"), victims))
    return wrap(model.module, mean=mean, std=std, size=model.size, output=model.output, unit=model.unit)


def print_tables(audit: Mapping[str, Any]) -> None:
    """What each member of the ensemble left, and what is left of it in files."""
    from ..auditing.strong import tables_of

    for title, rows in tables_of(audit).items():
        wide = [max(map(len, column)) + 2 for column in zip(*rows)]
        print(f"\n{title}")
        for row in rows:
            print(f"{row[0]:{wide[0]}}" + "".join(f"{each:>{space}}" for each, space in zip(row[1:], wide[1:])))


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A strong audit, or its receipts")],
    model: Annotated[str, typer.Option(help="The model it is said to be of, as for audit")],
    data: Data,
    root: Root = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    held_out: HeldOut = 0,
    device: Device = "auto",
) -> None:
    """Check the perturbed images of a published strong audit, without attacking: seconds."""
    from ..auditing.verifying import verify as check_receipts
    from ..console import Console
    from ..errors import RunError

    images = _data(data, root, held_out)
    found = check_receipts(folder, _model(model, mean, std, size), images, device=device, report=Console())
    for problem in found.problems:
        print(problem)
    if found.problems:
        raise RunError(f"{folder} does not hold: {len(found.problems)} problems, the first: {found.problems[0]}")
    print(found)


@app.command()
def algorithm1(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Usually two: the natural and the robust one")
    ],
    data: Data,
    root: Root = None,
    eps: Eps = "0.01",
    limit: Annotated[int, typer.Option(help="How many images are attacked; 0: all")] = 0,
    seeds: Annotated[int, typer.Option(help="Random starts of PGD: mean ± std")] = 5,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    held_out: HeldOut = 0,
    batch: Annotated[int, typer.Option(help="How many images are attacked at a time")] = 128,
    out: Annotated[Path | None, typer.Option(help="Where it is written; the same one again goes on")] = None,
    device: Device = "auto",
) -> None:
    """003's table: R@1 and mAP@R under FGSM, C&W and PGD by its algorithm 1, for several models."""
    from ..auditing.algorithm1 import algorithm1 as run_table
    from ..console import Console

    out = out or Path("audits") / f"algorithm1-{_slug(data)}{f'-held-out-{held_out}' if held_out else ''}"
    named = {}
    for number_, spec in enumerate(models):
        name = _slug(spec)
        named[name if name not in named else f"{name}-{number_}"] = _model(spec, mean, std, size)
    table = run_table(
        named,
        _data(data, root, held_out, models),
        eps=number("--eps", eps),
        limit=limit,
        seeds=seeds,
        out=out,
        report=Console(),
        batch=batch,
        device=device,
        resize=resize,
        crop=crop,
    )
    print(table)
    print(f"\nwritten: {out / 'algorithm1.json'}, and an audit for each model and method beside it")
