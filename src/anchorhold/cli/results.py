"""report, compare, plot, sweep and hardness: from runs and audits to pages, tables and figures."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .app import Device, Set, app, number
from .train import _put, _put_data

if TYPE_CHECKING:
    from ..report.collect import Entry
    from ..report.tables import Table

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders with runs and audits, however deep")]
Format = Annotated[str, typer.Option(help="text, markdown, csv, json or html; by default what the end of --out says")]
DataSet = Annotated[str, typer.Argument(help="cub, digits, gaussians, or a folder with a folder for each class")]
Root = Annotated[Path | None, typer.Option(help="Where the data set lies")]


@app.command()
def report(
    folders: Folders,
    out: Annotated[Path | None, typer.Option(help="Write the page there; only where there is one to write")] = None,
) -> None:
    """Write the page of every audit (page.html) and run (training.html); a run may still be going on."""
    from jinja2 import TemplateError

    from ..errors import RunError
    from ..report.audit_page import write_audit_page
    from ..report.collect import walk
    from ..report.training_page import write_training_page
    from ..settings import check

    kinds = (("audit.json", write_audit_page), ("run.json", write_training_page))
    problems: list[str] = []
    found = [(path, write) for path in walk(folders, problems) for name, write in kinds if (path / name).is_file()]
    check(bool(found), "there is no audit.json and no run.json in these folders; give folders with audits or runs")
    check(out is None or len(found) == 1, f"--out is one page, and there are {len(found)} to write; leave it out")
    written = []
    for path, write in found:
        try:
            written.append(write(path, out))
        # One bad folder does not keep the others from their pages, whatever is wrong with its JSON.
        except RunError as error:
            problems.append(f"left out: {error}")
        except (KeyError, TypeError, ValueError, AttributeError, TemplateError) as error:
            problems.append(f"left out: {path} does not have what a page needs ({type(error).__name__}: {error})")
    _warn(tuple(problems))
    if not written:
        raise RunError("no page could be written")
    for page in written:
        print(f"written: {page}")


@app.command()
def compare(
    folders: Folders,
    format: Format = "",
    sort: Annotated[str, typer.Option(metavar="KEY", help="A column of the CSV, such as r1 or ers_corrected")] = "",
    matrix: Annotated[
        str, typer.Option(metavar="A,B", help="Two settings, such as source,destination or train.seed,defence.steps")
    ] = "",
    value: Annotated[
        str, typer.Option(metavar="KEY,...", help="What the matrix shows: r1, ers, ers_corrected, ars, …")
    ] = "r1,ers",
    table: Annotated[
        str,
        typer.Option(help="runs, print (beside published rows), columns (of each attack), strong, entanglement"),
    ] = "runs",
    out: Annotated[Path | None, typer.Option(help="Write it there instead")] = None,
    into: Annotated[
        Path | None, typer.Option(help="Write the tables of these folders anew where a Markdown page has them")
    ] = None,
) -> None:
    """Put runs side by side: a line each, or a matrix of two settings."""
    from ..report import compare as report
    from ..report.into import TABLES, write_into
    from ..settings import check, nearest

    check(table in TABLES, f"no table {table!r}; {nearest(table, TABLES)}")
    if into is not None:
        alone = not (format or sort or matrix or out or table != "runs")
        check(alone, "--into writes what the page itself asks for: leave the other options out")
        count, problems = write_into(into, folders)
        _warn(problems)
        print(f"written: {into} ({count} table{'s' if count > 1 else ''})")
        return
    page = format == "html" or (not format and out is not None and out.suffix.lower() in (".html", ".htm"))
    check(not page or (not matrix and table == "runs"), "a page shows the runs: leave out --matrix and --table")
    check(not page or out is not None, "a page is a file: say where with --out compare.html")
    keys = [key.strip() for key in matrix.split(",")]
    check(not matrix or (len(keys) == 2 and all(keys)), f"--matrix wants two settings, such as a,b; got {matrix!r}")
    entries = _entries(folders)
    if page and out is not None:
        from ..report.compare_page import write_compare_page

        print(f"written: {write_compare_page(entries, out, sort)}")
        return
    if matrix:
        values = [key.strip() for key in value.split(",") if key.strip()]
        shown = report.matrix(entries, keys[0], keys[1], values)
    else:
        shown = TABLES[table](entries)
    _show(shown.sorted_by(sort) if sort else shown, format, out)


@app.command()
def plot(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="The figure: .png, .pdf or .svg")],
    what: Annotated[
        str,
        typer.Option(
            help="curves, collapse, shift, hardness, active, columns of metrics.jsonl by name; or rows (R@1 against "
            "ERS, with print) or cost (ERS against training cost)"
        ),
    ] = "curves",
    against: Annotated[
        str, typer.Option(metavar="KEY", help="Instead: R@1 and ERS against this setting, such as defence.beta")
    ] = "",
    series: Annotated[str, typer.Option(metavar="KEY", help="With --against: a line for each value of this")] = "",
) -> None:
    """Draw several runs in one figure."""
    from ..report.plots import plot_against, plot_epochs
    from ..report.scatter import SCATTERS
    from ..settings import check

    check(what != "entanglement", "entanglement is a table: anchorhold compare DIR --table entanglement")
    entries = _entries(folders)
    if against:
        written = plot_against(entries, against, out, series)
    else:
        written = SCATTERS[what](entries, out) if what in SCATTERS else plot_epochs(entries, what, out)
    print(f"written: {written}")


@app.command()
def sweep(
    data: DataSet,
    vary: Annotated[list[str], typer.Option(metavar="KEY=A,B,...", help="A setting and its values; may be repeated")],
    out: Annotated[Path, typer.Option(help="Where the runs, the table and the figure go; the same one again goes on")],
    root: Root = None,
    recipe: Annotated[str, typer.Option(help="One of `anchorhold recipes`, or a TOML file")] = "hm-lga",
    set_: Set = [],  # noqa: B006
    audit: Annotated[bool, typer.Option(help="Audit every run")] = True,
    limit: Annotated[int, typer.Option(help="How many images an audit attacks; 0 for all")] = 1000,
    audit_eps: Annotated[str, typer.Option(help="How far a pixel may move in an audit, of 1")] = "8/255",
    audit_alpha: Annotated[str, typer.Option(help="Length of a step")] = "3/255",
    audit_steps: Annotated[int, typer.Option(help="Steps of PGD")] = 32,
    device: Device = "auto",
) -> None:
    """Train and audit a run for every value of a setting, then compare them in a table and a figure."""
    from ..console import Console
    from ..data.datasets import dataset
    from ..layers import parse_assignments
    from ..sweeping import parse_vary, points
    from ..sweeping import sweep as run_sweep

    changes = parse_assignments(set_)
    _put_data(changes, data, root)
    varied = parse_vary(vary)
    settings = points(recipe, varied, changes)[0].settings
    found = run_sweep(
        dataset(settings.data.name, settings.data.root or None, held_out=settings.data.held_out),
        recipe,
        varied,
        out,
        overrides=changes,
        audited={
            "limit": limit,
            "eps": number("--audit-eps", audit_eps),
            "alpha": number("--audit-alpha", audit_alpha),
            "steps": audit_steps,
        }
        if audit
        else None,
        device=device,
        report=Console(),
    )
    _warn(found.problems)
    for table in found.tables:
        _show(table)
        print()
    print(f"written: {', '.join(map(str, found.files))}")
    print(f"next: anchorhold plot {out} --what collapse --out {out / 'collapse.png'}")


@app.command()
def hardness(
    data: DataSet,
    root: Root = None,
    weights: Annotated[str | None, typer.Option(help="imagenet, timm:NAME, a file, a run folder, or none")] = None,
    batches: Annotated[int, typer.Option(help="How many; 0 is one epoch")] = 0,
    margin: Annotated[float, typer.Option(help="How far beyond the positive a semihard negative may lie")] = 0.2,
    set_: Set = [],  # noqa: B006
    format: Annotated[
        str, typer.Option(help="text, markdown, csv or json; by default what the end of --out says")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write it there instead")] = None,
    device: Device = "auto",
) -> None:
    """Say how hard the triplets of each sampler are before any training (001 table 1), and their collapseness."""
    from ..console import Console
    from ..data.datasets import dataset
    from ..device import device_named
    from ..layers import parse_assignments, settings_from, to_dict
    from ..record import provenance
    from ..report.samplers import sampler_hardness, sampler_table

    _format(format, out)  # now, and not after minutes of work
    changes = parse_assignments(set_)
    _put(changes, "model", "weights", "" if weights == "none" else weights)
    _put_data(changes, data, root)
    settings = settings_from("natural", changes)
    images = dataset(settings.data.name, settings.data.root or None, held_out=settings.data.held_out)
    found = sampler_hardness(images, settings, batches, margin, device, Console())
    about = {"settings": to_dict(settings), "batches": batches, "margin": margin, **provenance(device_named(device))}
    _show(replace(sampler_table(found), about=about), format, out)


def _entries(folders: list[Path]) -> "tuple[Entry, ...]":
    from ..report.collect import collect

    found = collect(folders)
    _warn(found.problems)
    return found.entries


def _warn(lines: tuple[str, ...]) -> None:
    from ..console import Console

    for line in lines:
        Console().say(line)


_ENDINGS = {"": "text", ".txt": "text", ".md": "markdown", ".csv": "csv", ".json": "json"}


def _format(format: str, out: Path | None) -> str:
    """What --format says, or the end of --out."""
    from ..report.tables import check_format
    from ..settings import check

    ending = _ENDINGS.get("" if out is None else out.suffix.lower(), "")
    endings = ".md, .csv, .json or .txt (compare: .html too)"
    check(bool(format or ending), f"--out {out}: give a file that ends in {endings}, or say --format")
    check_format(format or ending)
    return format or ending


def _show(table: "Table", format: str = "", out: Path | None = None) -> None:
    """Print it as wide as the terminal is, or write it to a file."""
    from shutil import get_terminal_size

    from ..record import atomic
    from ..report.tables import render

    format = _format(format, out)
    wide = get_terminal_size().columns if out is None and sys.stdout.isatty() else None
    text = render(table, format, wide, Path() if out is None else out.parent)
    if out is None:
        print(text)
        return
    with atomic(out) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(f"written: {out}")
