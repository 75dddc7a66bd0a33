"""One style for the pictures of the site: dark text on a white card, which reads the same on light and dark pages."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE, ORANGE, GREEN, RED, GREY = "#1b5e8c", "#d9822b", "#2e8b57", "#c23b3b", "#6b7280"
HERE = Path(__file__).resolve().parent


def begin(**fonts: Any) -> None:
    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            **fonts,
        }
    )


def save(figure: Any, name: str, folder: Path = HERE, about: str | None = None) -> Path:
    """Write NAME.png, the same bytes each time: no date, no version. `about` tells its numbers, for a test."""
    path = folder / f"{name}.png"
    told = {"Software": None, "Description": about}
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15, metadata=told)
    plt.close(figure)
    return path
