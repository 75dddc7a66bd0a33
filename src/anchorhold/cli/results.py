"""The commands report, compare, plot, sweep and hardness: pages, tables and figures from runs and audits."""

import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from .app import Device, Mean, Set, Size, Std, app, model_of, number
from .train import _put, _put_data, _with_own_data

if TYPE_CHECKING:
    from ..report.collect import Entry
    from ..report.tables import Table

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders with runs and audits, at any depth")]
Format = Annotated[
    str, typer.Option(help="text, markdown, latex, csv, json or html; default: by the extension of --out")
]
DataSet = Annotated[
    str, typer.Argument(help="cub, digits, gaussians, …, a folder of class folders, a CSV, or module:function")
]
Root = Annotated[Path | None, typer.Option(help="Folder of the data set")]


@app.command(example="anchorhold report runs audits")
def report(
    folders: Folders,
    out: Annotated[Path | None, typer.Option(help="Output file; only for a single page")] = None,
) -> None:
    """Write an HTML page for every audit (page.html) and every run (training.html), finished or not."""
    from jinja2 import TemplateError

    from ..errors import RunError, check
    from ..report.audit_page import write_audit_page
    from ..report.collect import walk
    from ..report.training_page import write_training_page

    kinds = (("audit.json", write_audit_page), ("run.json", write_training_page))
    problems: list[str] = []
    found = [(path, write) for path in walk(folders, problems) for name, write in kinds if (path / name).is_file()]
    check(bool(found), "no audit.json or run.json in these folders; give folders with audits or runs")
    check(
        out is None or len(found) == 1, f"--out is for a single page, but there are {len(found)} to write; leave it out"
    )
    written = []
    for path, write in found:
        try:
            written.append(write(path, out))
        # One bad folder must not stop the other pages, whatever is wrong with its JSON.
        except RunError as error:
            problems.append(f"left out: {error}")
        except (KeyError, TypeError, ValueError, AttributeError, TemplateError) as error:
            problems.append(f"left out: {path} lacks data that the page needs ({type(error).__name__}: {error})")
    _warn(tuple(problems))
    if not written:
        raise RunError("no page could be written")
    for page in written:
        print(f"written: {page}")


