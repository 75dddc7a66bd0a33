"""Screenshots of the HTML pages: python docs/pictures/pages.py AUDIT RUN COMPARE.html, with chromium in the path.

AUDIT is the folder of an audit, RUN that of a run after `anchorhold report RUN`. The pictures here show the digits of
docs/guides/comparing.md, each audit with `--limit 200`. pages.json beside them says of which commit, model and attacks
they are, so that a test detects old ones.
"""

import hashlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
WIDTH = 1000


def shot(page: Path, top: int, bottom: int) -> Image.Image:
    """The page from `top` to `bottom`, in pixels."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.png"
        size = f"--window-size={WIDTH},{bottom}"
        quiet = ("--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu")
        subprocess.run(
            ["chromium", *quiet, size, f"--screenshot={file}", page.resolve(strict=True).as_uri()],
            check=True,
            capture_output=True,
        )
        return Image.open(io.BytesIO(file.read_bytes())).convert("RGB").crop((0, top, WIDTH, bottom))


def save(picture: Image.Image, name: str) -> str:
    """With 128 colours, which halves the file and shows on no page. Returns the file's hash."""
    picture.quantize(128, dither=Image.Dither.NONE).save(HERE / name, optimize=True)
    return hashlib.sha256((HERE / name).read_bytes()).hexdigest()


def main(audit: Path, run: Path, compare: Path) -> None:
    """Take all pictures, and write pages.json."""
    found = json.loads((audit / "audit.json").read_text(encoding="utf-8"))
    curve = found["curve"]
    files = {
        "audit-page.png": save(shot(audit / "page.html", 0, 1895), "audit-page.png"),
        "audit-examples.png": save(shot(audit / "page.html", 2450, 3150), "audit-examples.png"),
        "training-page.png": save(shot(run / "training.html", 0, 1645), "training-page.png"),
        "compare-page.png": save(shot(compare, 0, 700), "compare-page.png"),
    }
    about = {
        "commit": found["commit"],
        "weights": found["model"]["weights"],
        "attacks": curve["attacks"]["R@1"],
        "eps": curve["eps"],
        "R@1": curve["lines"]["R@1"],
        "sha256": files,
    }
    (HERE / "pages.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
