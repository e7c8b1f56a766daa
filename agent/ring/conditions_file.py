"""The file in a run's directory through which conditions reach the ranks.

The root agent numbers the events; the agents of other nodes write what it sends them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from mp_agent.errors import ReportError
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.ring.files import read_private, replace_atomically

FORMAT = 1
EVENTS_KEPT = 32
BYTES_MAX = 1 << 15
"""Of the file, and of what travels to other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedEvent:
    """An event, and its number among all of its epoch, from 1 on."""

    number: int
    event: StoredConditionEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionNews:
    """The last events of a run, oldest first."""

    epoch: str
    """Identifies the process that numbers the events; another one starts again from 1."""
    events: tuple[NumberedEvent, ...] = ()
    format: int = FORMAT

    @property
    def last_number(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self.events[-1].number if self.events else 0

    def after(self, number: int) -> tuple[StoredConditionEvent, ...]:
        """Return the events that came after the one so numbered."""
        return tuple(item.event for item in self.events if item.number > number)

    def with_event(self, event: StoredConditionEvent) -> "ConditionNews":
        """Return the news with one more event; the oldest one goes when there are too many."""
        item = NumberedEvent(number=self.last_number + 1, event=event)
        return replace(self, events=(*self.events, item)[-EVENTS_KEPT:])


_DECODER = msgspec.json.Decoder(ConditionNews)
_ENCODER = msgspec.json.Encoder()


def conditions_path(run_dir: Path) -> Path:
    """Return the path of a run's conditions file."""
    return run_dir / "conditions.json"


def encode_news(news: ConditionNews) -> bytes:
    """Return the news in at most `BYTES_MAX` bytes; the oldest events go where they are more."""
    content = _ENCODER.encode(news)
    while len(content) > BYTES_MAX and news.events:
        news = replace(news, events=news.events[1:])
        content = _ENCODER.encode(news)
    return content


def decode_news(content: bytes) -> ConditionNews:
    """Return the news that `content` holds. Raises ReportError, which says what is wrong."""
    if len(content) > BYTES_MAX:
        raise ReportError(f"conditions of {len(content)} bytes; at most {BYTES_MAX} are read")
    try:
        news: ConditionNews = _DECODER.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ReportError(f"not conditions: {error}") from error
    if news.format != FORMAT:
        raise ReportError(f"conditions of format {news.format}; format {FORMAT} is read")
    numbers = [item.number for item in news.events]
    if len(numbers) > EVENTS_KEPT or numbers != sorted(set(numbers)) or min(numbers, default=1) < 1:
        raise ReportError("the numbers of the conditions' events do not ascend")
    return news


def write_conditions(run_dir: Path, news: ConditionNews) -> None:
    """Replace the file as a whole. Raises OSError when it cannot be written."""
    replace_atomically(conditions_path(run_dir), encode_news(news))


def read_conditions(run_dir: Path) -> ConditionNews | None:
    """Return the news, or None when nothing valid is there."""
    content = read_private(conditions_path(run_dir), BYTES_MAX + 1)
    try:
        return None if content is None else decode_news(content)
    except ReportError:
        return None