@app.command(example="anchorhold compare runs audits --sort r1")
def compare(
    folders: Folders,
    format: Format = "",
    sort: Annotated[
        str, typer.Option(metavar="KEY", help="Sort by a column of the CSV, e.g. r1 or ers_corrected")
    ] = "",
    matrix: Annotated[
        str, typer.Option(metavar="A,B", help="Show a matrix over two settings, e.g. train.seed,defence.steps")
    ] = "",
    value: Annotated[
        str, typer.Option(metavar="KEY,...", help="Values in the matrix: r1, ers, ers_corrected, ars, …")
    ] = "r1,ers",
    table: Annotated[
        str,
        typer.Option(
            help="runs, published or reproduced (beside the papers), columns (each attack), strong, "
            "epsilon (R@1 at each ε), entanglement"
        ),
    ] = "runs",
    columns: Annotated[
        str, typer.Option(metavar="KEY,...", help="Show these columns of the CSV alone, e.g. r1,r1_strong")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal")] = None,
    into: Annotated[
        Path | None, typer.Option(help="Update the marked tables in this Markdown page, or in all of a folder")
    ] = None,
) -> None:
    """Compare runs and audits in a table: one line each, or a matrix of two settings."""
    from ..errors import check, nearest
    from ..report.compare import epsilon_table
    from ..report.insert import TABLES, write_into
    from ..report.recall_strong import shared_eps

    check(table in TABLES, f"no table {table!r}; {nearest(table, TABLES)}")
    if into is not None:
        alone = not (format or sort or matrix or columns or out or table != "runs")
        check(alone, "--into writes the tables that the page names; leave out the other options")
        count, problems = write_into(into, folders)
        _warn(problems)
        print(f"written: {into} ({count} table{'s' if count > 1 else ''})")
        return
    page = format == "html" or (not format and out is not None and out.suffix.lower() in (".html", ".htm"))
    check(
        not page or (not matrix and not columns and table == "runs"),
        "an HTML page always shows the runs; leave out --matrix, --table and --columns",
    )
    check(not page or out is not None, "an HTML page needs a file; add --out compare.html")
    keys = _keys(matrix)
    check(not matrix or len(keys) == 2, f"--matrix needs two settings, e.g. train.seed,defence.steps; got {matrix!r}")
    chosen = _keys(columns)
    check(bool(chosen) or not columns, f"--columns {columns} names no column; give some, e.g. r1,ers, or leave it out")
    entries = _entries(folders)
    if page and out is not None:
        from ..report.compare_page import write_compare_page

        print(f"written: {write_compare_page(entries, out, sort)}")
        return
    if matrix:
        from ..report.matrix import matrix as by_settings

        shown = by_settings(entries, keys[0], keys[1], _keys(value))
    else:
        shown = TABLES[table](entries)
    shown = shown.sorted_by(sort) if sort else shown
    _show(shown.only(chosen) if chosen else shown, format, out)
    whole = table == "runs" and not (matrix or columns or format or out)
    if whole and any(len(known) > 1 for known in shared_eps(entries).values()):  # else the table above has it all
        print()
        _show(epsilon_table(entries))


@app.command(example="anchorhold plot runs --what curves --out curves.png")
def plot(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="Output file: .png, .pdf or .svg")],
    what: Annotated[
        str,
        typer.Option(
            help="curves, robust, collapse, shift, hardness, active, rows (ERS against R@1), "
            "cost (ERS against training cost), epsilon (R@1 against ε), initialisation, or columns of metrics.jsonl"
        ),
    ] = "curves",
    against: Annotated[
        str, typer.Option(metavar="KEY", help="Plot R@1 and ERS against this setting instead, e.g. defence.beta")
    ] = "",
    series: Annotated[
        str, typer.Option(metavar="KEY", help="With --against: one line for each value of this setting")
    ] = "",
) -> None:
    """Draw several runs in one figure."""
    from ..errors import check
    from ..report.epsilon import plot_epsilon
    from ..report.initialisation import plot_initialisation
    from ..report.plots import plot_against, plot_epochs
    from ..report.scatter import SCATTERS

    check(what != "entanglement", "entanglement is a table; run anchorhold compare DIR --table entanglement")
    entries = _entries(folders)
    if against:
        written = plot_against(entries, against, out, series)
    else:
        figures = {**SCATTERS, "initialisation": plot_initialisation, "epsilon": plot_epsilon}
        written = figures[what](entries, out) if what in figures else plot_epochs(entries, what, out)
    print(f"written: {written}")


@app.command(example="anchorhold sweep digits --vary defence.steps=4,8 --out runs/steps")
def sweep(
    data: DataSet,
    vary: Annotated[list[str], typer.Option(metavar="KEY=A,B,...", help="A setting and its values; repeatable")],
    out: Annotated[Path, typer.Option(help="Output folder; give the same one to resume")],
    root: Root = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe from `anchorhold recipes`, or a TOML file; default: robust")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A module of your own for every run, module:function")] = None,
    mean: Mean = "",
    std: Std = "",
    size: Size = "",
    set_: Set = [],  # noqa: B006
    audit: Annotated[bool, typer.Option(help="Audit every run")] = True,
    limit: Annotated[int, typer.Option(help="Number of images that each audit attacks; 0 is all")] = 1000,
    audit_eps: Annotated[str, typer.Option(help="ε of the audits: maximum change of a pixel")] = "8/255",
    audit_alpha: Annotated[str, typer.Option(help="Step size of the audits; default: 3/8 of --audit-eps")] = "",
    audit_steps: Annotated[int, typer.Option(help="Number of PGD steps of the audits")] = 32,
    device: Device = "auto",
) -> None:
    """Train and audit one run for every value of a setting, then compare them in a table and a figure."""
    from ..config.recipes import parse_assignments, usual_recipe
    from ..console import Console
    from ..data.datasets import dataset
    from ..errors import check
    from ..training.sweeping import parse_vary, points
    from ..training.sweeping import sweep as run_sweep

    check(model is not None or not (mean or std or size), "--mean, --std and --size are for --model: leave them out")
    changes, images = _with_own_data(_put_data(parse_assignments(set_), data, root))
    varied = parse_vary(vary)
    recipe = recipe or usual_recipe(changes)
    settings = points(recipe, varied, changes)[0].settings
    found = run_sweep(
        images or dataset(settings.data.name, settings.data.root or None, held_out=settings.data.held_out),
        recipe,
        varied,
        out,
        overrides=changes,
        audited={
            "limit": limit,
            "eps": number("--audit-eps", audit_eps),
            "alpha": number("--audit-alpha", audit_alpha) if audit_alpha else 3 * number("--audit-eps", audit_eps) / 8,
            "steps": audit_steps,
        }
        if audit
        else None,
        model=None if model is None else lambda: model_of(model, mean, std, size),
        device=device,
        report=Console(),
    )
    _warn(found.problems)
    for table in found.tables:
        _show(table)
        print()
    print(f"written: {', '.join(map(str, found.files))}")
    print(f"next: anchorhold plot {quote(str(out))} --what collapse --out {quote(str(out / 'collapse.png'))}")


