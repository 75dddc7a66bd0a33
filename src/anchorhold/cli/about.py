"""recipes and doctor: what there is, and what this machine has."""

from typing import Annotated

import typer

from .app import app


@app.command()
def recipes(
    action: Annotated[str, typer.Argument(help="`show` to see one, `rows` for what the papers print")] = "",
    name: Annotated[str, typer.Argument(help="Which; for rows a part of their names")] = "",
) -> None:
    """List the recipes, show one (`recipes show hm-lga`), or list the papers' rows (`recipes rows t6/cub`)."""
    import tomllib

    from ..layers import recipe_names, recipe_text
    from ..settings import check

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
        if about:  # a recipe without it is a base for others
            print(f"{each:{wide}}  {about}")


def _list_rows(part: str) -> None:
    from ..rows import rows
    from ..settings import check

    found = [row for row in rows() if part.lower() in " ".join((*row.names, row.method, row.recipe)).lower()]
    check(bool(found), f"no row has {part!r} in its name, method or recipe; `anchorhold recipes rows` lists all")
    print(f"{'row':48} {'method':36} {'R@1':>5} {'ERS':>5}")
    for row in found:
        r1, ers = (f"{row.printed[name]:.1f}" if name in row.printed else "–" for name in ("R@1", "ERS"))
        print(f"{row.id:48} {row.method:36} {r1:>5} {ers:>5}{'  ' * bool(row.note)}{row.note}")
    print("\nto train one: anchorhold train DATA --root FOLDER --row ROW")


@app.command()
def doctor() -> None:
    """Say what this machine has, and what is missing."""
    from ..doctor import findings

    healthy = True
    for sign, text in findings():
        print(f"{sign} {text}")
        healthy = healthy and sign != "✗"
    raise typer.Exit(0 if healthy else 1)
