"""The commands recipes and doctor: the settings that ship with Anchorhold, and the state of this machine."""

from typing import Annotated

import typer

from .app import app


@app.command()
def recipes(
    action: Annotated[str, typer.Argument(help="show: print one recipe; rows: list the published rows")] = "",
    name: Annotated[str, typer.Argument(help="Name of the recipe, or a part of the rows' names")] = "",
) -> None:
    """List the recipes, show one (`recipes show hm-lga`), or list the papers' rows (`recipes rows t6/cub`)."""
    import tomllib

    from ..config.recipes import recipe_names, recipe_text
    from ..errors import check

    if action == "rows":
        _list_rows(name)
        return
    if action:
        check(action == "show" and bool(name), "usage: anchorhold recipes, recipes show NAME, or recipes rows [PART]")
        print(recipe_text(name).rstrip())
        return
    found = {each: tomllib.loads(recipe_text(each)).get("about") for each in recipe_names()}
    wide = max(map(len, found))
    for each, about in found.items():
        if about:  # recipes without it only serve as a base for others
            print(f"{each:{wide}}  {about}")


def _list_rows(part: str) -> None:
    from ..errors import check
    from ..reproduce.rows import rows

    found = [row for row in rows() if part.lower() in " ".join((*row.names, row.method, row.recipe)).lower()]
    check(bool(found), f"no row has {part!r} in its name, method or recipe; run `anchorhold recipes rows` to list all")
    print(f"{'row':48} {'method':36} {'R@1':>5} {'ERS':>5}")
    for row in found:
        r1, ers = (f"{row.published[name]:.1f}" if name in row.published else "–" for name in ("R@1", "ERS"))
        print(f"{row.id:48} {row.method:36} {r1:>5} {ers:>5}{'  ' * bool(row.note)}{row.note}")
    print("\nto train a row: anchorhold train DATA --root FOLDER --row ROW")


@app.command()
def doctor() -> None:
    """Check this machine: Python, packages, GPU, disk. Use the output in bug reports."""
    from .doctor import findings

    healthy = True
    for sign, text in findings():
        print(f"{sign} {text}")
        healthy = healthy and sign != "✗"
    raise typer.Exit(0 if healthy else 1)
