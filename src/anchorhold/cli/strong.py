"""verify and algorithm1."""

from pathlib import Path
from typing import Annotated

import typer

from .app import Crop, Data, Device, Eps, Mean, Resize, Root, Size, Std, app, number
from .audit import _data, _model, _slug


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A strong audit, or its receipts")],
    model: Annotated[str, typer.Option(help="The model it is said to be of, as for audit")],
    data: Data,
    root: Root = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    device: Device = "auto",
) -> None:
    """Check the perturbed images of a published strong audit, without attacking: seconds."""
    from ..auditing.receipts import verify as check_receipts
    from ..console import Console
    from ..errors import RunError

    found = check_receipts(folder, _model(model, mean, std, size), _data(data, root), device=device, report=Console())
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
    batch: Annotated[int, typer.Option(help="How many images are attacked at a time")] = 128,
    out: Annotated[Path | None, typer.Option(help="Where it is written; the same one again goes on")] = None,
    device: Device = "auto",
) -> None:
    """003's table: R@1 and mAP@R under FGSM, C&W and PGD by its algorithm 1, for several models."""
    from ..auditing.algorithm1 import algorithm1 as run_table
    from ..console import Console

    out = out or Path("audits") / f"algorithm1-{_slug(data)}"
    named = {}
    for number_, spec in enumerate(models):
        name = _slug(spec)
        named[name if name not in named else f"{name}-{number_}"] = _model(spec, mean, std, size)
    table = run_table(
        named,
        _data(data, root),
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
