"""What of a run's record is shared with others: settings and numbers, without the paths of your machine."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ..extensions import is_hub

__all__ = ["summary_of", "without_paths"]

# Other entries, such as those of a newer version or of your own callbacks, stay at home.
_KEPT = (
    *("schema", "settings", "row", "versions", "device", "commit", "data", "model", "ranks", "status", "reason"),
    *("start", "final", "seconds", "image_steps", "weights", "attention"),
)
# A path from the root, home or a parent folder; not 8/255, hm/t6/cub or https://host/page.
_PATH = re.compile(r"(?<![\w/.~@%+-])(?:~[\w.-]*|\.{1,2})?(?:/[^\s/'\"<>|:;,()\[\]{}]+)+/?")


def summary_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of run.json that may be published; files are named without their folders."""
    kept = without_paths({name: info[name] for name in _KEPT if name in info})
    settings = kept.get("settings")
    if isinstance(settings, dict):
        if isinstance(settings.get("data"), dict):
            settings["data"] |= {"root": ""}
        for section, key in ((settings, "recipe"), (settings.get("model"), "weights")):
            if isinstance(section, dict) and isinstance(section.get(key), str) and not is_hub(section[key]):
                section[key] = PurePath(section[key]).name
    return dict(kept)


def without_paths(value: Any) -> Any:
    """The same tree with the last part alone of every path in its texts.

    >>> without_paths({"root": "/home/me/my photos", "eps": "8/255", "note": "read from ~/photos/birds: 3 files"})
    {'root': 'my photos', 'eps': '8/255', 'note': 'read from birds: 3 files'}
    """
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(each) for each in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~", "./", "../", "file:")):
        return PurePath(value).name
    return _PATH.sub(lambda found: PurePath(found[0]).name, value)
