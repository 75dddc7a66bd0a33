"""Versions of the records on disk; each record names its version in `schema`.

Records of the previous version are converted when they are read. `upgraded` makes these changes:

    anchorhold.run/2    rows of papers have names: hm/t6/cub/hm-lga-8, where anchorhold.run/1 had 001/t6/cub/hm-lga-8
"""

from typing import Any

__all__ = ["AUDIT_SCHEMA", "LIST_SCHEMA", "RUN_SCHEMA", "renamed_row", "upgraded"]

AUDIT_SCHEMA = "anchorhold.audit/1"
LIST_SCHEMA = "anchorhold.list-attack/1"
RUN_SCHEMA = "anchorhold.run/2"

_PAPERS = {"000": "robust-init", "001": "hm", "002": "catride", "003": "adml"}


def renamed_row(row: str) -> str:
    """The name of a row, with the current name of its paper.

    >>> renamed_row("001/t6/cub/hm-lga-8"), renamed_row("hm/t6/cub/hm-lga-8")
    ('hm/t6/cub/hm-lga-8', 'hm/t6/cub/hm-lga-8')
    """
    paper, slash, rest = row.partition("/")
    return f"{_PAPERS.get(paper, paper)}{slash}{rest}"


def upgraded(info: dict[str, Any]) -> dict[str, Any]:
    """run.json of the current or the previous version, in the current form; other versions stay unchanged."""
    if info.get("schema") != "anchorhold.run/1":
        return info
    row = info.get("row")
    return {**info, "schema": RUN_SCHEMA} | ({"row": renamed_row(row)} if isinstance(row, str) else {})
