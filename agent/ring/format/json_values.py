"""JSON that another process wrote, read into values of a type."""

import json
from typing import Any, TypeVar

import msgspec

from mp_agent.errors import RingError

T = TypeVar("T")


def as_type(value: object, kind: type[T]) -> T:
    """Return what JSON says as a record of a type; RingError where a field is of another one."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RingError(f"{kind.__name__}: {error}") from error


def read_json(data: str | bytes) -> Any:
    """Return what JSON says. Raises RingError where it is none, or nested too deeply."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RingError(f"no JSON: {error}") from error
