"""A notebook that runs longer than a minute is a warning, which `./start docs` makes an error.

myst-nb limits the time of a cell (`nb_execution_timeout`). Here the same limit holds for all cells of a notebook.
"""

from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

__all__ = ["setup", "slow"]

_log = logging.getLogger(__name__)


def slow(found: Any, limit: float) -> list[tuple[str, float]]:
    """(notebook, its seconds) for those over the limit; `found` is what myst-nb notes of every page.

    >>> slow({"a": {"exec_data": {"runtime": 70.0}}, "b": {"exec_data": {"runtime": 3.0}}, "c": {}}, 60)
    [('a', 70.0)]
    """
    times = ((name, (about.get("exec_data") or {}).get("runtime") or 0.0) for name, about in sorted(found.items()))
    return [(name, seconds) for name, seconds in times if seconds > limit]


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    limit = app.config.nb_execution_timeout
    for name, seconds in slow(getattr(env, "nb_metadata", {}), limit):
        _log.warning("the notebook runs for %.0f s, and %d s are allowed", seconds, limit, location=name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-updated", _check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
