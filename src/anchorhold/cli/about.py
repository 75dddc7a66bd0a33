"""recipes and doctor: what there is, and what this machine has."""

from typing import Annotated

import typer

from .app import app


@app.command()
def recipes(
    action: Annotated[str, typer.Argument(help="`show` to see one")] = "",
    name: Annotated[str, typer.Argument(help="Which")] = "",
) -> None:
    """List the recipes, or show one: `anchorhold recipes show hm-lga`."""
    import tomllib

    from ..settings import check, recipe_names, recipe_text

    if action:
        check(action == "show" and bool(name), "usage: anchorhold recipes, or anchorhold recipes show NAME")
        print(recipe_text(name).rstrip())
        return
    for each in recipe_names():
        about = tomllib.loads(recipe_text(each)).get("about")
        if about:  # a recipe without it is a base for others
            print(f"{each:12} {about}")


@app.command()
def doctor() -> None:
    """Say what this machine has, and what is missing."""
    from ..doctor import findings

    healthy = True
    for sign, text in findings():
        print(f"{sign} {text}")
        healthy = healthy and sign != "✗"
    raise typer.Exit(0 if healthy else 1)
