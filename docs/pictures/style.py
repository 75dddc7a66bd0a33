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


def save(figure: Any, name: str, folder: Path = HERE) -> Path:
    """Write NAME.png, the same bytes each time: no date and no version inside."""
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15, metadata={"Software": None})
    plt.close(figure)
    return path
