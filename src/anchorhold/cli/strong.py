"""The commands verify and algorithm1, and the tables that `audit` prints after a strong audit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import (
    Classes,
    Crop,
    Data,
    Device,
    HeldOut,
    Mean,
    Resize,
    Root,
    Size,
    Std,
    app,
    model_of,
    number,
    numbers,
)
from .audit import _data, _slug, apart


def second_model(spec: str, own: tuple[str, str], victims: tuple[str, str], size: str) -> Any:
    """The surrogate. Its mean and std are the given ones, else its own, else those of the audited model."""
    from ..model.embedder import Embedder
    from ..model.wrap import Victim, wrap

    model = model_of(spec, *own, size, "--surrogate-")
    known = not isinstance(model, Victim) or model.mean is not None or isinstance(model.module, Embedder)
    if known or not any(victims):
        return model
    mean, std = (numbers(option, text) for option, text in zip(("--mean", "--std"), victims))
    return wrap(model.module, mean=mean, std=std, size=model.size, output=model.output, unit=model.unit)


def print_tables(audit: Mapping[str, Any]) -> None:
    """Print the tables of a strong audit: results by member of the ensemble, and after saving as image files."""
    from ..report.strong import tables_of

    for title, rows in tables_of(audit).items():
        wide = [max(map(len, column)) + 2 for column in zip(*rows)]
        print(f"\n{title}")
        for row in rows:
            print(f"{row[0]:{wide[0]}}" + "".join(f"{each:>{space}}" for each, space in zip(row[1:], wide[1:])))


@app.command(example="anchorhold verify audits/digits --model runs/digits --data digits")
def verify(
    folder: Annotated[Path, typer.Argument(help="Folder of a strong audit, or its receipts folder")],
    model: Annotated[str, typer.Option(help="The audited model, given as for audit")],
    data: Data,
    root: Root = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    held_out: HeldOut = 0,
    allow: Annotated[
        list[str], typer.Option(metavar="MODULE:THING", help="Your own attack in the receipts; repeatable")
    ] = [],  # noqa: B006
    device: Device = "auto",
) -> None:
    """Check a strong audit of somebody else.

    Its changed images are measured again, without attacks, so this takes seconds.
    """
    from ..auditing.verifying import verify as check_receipts
    from ..console import Console
    from ..errors import RunError

    images = _data(data, root, held_out)
    victim = model_of(model, mean, std, size)
    found = check_receipts(folder, victim, images, device=device, report=Console(), allow=allow)
    for problem in found.problems:
        print(problem)
    if found.problems:
        count = f"{len(found.problems)} problem{'s' * (len(found.problems) > 1)}"
        raise RunError(f"{folder} failed verification: {count}, the first: {found.problems[0]}")
    print(found)


@app.command(example="anchorhold algorithm1 runs/digits --data digits --limit 50")
def algorithm1(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="One or more models, e.g. a natural and a robust one")
    ],
    data: Data,
    root: Root = None,
    eps: Annotated[str, typer.Option(help="Largest change of a pixel")] = "0.01",
    limit: Annotated[int, typer.Option(help="Number of images to attack; 0 is all")] = 0,
    seeds: Annotated[int, typer.Option(help="Number of random starts of PGD; the table shows mean ± std")] = 5,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    held_out: HeldOut = 0,
    classes: Classes = "unseen",
    batch: Annotated[int, typer.Option(help="Images per batch")] = 128,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; default: audits/algorithm1-DATA; give the same one to resume")
    ] = None,
    device: Device = "auto",
) -> None:
    """Attack several models with FGSM, C&W and PGD, as Adversarial Deep Metric Learning (ADML) does.

    The table shows R@1 and mAP@R of each model, by algorithm 1 of that paper.
    """
    from ..auditing.adml_table import algorithm1 as run_table
    from ..console import Console

    out = out or Path("audits") / f"algorithm1-{_slug(data)}{apart(held_out, classes)}"
    named = {}
    for number_, spec in enumerate(models):
        name = _slug(spec)
        named[name if name not in named else f"{name}-{number_}"] = model_of(spec, mean, std, size)
    table = run_table(
        named,
        _data(data, root, held_out),
        eps=number("--eps", eps),
        limit=limit,
        seeds=seeds,
        out=out,
        report=Console(),
        batch=batch,
        device=device,
        resize=resize,
        crop=crop,
        classes=classes,  # type: ignore[arg-type]  # checked by the callee
    )
    print(table)
    print(f"\nwritten: {out / 'algorithm1.json'}; the same folder has an audit for each model and method")
