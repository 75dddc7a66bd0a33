"""embed, search and export."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Crop, Device, Mean, Model, Resize, Size, Std, app, numbers


@app.command()
def embed(
    model: Model,
    source: Annotated[str, typer.Argument(help="A folder of images, a CSV (path[,label]) or a tar")],
    out: Annotated[Path, typer.Option(help="The folder of the index; the same one again goes on")],
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    on_bad_image: Annotated[str, typer.Option(help="fail or skip")] = "fail",
    batch: Annotated[int, typer.Option(help="How many images are embedded at a time")] = 128,
    parquet: Annotated[bool, typer.Option("--parquet", help="Write vectors.parquet as well")] = False,
    device: Device = "auto",
) -> None:
    """Turn images into vectors: an index that can be searched."""
    from shlex import quote

    from ..console import Console
    from ..index import embed as embed_images

    index = embed_images(
        _named(model, mean, std, size),
        source,
        out,
        resize=resize,
        crop=crop,
        on_bad_image=on_bad_image,  # type: ignore[arg-type]  # it is checked there
        batch=batch,
        parquet=parquet,
        device=device,
        report=Console(),
    )
    print(f"{len(index):,} vectors: {out / 'vectors.safetensors'}, ids.csv{' and vectors.parquet' * parquet} beside it")
    print(f"next: anchorhold search {quote(str(out))} IMAGE")


@app.command()
def search(
    index: Annotated[Path, typer.Argument(help="What `anchorhold embed` wrote")],
    image: Annotated[Path, typer.Argument(help="The query, an image file")],
    k: Annotated[int, typer.Option("-k", help="How many")] = 10,
    model: Annotated[str, typer.Option(help="Where the model lies now, if it has moved")] = "",
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    backend: Annotated[str, typer.Option(help="exact, or faiss where it is installed")] = "exact",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    device: Device = "auto",
) -> None:
    """Show the nearest images to a query image."""
    from ..index import search as search_index
    from ..settings import check

    check(bool(model) or not (mean or std or size), "--mean, --std and --size go with --model: the index has its own")
    found = search_index(
        index,
        image,
        k,
        model=_named(model, mean, std, size) if model else None,
        backend=backend,  # type: ignore[arg-type]  # it is checked there
        device=device,
    )
    print(json.dumps(asdict(found), indent=2) if as_json else found)


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="The file, NAME.onnx")],
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
) -> None:
    """Write a model as ONNX: images in [0, 1] in, unit vectors out; checked by onnxruntime."""
    from ..index import export as export_model

    print(f"written: {export_model(_named(model, mean, std, size), out)}, the same as torch within 1e-4")


def _named(spec: str, mean: str, std: str, size: str) -> Any:
    from ..index import Named

    sides = numbers("--size", size)
    whole = None if sides is None else [int(side) for side in (sides * 2 if len(sides) == 1 else sides)]
    return Named(spec, numbers("--mean", mean), numbers("--std", std), whole)
