"""The command push."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app


@app.command(example="anchorhold push runs/digits me/digits --dry-run card")
def push(
    model: Annotated[Path, typer.Argument(help="A finished run folder, or a model file")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub")],
    audit: Annotated[
        Path | None, typer.Option(help="Folder of this model's audit; its scores go into the card")
    ] = None,
    license: Annotated[str, typer.Option(help="Identifier of the licence, such as apache-2.0")] = "",
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Kind of a new repository; default: yours on the Hub")
    ] = None,
    message: Annotated[str, typer.Option(help="Message of the commit")] = "",
    dry_run: Annotated[Path | None, typer.Option(help="Write the files into this folder, and upload nothing")] = None,
) -> None:
    """Share a model on the Hugging Face Hub, with a model card from its run and its audit.

    Log in first with `hf auth login`, or set HF_TOKEN.
    """
    from tempfile import TemporaryDirectory

    from ..model.sharing import prepared, uploaded

    with TemporaryDirectory(prefix="anchorhold-push-") as room:
        folder = dry_run or Path(room)
        files = prepared(model, repo, folder, audit=audit, license=license)
        if audit is None:
            print("no audit: the card says so; add --audit DIR to show scores")
        if dry_run is not None:
            print(f"written: {', '.join(map(str, files))}; nothing was uploaded")
            return
        name = uploaded(folder, repo, private=private, token=None, message=message)
    print(f"uploaded: {name}")
    print(f"to load the model: anchorhold.load({name!r})")
