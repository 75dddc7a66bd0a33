"""The three pages in a real browser, opened from files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anchorhold.report.collect import collect
from anchorhold.report.compare_page import write_compare_page
from anchorhold.report.training_page import write_training_page
from tests.report.browser import CONTRAST, Browser, a_browser
from tests.report.shown import FOLDER, HOSTILE, a_collapsing_run, a_hostile_audit, runs_to_compare

pytestmark = pytest.mark.slow

PAGES = ("audit", "training", "compare")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, with hostile names; made only where there is a browser."""
    place = tmp_path_factory.mktemp("pages")
    a_hostile_audit(place / FOLDER)
    compared = place / "compare.html"
    write_compare_page(collect([runs_to_compare(place / "runs")]).entries, compared)
    return {
        "audit": place / FOLDER / "page.html",
        "training": write_training_page(a_collapsing_run(place / "run" / FOLDER)),
        "compare": compared,
    }


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_asks_for_nothing_and_complains_of_nothing(kind: str, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[kind])
    assert browser.run("return document.querySelectorAll('h1').length") == 1
    assert browser.complaints() == [] and browser.requests() == []


@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("dark", [True, False], ids=["dark", "light"])
def test_every_word_can_be_read(kind: str, dark: bool, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[kind], dark=dark)
    back = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    seen, bad = browser.run(CONTRAST)
    assert seen > 30 and bad == []


@pytest.mark.parametrize("kind", PAGES)
def test_a_phone_does_not_scroll_sideways(kind: str, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[kind], width=390)
    if kind == "audit":
        browser.click("#every")  # every case, with every name
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert browser.run("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]


@pytest.mark.parametrize("kind", PAGES)
def test_hostile_names_are_text(kind: str, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[kind])  # an alert would stop everything that follows
    assert browser.run("return [...document.scripts].length") == 1
    assert browser.run("return document.querySelectorAll('img, b b, [onerror]').length") == 0
    text = browser.run("return document.body.textContent")
    for name in HOSTILE if kind == "audit" else ():
        assert name in text or name[:59] in text
    assert FOLDER in text


def test_the_gallery_is_filtered_and_walked(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["audit"])
    place = "return document.querySelector('#place').textContent"
    shown = "return [...document.querySelectorAll('.case')].filter((c) => !c.hidden).map((c) => c.dataset.attack)"
    total = int(browser.run(place).split()[-1])
    assert browser.count(".case") == 1 and browser.run(place) == f"1 of {total}" and total >= 9
    browser.press("ArrowRight")
    assert browser.count(".case") == 1 and browser.run(place) == f"2 of {total}"
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")  # there is none before the first
    assert browser.run(place) == f"1 of {total}"
    browser.click("#next")
    assert browser.run(place) == f"2 of {total}"
    browser.click("#every")
    assert browser.count(".case") == total
    browser.choose("#attack", "CA+")
    assert set(browser.run(shown)) == {"CA+"} and browser.count(".case") == len(browser.run(shown))
    browser.choose("#attack", "")
    for name in HOSTILE:  # a class is found whatever it is called
        browser.choose("#class", f"={name}")
        same = "return [...document.querySelectorAll('.case')].filter((c) => !c.hidden).map((c) => c.dataset.class)"
        found = browser.run(same)
        known = browser.run("return [...document.querySelectorAll('#class option')].map((o) => o.value)")
        assert set(found) == ({name} if f"={name}" in known else set())
    assert len(known) > 2


def test_all_pictures_can_be_seen(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["audit"])
    sizes = browser.driver.execute_async_script("""
        const done = arguments[0];
        Promise.all([...document.querySelectorAll("defs image")].map(async (picture) => {
          const image = new Image();
          image.src = picture.getAttribute("href");
          await image.decode();
          return image.naturalWidth;
        })).then(done, (error) => done(String(error)));
    """)
    assert set(sizes) == {8} and len(sizes) > 20
    used = browser.run("return [...document.querySelectorAll('use')].map((u) => u.getAttribute('href'))")
    assert all(browser.run("return document.querySelector(arguments[0]) !== null", each) for each in set(used))


def test_numbers_come_with_focus_and_definitions_with_a_click(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["audit"])
    tip = "return document.querySelector('.tip:not([hidden])')?.textContent"
    assert browser.run(tip) is None
    browser.run("document.querySelector('[data-protocol=corrected] summary').focus()")
    assert "clean" in browser.run(tip) and "goal" in browser.run(tip)
    browser.press("Escape")
    assert browser.run(tip) is None
    assert browser.count("[data-protocol=corrected] .more") == 0
    browser.click("[data-protocol=corrected] summary")
    assert browser.count("[data-protocol=corrected] .more") == 1 and browser.run(tip) is not None
    assert browser.count("[data-protocol=published]") == 0
    browser.click("[data-choose=published]")
    assert browser.count("[data-protocol=published]") == 1 and browser.count("[data-protocol=corrected]") == 0


def test_in_print_every_case_is_there(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["audit"], media="print")
    assert browser.count(".case") == browser.run("return document.querySelectorAll('.case').length")
    assert browser.count(".controls") == 0


def test_the_table_is_sorted_and_marked(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["compare"])
    names = "return [...document.querySelectorAll('table')][0].tBodies[0].rows"
    order = f"{names.replace('return ', 'return [...')}].map((row) => row.cells[1].textContent)"
    head = "th:nth-child({})"
    heads = browser.run(
        "return [...document.querySelectorAll('table')[0].tHead.rows[0].cells].map((c) => c.textContent)"
    )
    at = heads.index("ERS publ.") + 1
    assert browser.run(order) == [FOLDER, "a", "b", "c"]
    browser.click(f"{head.format(at)} button")
    assert browser.run(order) == ["b", "c", "a", FOLDER]  # the largest first, what is missing last
    browser.click(f"{head.format(at)} button")
    assert browser.run(order) == ["a", "c", "b", FOLDER]
    assert browser.run(f"return document.querySelector('{head.format(at)}').ariaSort") == "ascending"
    browser.click(f"{head.format(2)} button")
    assert browser.run(order) == [FOLDER, "a", "b", "c"]
    browser.click("tbody tr:nth-child(2) input")  # a is what others are held against
    cell = (
        f"{order.replace('cells[1].textContent', f'cells[{at - 1}].querySelector(String.raw`.beyond`)?.textContent')}"
    )
    assert browser.run(cell) == [None, "", " ▲", ""]
    browser.click("tbody tr:nth-child(3) input")
    assert browser.run(cell) == [None, " ▼", "", " ▼"]
