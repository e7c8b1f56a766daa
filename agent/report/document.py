"""The JSON of a report: what any reader takes, with a format and a version."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any


def written(document: Mapping[str, Any]) -> str:
    """Return a document as JSON; a number that is not finite is null.

    Its `version` rises when a key changes its meaning or goes; keys may be added without it.
    """
    return json.dumps(plain(document), indent=2, ensure_ascii=True, allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: records by field, enumerations by value."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def picked(record: Any, *names: str) -> dict[str, Any]:
    """Return some attributes of a record by name, where a document does not hold all of them."""
    return {name: getattr(record, name) for name in names}
