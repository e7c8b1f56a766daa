"""Questions to the HTTP API of a Prometheus, or of what speaks like one."""

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from mp_agent.errors import AnswerTooLarge, SourceError
from mp_agent.inputs.addresses import address_of
from mp_agent.inputs.http import Answer, send

TIMEOUT_SECONDS = 60.0
_EXCERPT_CHARACTERS = 60

_Data = TypeVar("_Data")


class SeriesData(Struct):
    """One series of a matrix: its labels, and (Unix seconds, value) pairs."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = []


class Matrix(Struct, rename="camel", tag_field="resultType", tag="matrix"):
    """Data of `query_range`."""

    result: list[SeriesData]


class SampleData(Struct):
    """One sample of a vector."""

    metric: dict[str, str]
    value: tuple[float, str]


class Vector(Struct, rename="camel", tag_field="resultType", tag="vector"):
    """Data of `query`."""

    result: list[SampleData]


class _Envelope(Struct):
    status: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


def ask(
    address: str,
    path: str,
    parameters: Mapping[str, object],
    data: type[_Data],
    *,
    seconds: float = TIMEOUT_SECONDS,
) -> _Data:
    """Return `data` of the answer at `/api/v1/<path>`, as the type that is asked for.

    User, password and query of the address are sent along. Raises SourceError, without them, which
    says where the answer is not of that type; AnswerTooLarge for one beyond the limit.
    """
    text = urlencode(parameters)
    # Queries can be longer than what proxies take in a URL.
    posted = path == "query_range"
    answer = send(
        address_of(address),
        f"/api/v1/{path}",
        query="" if posted else text,
        form=text.encode() if posted else None,
        seconds=seconds,
        proxies=True,
    )
    if answer.too_large:
        raise AnswerTooLarge(answer.problem)
    if not answer.ok:
        raise SourceError(_problem(answer))
    try:
        envelope = msgspec.json.decode(answer.body, type=_Envelope)
        if envelope.status != "success":
            raise SourceError(f"the answer is {envelope.status!r}: {envelope.error}")
        return msgspec.json.decode(envelope.data, type=data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        begins = answer.body[:_EXCERPT_CHARACTERS].decode("utf-8", "replace")
        raise SourceError(f"the answer is not Prometheus': {error}; it begins {begins!r}") from None


def _problem(answer: Answer) -> str:
    if not answer.status:
        return f"cannot be asked: {answer.problem}"
    if not answer.body:
        return answer.problem
    try:
        return f"{answer.problem}: {msgspec.json.decode(answer.body, type=_Envelope).error}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return answer.problem
