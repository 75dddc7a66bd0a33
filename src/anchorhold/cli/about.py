"""The commands settings, recipes and doctor: what can be set, what ships with Anchorhold, the state of this machine."""

import json
from typing import Annotated

import typer

from .app import app


@app.command(example="anchorhold settings --recipe hm-lga")
def settings(
    pattern: Annotated[str, typer.Argument(help="Only settings with this text in key or meaning; * matches all")] = "",
    recipe: Annotated[str, typer.Option(help="Show the values of this recipe, a name or a TOML file")] = "",
    defence: Annotated[str, typer.Option(help="Show only the settings of this defence, a name or module:thing")] = "",
    data: Annotated[str, typer.Option(help="With --recipe: the data set, e.g. digits")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """List every setting of a training with its type, default and meaning."""
    from ..config.listing import list_settings

    found = list_settings(pattern, recipe=recipe, defence=defence, data=data)
    if as_json:
        print(json.dumps([each.to_dict() for each in found], indent=2, ensure_ascii=False))
        return
    section = ""
    for place, each in enumerate(found):
        if each.section != section:
            print(f"{'' if not section else chr(10)}[{each.section}]")
            section = each.section
        whose = f"   in {', '.join(each.defences)}" if each.defences and not (recipe or defence) else ""
        origin = f"   from {each.origin}" if recipe and each.origin != "default" else ""
        print(f"{each.key} = {_plain(each.value)}   ({each.allowed}){whose}{origin}")
        again = found[place + 1 : place + 2]  # the same key with another default
        if not again or (again[0].key, again[0].meaning) != (each.key, each.meaning):
            print(f"    {each.meaning or 'no meaning is given'}")


def _plain(value: object) -> str:
    """A value as --set takes it."""
    from ..config.listing import written

    return written(value).strip('"') or '""'


@app.command(example="anchorhold recipes rows t6/cub")
def recipes(
    action: Annotated[str, typer.Argument(help="show: print one recipe; rows: list the published rows")] = "",
    name: Annotated[str, typer.Argument(help="Name of the recipe, or a part of the rows' names")] = "",
    resolved: Annotated[
        bool, typer.Option("--resolved", help="With show: every setting of a recipe or row, and where it comes from")
    ] = False,
    data: Annotated[str, typer.Option(help="With --resolved: the data set, e.g. digits")] = "",
) -> None:
    """List the recipes for training, show one of them, or list the published results that you can reproduce.

    Use `recipes`, `recipes show NAME` or `recipes rows [PART]`.
    """
    import tomllib

    from ..config.recipes import recipe_names, recipe_text
    from ..errors import check

    check(action == "show" or not (resolved or data), "--resolved and --data are for `anchorhold recipes show NAME`")
    if action == "rows":
        _list_rows(name)
        return
    if action:
        check(action == "show" and bool(name), "usage: anchorhold recipes, recipes show NAME, or recipes rows [PART]")
        check(resolved or not data, "--data is for --resolved: add it, or leave --data out")
        if resolved:
            _print_resolved(name, data)
        else:
            print(_row_text(name) or recipe_text(name).rstrip())
        return
    found = {each: tomllib.loads(recipe_text(each)).get("about") for each in recipe_names()}
    wide = max(map(len, found))
    for each, about in found.items():
        if about:  # recipes without it only serve as a base for others
            print(f"{each:{wide}}  {about}")


def _row_text(name: str) -> str:
    """A published row as TOML: its recipe and what it changes there, under its published numbers; empty for others."""
    from ..config.listing import written
    from ..reproduce.rows import row_named, rows

    if not any(name in row.names for row in rows()):
        return ""
    row = row_named(name)
    lines = [f"# {row.id}: {row.method}, on {row.data}"]
    lines += ["# published: " + ", ".join(f"{key} {value:g}" for key, value in row.published.items())]
    lines += [f"# {row.note}"] if row.note else []
    lines.append(f'extends = "{row.recipe}"')
    section = ""
    for change in sorted(row.overrides):
        key, _, value = change.partition("=")
        before, _, key = key.partition(".")
        lines += ["", f"[{before}]"] if before != section else []
        section = before
        lines.append(f"{key} = {written(_number_or_text(value))}")
    return "\n".join(lines)


def _number_or_text(value: str) -> object:
    import tomllib

    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _print_resolved(name: str, data: str) -> None:
    """A recipe or a published row as TOML with every key, and the origin of each value beside it."""
    from ..config.listing import named_data, resolved, written
    from ..reproduce.rows import row_named, row_settings, rows

    changes, named, recipe = named_data(data), "--data", name
    if any(name in row.names for row in rows()):
        row = row_named(name)
        changes, named, recipe = row_settings(row) | named_data(data or row.data), "row", row.recipe
    section = ""
    for each in resolved(recipe, changes, named):
        if each.section != section:
            print(f"{'' if not section else chr(10)}[{each.section}]")
            section = each.section
        print(f"{f'{each.key.partition(chr(46))[2]} = {written(each.value)}':44} # {each.origin}")


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


@app.command(example="anchorhold doctor")
def doctor() -> None:
    """Check this machine: Python, packages, GPU, disk. Use the output in bug reports."""
    from .doctor import findings

    healthy = True
    for sign, text in findings():
        print(f"{sign} {text}")
        healthy = healthy and sign != "✗"
    raise typer.Exit(0 if healthy else 1)
