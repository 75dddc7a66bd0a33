"""A real browser for the pages: Debian's chromium, driven by its own driver, without a network."""

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

# Text whose contrast with what lies behind it is too low: [ratio, text]. Disabled buttons may be faint.
CONTRAST = r"""
const parse = (c) => (c.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
  .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c;
  }
  return [255, 255, 255];
};
const bad = [];
let seen = 0;
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walk.nextNode(); node; node = walk.nextNode()) {
  const e = node.parentElement;
  if (!node.textContent.trim() || ["SCRIPT", "STYLE", "OPTION"].includes(e.tagName) || e.closest(":disabled")) continue;
  if (!e.getClientRects().length) continue;
  const style = getComputedStyle(e);
  const ink = parse(e instanceof SVGElement ? style.fill : style.color);
  const [x, y] = [light(ink), light(behind(e))];
  const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  seen += 1;
  if (ratio < 4.5) bad.push([ratio, node.textContent.trim().slice(0, 60)]);
}
return [seen, bad];
"""


class Browser:
    """A page at a time, with what a test wants to know of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1100, dark: bool = False, media: str = "screen") -> None:
        self.driver.get("about:blank")
        self.driver.get_log("performance"), self.driver.get_log("browser")  # those of the page before
        phone = width < 600
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": scheme})
        self.driver.get(page.resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def count(self, selector: str) -> int:
        """How many elements are there and seen."""
        script = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).length"
        return int(self.run(script, selector))

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def press(self, key: str) -> None:
        """A key, to whatever has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key})

    def choose(self, selector: str, value: str) -> None:
        script = "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
        self.run(script + "s.dispatchEvent(new Event('change', {bubbles: true}))", selector, value)

    def complaints(self) -> list[str]:
        """Everything that the console said."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for, the page itself and what it holds apart."""
        said = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in said if each["method"] == "Network.requestWillBeSent"]
        pages = [url for url in asked if url.startswith("file:")]
        assert len(pages) == 1, "the log must show the page itself, or it shows nothing"
        # The browser's own first page may still be loading; a page from a file cannot ask for its parts.
        return [url for url in asked if not url.startswith(("file:", "data:", "chrome:"))]

    def screenshot(self, path: Path, height: int) -> None:
        width = self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def a_browser() -> Iterator[Browser]:
    """Started and ended here; where there is none, tests are skipped and say what is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[dev]'")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium or no chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield Browser(found)
        finally:
            found.quit()
