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

    def known(self) -> Mapping[str, Any]:
        """The parts that the file has."""
        found: Mapping[str, Any] = json.loads(self.file.read_text())[self.heading] if self.file.exists() else {}
        return found

    def keep(self, name: str, found: Any) -> None:
        """Add a part; those that other processes have added meanwhile stay."""
        print(name, json.dumps(found), flush=True)
        self.file.write_text(json.dumps({**self.about, self.heading: {**self.known(), name: found}}, indent=1) + "\n")
