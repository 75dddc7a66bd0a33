"""The commands embed, search and export."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Crop, Device, Mean, Model, Resize, Size, Std, app, numbers


@app.command(example="anchorhold embed runs/digits photos --out index")
def embed(
    model: Model,
    source: Annotated[str, typer.Argument(help="A folder of images, a CSV (path[,label]) or a tar")],
    out: Annotated[Path, typer.Option(help="Output folder of the index; give the same one to resume")],
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    resize: Resize = None,
    crop: Crop = None,
    on_bad_image: Annotated[str, typer.Option(help="Unreadable images: fail or skip")] = "fail",
    batch: Annotated[int, typer.Option(help="Images per batch")] = 128,
    parquet: Annotated[bool, typer.Option("--parquet", help="Also write vectors.parquet")] = False,
    device: Device = "auto",
) -> None:
    """Turn images into vectors, and keep them in an index that you can search."""
    from shlex import quote

    from ..console import Console
    from ..index.embedding import embed as embed_images

    index = embed_images(
        _named(model, mean, std, size),
        source,
        out,
        resize=resize,
        crop=crop,
        on_bad_image=on_bad_image,  # type: ignore[arg-type]  # checked by the callee
        batch=batch,
        parquet=parquet,
        device=device,
        report=Console(),
    )
    count = f"{len(index):,} vector{'s' * (len(index) != 1)}"
    print(f"{count}: {out / 'vectors.safetensors'}, ids.csv{' and vectors.parquet' * parquet} beside it")
    print(f"next: anchorhold search {quote(str(out))} IMAGE")


@app.command(example="anchorhold search index query.png -k 5")
def search(
    index: Annotated[Path, typer.Argument(help="Index folder, written by `anchorhold embed`")],
    image: Annotated[Path, typer.Argument(help="Query image file")],
    k: Annotated[int, typer.Option("-k", help="Number of results")] = 10,
    model: Annotated[str, typer.Option(help="New location of the model, if it has moved")] = "",
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    backend: Annotated[str, typer.Option(help="exact, or faiss (needs anchorhold[faiss])")] = "exact",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    device: Device = "auto",
) -> None:
    """Find the images of an index that are most similar to your image."""
    from ..errors import check
    from ..index.searching import search as search_index

    check(
        bool(model) or not (mean or std or size),
        "--mean, --std and --size need --model; without it the index's own values are used",
    )
    found = search_index(
        index,
        image,
        k,
        model=_named(model, mean, std, size) if model else None,
        backend=backend,  # type: ignore[arg-type]  # checked by the callee
        device=device,
    )
    print(json.dumps(asdict(found), indent=2) if as_json else found)


@app.command(example="anchorhold export runs/digits --out model.onnx")
def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="Output file, NAME.onnx")],
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
) -> None:
    """Write a model as an ONNX file, which you can use without Anchorhold and PyTorch.

    The file maps images in 0 … 1 to unit vectors. The command checks it with onnxruntime.
    """
    from ..index.exporting import export as export_model
    from ..index.exporting import preparation_of

    path = export_model(_named(model, mean, std, size), out)
    print(f"written: {path}, which agrees with torch within 1e-4")
    print(f"preprocessing: {preparation_of(path)}")


def _named(spec: str, mean: str, std: str, size: str) -> Any:
    from ..index.folder import Named

    sides = numbers("--size", size)
    whole = None if sides is None else [int(side) for side in (sides * 2 if len(sides) == 1 else sides)]
    return Named(spec, numbers("--mean", mean), numbers("--std", std), whole)
