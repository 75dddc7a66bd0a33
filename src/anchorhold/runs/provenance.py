"""What produced a number: versions, machine and commit."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["commit", "provenance"]


def provenance(computer: str) -> dict[str, Any]:
    """Versions, the `computer` (`device.computer_of`) and the commit, so that a number can be reproduced."""
    packages = ["anchorhold", "torch", "torchvision", "timm", "numpy"]
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **versions},
        "device": computer,
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of the source tree: $ANCHORHOLD_COMMIT if it is set, else from git, else None."""
    if "ANCHORHOLD_COMMIT" in os.environ:
        return os.environ["ANCHORHOLD_COMMIT"]
    here = Path(__file__).resolve().parent
    if not (here.parents[2] / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            check=True,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()
