"""A JSON file that a benchmark fills part by part, perhaps in several runs: all of them must be made alike."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Parts"]


class Parts:
    """What was found under a heading of the file, beside `about`: versions, commit and the settings of all parts."""

    def __init__(self, file: str, heading: str, about: Mapping[str, Any]) -> None:
        self.file, self.heading, self.about = Path(file), heading, about
        before = json.loads(self.file.read_text()) if self.file.exists() else about
        others = {key: before.get(key) for key in about if before.get(key) != about[key]}
        assert not others, f"{file} has parts that were made with {others}; write to another file"

    @staticmethod
    def read(file: str | Path, heading: str) -> dict[str, Any]:
        """The parts that a file has; none where there is no file."""
        path = Path(file)
        found: dict[str, Any] = json.loads(path.read_text())[heading] if path.exists() else {}
        return found

    def keep(self, name: str, found: Any) -> None:
        """Add a part; those that other processes have added meanwhile stay."""
        print(name, json.dumps(found), flush=True)
        known = self.read(self.file, self.heading)
        self.file.write_text(json.dumps({**self.about, self.heading: {**known, name: found}}, indent=1) + "\n")
