"""A limit that conditions compare with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A default limit with its unit and meaning.

    unit: `1` for shares, which are at most 1; `{thing}` for all else.
    below: the threshold that this one must be lower than, such as the one of a worse severity.
    """

    name: str
    value: float
    unit: str
    meaning: str
    below: str = ""
