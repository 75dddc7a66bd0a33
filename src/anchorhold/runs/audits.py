"""Reading the record of an audit, audit.json."""

from pathlib import Path
from typing import Any

from ..errors import RunError
from .fields import dig, parsed
from .files import regular
from .schemas import AUDIT_SCHEMA

__all__ = ["read_audit"]


def read_audit(path: Path) -> dict[str, Any]:
    """Read audit.json; refuse one that cannot be used."""
    file = path / "audit.json"
    try:
        audit: dict[str, Any] = parsed(regular(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {file}: {error}") from None
    if dig(audit, "schema") != AUDIT_SCHEMA:
        raise RunError(f"{file} has schema {dig(audit, 'schema')!r}; this version reads {AUDIT_SCHEMA}")
    if not all(isinstance(audit.get(part), dict) for part in ("settings", "data", "clean", "protocols")):
        raise RunError(f"{file} lacks settings, data, clean metrics or protocols")
    return audit
