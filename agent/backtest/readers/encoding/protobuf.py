"""The wire format of protocol buffers, as far as logs need it: fields of a message, unparsed."""

import struct
from collections.abc import Iterator

Value = int | bytes


class WireError(ValueError):
    """A message breaks off, or holds what no message can hold."""


def fields_of(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field: integers, and bytes of all else. Raises WireError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value: Value
            value, at = _varint(message, at)
        elif kind in (1, 2, 5):
            length = {1: 8, 5: 4}.get(kind)
            if length is None:
                length, at = _varint(message, at)
            value = message[at : at + length]
            if len(value) < length:
                raise WireError("a field breaks off")
            at += length
        else:
            raise WireError(f"a field has wire type {kind}")
        yield number, value


def double(value: Value) -> float:
    """Return a fixed 64-bit field as a float. Raises WireError for another field."""
    return _unpacked("<d", value)


def single(value: Value) -> float:
    """Return a fixed 32-bit field as a float. Raises WireError for another field."""
    return _unpacked("<f", value)


def signed(value: Value) -> int:
    """Return a varint field as a signed 64-bit integer. Raises WireError for another field."""
    if not isinstance(value, int):
        raise WireError("a field has another type")
    return value - (1 << 64) if value >= 1 << 63 else value


def text(value: Value) -> str:
    """Return a field as text. Raises WireError for a number."""
    return message(value).decode("utf-8", "replace")


def message(value: Value) -> bytes:
    """Return a field as a message. Raises WireError for a number."""
    if isinstance(value, int):
        raise WireError("a field has another type")
    return value


def _unpacked(form: str, value: Value) -> float:
    try:
        (number,) = struct.unpack(form, message(value))
    except struct.error as error:
        raise WireError("a field has another length") from error
    return float(number)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while shift < 70:
        if at >= len(message):
            raise WireError("a number breaks off")
        byte = message[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & (1 << 64) - 1, at
        shift += 7
    raise WireError("a number is too long")
