"""The command attack-list."""

from pathlib import Path
from typing import Annotated

import typer

from .app import (
    Classes,
    Crop,
    Data,
    Device,
    Eps,
    HeldOut,
    Mean,
    Model,
    Norm,
    Resize,
    Root,
    Size,
    Std,
    app,
    model_of,
    threat_options,
)


@app.command(name="attack-list", example="anchorhold attack-list runs/digits --data digits --queries 100")
def attack_list(
    model: Model,
    data: Data,
    root: Root = None,
    k: Annotated[int, typer.Option("-k", help="Length of the returned lists")] = 10,
    queries: Annotated[int, typer.Option(help="Queries for each attacked image")] = 1000,
    eps: Eps = "",
    norm: Norm = "linf",
    goal: Annotated[
        str,
        typer.Option(
            help="recall (a wrong first image), overlap (other images than before) or order (first five reversed)"
        ),
    ] = "recall",
    limit: Annotated[int, typer.Option(help="Number of images to attack, sampled over all classes; 0 is all")] = 100,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    held_out: HeldOut = 0,
    classes: Classes = "unseen",
    seed: Annotated[int, typer.Option(help="Seed of the sample and the moves")] = 0,
    out: Annotated[Path | None, typer.Option(help="Save the curve to this JSON file")] = None,
    device: Device = "auto",
) -> None:
    """Attack a search service that only returns lists of ids, and show R@1 against the number of queries."""
    from ..auditing.classes import audited_data
    from ..auditing.list_attack import attack_list as attack
    from ..console import Console

    told = threat_options("standard", eps, norm, "", None)
    found = attack(
        model_of(model, mean, std, size),
        audited_data(data, root, held_out),
        k=k,
        queries=queries,
        threat=told["threat"],
        eps=told["eps"],
        goal=goal,  # type: ignore[arg-type]  # checked by the callee
        limit=limit,
        seed=seed,
        device=device,
        resize=resize,
        crop=crop,
        classes=classes,  # type: ignore[arg-type]
        report=Console(),
    )
    print(found)
    if out is not None:
        print(f"\nwritten: {found.save(out)}")