@app.command(example="anchorhold hardness digits --batches 20")
def hardness(
    data: DataSet,
    root: Root = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Weights of the model: imagenet, timm:NAME, hf:owner/name, a file, a run folder or none"),
    ] = None,
    batches: Annotated[int, typer.Option(help="Number of batches; 0 is one epoch")] = 1000,
    margin: Annotated[float, typer.Option(help="How much farther than the positive a semihard negative may lie")] = 0.2,
    set_: Set = [],  # noqa: B006
    format: Annotated[
        str, typer.Option(help="text, markdown, latex, csv or json; default: by the extension of --out")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal")] = None,
    device: Device = "auto",
) -> None:
    """Measure how hard the triplets are that each sampler draws, before any training.

    The table shows hardness and collapseness. The defaults are those of table 1 of hm (Zhou & Patel 2022).
    """
    from ..config.build import to_dict
    from ..config.recipes import parse_assignments
    from ..console import Console
    from ..data.datasets import dataset
    from ..device import computer_of, device_named
    from ..runs.provenance import provenance
    from ..training.sampler_statistics import sampler_hardness, sampler_settings, sampler_table

    _format(format, out)  # fail now, not after minutes of work
    changes = parse_assignments(set_)
    _put(changes, "model", "weights", "" if weights == "none" else weights)
    changes, images = _with_own_data(_put_data(changes, data, root))
    settings = sampler_settings(changes)
    images = images or dataset(settings.data.name, settings.data.root or None, held_out=settings.data.held_out)
    found = sampler_hardness(images, settings, batches, margin, device, Console())
    about = {
        "settings": to_dict(settings),
        "batches": batches,
        "margin": margin,
        **provenance(computer_of(device_named(device))),
    }
    _show(replace(sampler_table(found), about=about), format, out)


def _keys(text: str) -> list[str]:
    """Names separated by commas."""
    return [key.strip() for key in text.split(",") if key.strip()]


def _entries(folders: list[Path]) -> "tuple[Entry, ...]":
    from ..report.collect import collect

    found = collect(folders)
    _warn(found.problems)
    return found.entries


def _warn(lines: tuple[str, ...]) -> None:
    from ..console import Console

    for line in lines:
        Console().say(line)


_ENDINGS = {"": "text", ".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json"}


def _format(format: str, out: Path | None) -> str:
    """The value of --format, or the format that the extension of --out implies."""
    from ..errors import check
    from ..report.rendering import check_format

    ending = _ENDINGS.get("" if out is None else out.suffix.lower(), "")
    endings = ".md, .tex, .csv, .json or .txt (compare: .html too)"
    check(bool(format or ending), f"--out {out}: give a file that ends in {endings}, or add --format")
    check_format(format or ending)
    return format or ending


def _show(table: "Table", format: str = "", out: Path | None = None) -> None:
    """Print the table at the width of the terminal, or write it to a file."""
    from shutil import get_terminal_size

    from ..report.rendering import render
    from ..runs.writing import atomic

    format = _format(format, out)
    wide = get_terminal_size().columns if out is None and sys.stdout.isatty() else None
    text = render(table, format, wide, Path() if out is None else out.parent)
    if out is None:
        print(text)
        return
    with atomic(out) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    print(f"written: {out}")
