"""One table in five formats, whatever the names are."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from anchorhold.errors import SettingsError
from anchorhold.report.latex import escaped
from anchorhold.report.rendering import render
from anchorhold.report.tables import Column, Estimate, Link, Mean, Table

HOSTILE = [
    "line\nbreak",
    "pipe|pipe",
    "a\\|b",
    "[bold]rich[/bold]",
    "\x1b[31mred\x1b[0m",
    "<script>alert(1)</script>",
    "[click](http://example.com)",
    'quote"comma,semicolon;',
    "x" * 150 + "y" * 150,
    "名前 ε λ",
    "",
    "tab\tand\rreturn\u2028separator",
]


def cells_of(line: str) -> list[str]:
    """The cells of a Markdown row, as a reader of Markdown cuts them."""
    out, cell, escaped = [], "", False
    for letter in line:
        if letter == "|" and not escaped:
            out.append(cell.strip())
            cell = ""
        else:
            cell += letter
        escaped = letter == "\\" and not escaped
    return out[1:]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_a_table(name: str) -> None:
    table = Table((Column("name", "run"), Column("r1", "R@1")), ((name, 12.34), ("other", 5.0)), (f"note {name}",))
    head, _, first, second, *_ = render(table, "markdown").splitlines()
    assert [len(cells_of(line)) for line in (head, first, second)] == [2, 2, 2]
    assert cells_of(first)[1] == "12.3" and cells_of(second) == ["other", "5.0"]
    assert "<" not in first.replace("\\<", "") and "](" not in first
    rows = list(csv.reader(io.StringIO(render(table, "csv"))))
    assert [len(row) for row in rows] == [2, 2, 2] and rows[1][1] == "12.34"
    for width in (None, 40):
        text = render(table, "text", width)
        lines = text.splitlines()
        assert "\x1b" not in text and "12.3" in text and "5.0" in text
        assert max(map(len, lines[:4])) <= (width or 70)  # a long name is cut
    assert len(render(table).splitlines()) == 6  # head, rule, two rows, a gap, a note


def test_rich_markup_is_text_and_the_ends_of_a_long_name_stay() -> None:
    rows = (("[bold]b[/bold]", 1.0), ("same" * 20 + "-1", 2.0), ("same" * 20 + "-2", 3.0))
    text = render(Table((Column("name", "run"), Column("r1", "R@1")), rows))
    assert "[bold]b[/bold]" in text and "-1 " in text and "-2 " in text


TABLE = Table(
    (
        Column("name", "run"),
        Column("ers", "ERS"),
        Column("ars", "ARS", span=False),
        Column("m", "M", 2),
        Column("n", "steps", 0, thousands=True),
        Column("empty", "empty"),
    ),
    (
        ("a", Estimate(28.64, 27.61, 29.0), Estimate(3.14, 3.0, 3.3), Mean(1.005, 2, 3), 1234567, None),
        ("b", "collapse", None, "collapse (2)", 7, None),
        ("c", Estimate(30.0), Estimate(4.0, None, None), Mean(2.0, 1, 1), None, None),
        ("d", None, None, Mean(2.0, 2, 2), 0, None),
    ),
    ("in %",),
)


def test_numbers_are_rounded_and_counted_in_text_and_markdown() -> None:
    lines = render(TABLE, "markdown").splitlines()
    assert lines[0] == "| run | ERS | ARS | M | steps |"  # a column without a value is left out
    assert lines[2] == "| a | 28.6 [27.6, 29.0] | 3.1 | 1.00 (2 of 3) | 1,234,567 |"
    assert lines[3] == "| b | collapse | – | collapse (2) | 7 |"
    assert lines[4] == "| c | 30.0 | 4.0 | 2.00 | – |"
    assert lines[5] == "| d | – | – | 2.00 (2) | 0 |"
    assert lines[-1] == "in %"
    text = render(TABLE)
    for word in ("28.6 [27.6, 29.0]", "1.00 (2 of 3)", "1,234,567", "collapse"):
        assert word in text


def test_csv_has_every_column_and_every_digit() -> None:
    rows = list(csv.DictReader(io.StringIO(render(TABLE, "csv"))))
    assert list(rows[0]) == [
        "name",
        "ers",
        "ers_low",
        "ers_high",
        "ars",
        "ars_low",
        "ars_high",
        "m",
        "m_runs",
        "n",
        "empty",
    ]
    assert rows[0]["ers"] == "28.64" and rows[0]["ers_low"] == "27.61" and rows[0]["m_runs"] == "2"
    assert rows[1]["ers"] == "collapse" and rows[1]["ers_low"] == "" and rows[1]["m_runs"] == ""
    assert rows[0]["n"] == "1234567" and rows[3]["n"] == "0" and rows[2]["n"] == ""


def test_json_has_what_csv_has_and_says_where_it_comes_from() -> None:
    found = json.loads(render(replace(TABLE, about={"commit": "abc"}).sorted_by("ers"), "json"))
    assert found["schema"] == "anchorhold.table/1" and found["commit"] == "abc" and found["notes"] == ["in %"]
    same = csv.DictReader(io.StringIO(render(TABLE.sorted_by("ers"), "csv")))
    assert [{key: "" if cell is None else str(cell) for key, cell in row.items()} for row in found["rows"]] == [*same]
    assert [row["name"] for row in found["rows"]] == ["c", "a", "b", "d"]
    endless = render(Table((Column("r1", "R@1"),), ((float("nan"),), (float("inf"),))), "json")
    assert [row["r1"] for row in json.loads(endless, parse_constant=pytest.fail)["rows"]] == [None, None]
    assert found["rows"][1]["ers_low"] == 27.61 and found["rows"][1]["n"] == 1234567


def cut(line: str) -> list[str]:
    """The cells of a row of LaTeX, as LaTeX cuts them."""
    assert line.endswith(r" \\")
    return re.split(r"(?<!\\) ?& ?", line.removesuffix(r" \\"))


@pytest.mark.parametrize("name", [*HOSTILE, r"50 % & \input{x} #1_{2}^~$", "[a]", "*", "*a", "C\u0304 ≥ μ̂ µ ☃"])
def test_no_name_breaks_a_table_in_latex(name: str) -> None:
    table = Table((Column("name", "run"), Column("r1", "R@1")), ((name, 12.34), ("other", 5.0)), (f"note {name}",))
    _, begin, top, head, mid, first, second, *rest = render(table, "latex").splitlines()
    assert begin == r"\begin{tabular}{lr}" and (top, mid) == (r"\toprule", r"\midrule")
    assert cut(head) == ["run", "R@1"] and cut(second) == ["other", "5.0"]
    assert len(cut(first)) == 2 and cut(first)[1] == "12.3" and not first.startswith(("[", "*"))
    assert rest[:2] == [r"\bottomrule", r"\end{tabular}"] and len(rest) == 3
    # What LaTeX would obey is escaped: nothing but the escapes themselves begins with a backslash.
    words = "textbackslash|textasciitilde|textasciicircum|textless|textgreater|textbar|ldots"
    allowed = rf"\\(?:(?:{words})\{{\}}|[&%$#_{{}}])|\$\\[a-z]+\$|\{{\}}[\[*]"
    allowed += r"|\$\\(?:bar|hat)\{(?:\\mathrm\{.\}|\\[a-z]+)\}\$"
    assert not set(re.sub(allowed, "", cut(first)[0])) & set("\\&%$#_{}~^")


def test_chosen_columns_follow_the_name_in_the_order_asked() -> None:
    columns = (Column("name", "run"), Column("r1", "R@1"), Column("ers", "ERS"))
    table = Table(columns, (("a", 1.0, Estimate(2.0, 1.5, 2.5)), ("b", 3.0, None)))
    chosen = render(table.only(["ers", "r1"]), "latex").splitlines()
    assert cut(chosen[3]) == ["run", "ERS", "R@1"] and cut(chosen[5]) == ["a", "2.0 [1.5, 2.5]", "1.0"]
    assert cut(chosen[6]) == ["b", "--", "3.0"]
    assert [column.key for column in table.only(["r1", "name"]).columns] == ["name", "r1"]
    with pytest.raises(SettingsError, match=r"no column 'er'.*ers"):
        table.only(["er"])


def test_columns_are_chosen_and_sorted_by_by_every_name_of_the_csv() -> None:
    columns = (Column("name", "run"), Column("r1", "R@1"), Column("ers", "ERS"))
    table = Table(columns, (("a", 9.0, Estimate(2.0, 0.5, 2.5)), ("b", 3.0, Estimate(1.5, 1.0, 2.0))))
    head = render(table, "csv").splitlines()[0].split(",")
    assert head == ["name", "r1", "ers", "ers_low", "ers_high"]
    for name in head:
        assert [column.key for column in table.only([name]).columns] == ["name", *({name.split("_")[0]} - {"name"})]
    assert [[row[0] for row in table.sorted_by(name).rows] for name in ("ers", "ers_low")] == [["a", "b"], ["b", "a"]]


def test_a_chosen_column_without_values_is_told() -> None:
    columns = (Column("name", "run"), Column("r1", "R@1"), Column("ers", "ERS"))
    table = Table(columns, (("a", 9.0, None),), ("first",))
    assert render(table.only(["ers"])).endswith("first\nno run here has a value for ers")
    assert render(table.only(["r1"])).endswith("first")


@pytest.mark.parametrize(
    ("sign", "written"),
    [
        ("ε", r"$\epsilon$"),
        ("Δ", r"$\Delta$"),
        ("é", "é"),
        ("e\u0301", "é"),
        ("H\u0304", r"$\bar{\mathrm{H}}$"),
        ("μ\u0304", r"$\bar{\mu}$"),
        ("☃", "U+2603"),
        ("\u0304", "U+0304"),
    ],
)
def test_signs_that_latex_does_not_know(sign: str, written: str) -> None:
    assert escaped(sign) == written


def test_sorting_puts_the_largest_first_and_what_is_missing_last() -> None:
    def order(key: str) -> str:
        return "".join(str(row[0]) for row in TABLE.sorted_by(key).rows)

    assert order("name") == "abcd"
    assert order("ers") == "cabd"  # numbers, then a collapse, then nothing
    assert order("n") == "abdc"
    with pytest.raises(SettingsError, match="did you mean ers"):
        TABLE.sorted_by("erss")


def test_a_narrow_terminal_loses_spare_columns_and_is_told() -> None:
    columns = (Column("name", "run"), Column("ers", "ERS"), Column("seconds", "seconds", spare=True))
    table = Table(columns, (("a-run-of-mine", Estimate(28.6, 27.6, 29.0), 123.0),))
    assert "seconds" in render(table, "text", 60) and "too wide" not in render(table, "text", 60)
    narrow = render(table, "text", 36)
    assert "[27.6, 29.0]" in narrow and "123" not in narrow and narrow.endswith("the terminal is too narrow: seconds")
    narrower = render(table, "text", 24)
    assert "28.6" in narrower and "27.6" not in narrower and narrower.endswith("seconds, intervals")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(SettingsError, match="did you mean markdown"):
        render(TABLE, "markdwon")


@pytest.mark.parametrize("name", ["plain", "a b", "](x) [y", "<b>", "a|b", "名 ε", "100%", "#?&", "back\\slash"])
def test_a_name_leads_to_its_file_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    file = tmp_path / "runs" / name / "run.json"
    table = Table((Column("name", "run"), Column("r1", "R@1")), ((Link(name, file), 1.0),))
    line = render(table, "markdown", beside=tmp_path / "docs").splitlines()[2]
    assert len(cells_of(line)) == 2
    (target,) = re.findall(r"(?<!\\)\]\(([^ ()]*)\) \|", line)
    assert (tmp_path / "docs" / unquote(target)).resolve() == file.resolve()
    for plain in (render(table, "markdown"), render(table), render(table, "csv")):
        assert "run.json" not in plain
    assert table.sorted_by("name").rows == table.rows


def test_a_link_is_written_from_where_the_table_will_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = Table((Column("name", "run"),), ((Link("a", Path("results/a/run.json")),),))
    for beside, way in ((Path(), "results/a"), (Path("docs"), "../results/a"), (Path("results"), "a")):
        assert f"[a]({way}/run.json)" in render(table, "markdown", beside=beside)


def test_latex_is_escaped_and_has_one_line_a_row() -> None:
    columns = (Column("name", "run"), Column("r1", "R@1 at ε"), Column("empty", "none"))
    rows = (("[a] 50% & b_c \\x{y}", Estimate(31.84, 30.0, 33.0), None), ("p~q^2 #1 $", None, None))
    lines = render(Table(columns, rows, ("a note\nof two lines",)), "latex").splitlines()
    assert lines[1:4] == [r"\begin{tabular}{lr}", r"\toprule", r"run & R@1 at $\epsilon$ \\"]
    assert lines[5] == r"{}[a] 50\% \& b\_c \textbackslash{}x\{y\} & 31.8 [30.0, 33.0] \\"
    assert lines[6] == r"p\textasciitilde{}q\textasciicircum{}2 \#1 \$ & -- \\"
    assert lines[7:] == [r"\bottomrule", r"\end{tabular}", r"\par{\footnotesize a note of two lines\par}"]
