"""Small files in a run's directory: its root, its conditions, its restarts.

The note in a run's directory that says where the root node agent is.
A rank's short-lived helper (`mp_agent.probe.processes.rendezvous`) writes it, the node agent
reads it.

The file in a run's directory through which conditions reach the ranks.
The root agent numbers the events; the agents of other nodes write what it sends them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from mp_agent.errors import ReportError
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.ring.files import read_private, replace_atomically
from mp_agent.ring.interruptions import pass_on

_BYTES_MAX = 1 << 20
_URL_CHARACTERS_MAX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RootNote:
    """Where the root of one attempt is, according to the job's own store."""

    asked_by_unix_ns: int
    """When the ring of the local rank that asked was made: identifies the attempt."""
    attempt: int = 0
    """Attempt of rank 0; the launchers of other nodes may count otherwise."""
    created_unix_ns: int = 0
    """When rank 0's ring was made, by its clock: names the attempt; 0 while it is not known."""
    url: str = ""
    """Base URL of the root agent; assumed, from MASTER_ADDR, when there is a `problem`."""
    token: str = field(default="", repr=False)
    """Secret of the attempt; empty when the setting `token` is used."""
    address: str = ""
    """Address under which this node is reached, as far as the rank knows."""
    problem: str = ""
    """Why the store had no answer."""
    superseded: bool = False
    """Whether this root has been informed that another one continues the run."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Base URLs of the other node agents, by node rank; at the root."""


def root_note_path(run_dir: Path) -> Path:
    """Return the file of the note."""
    return run_dir / "root.json"


def read_root_note(run_dir: Path) -> RootNote | None:
    """Return the note, or None when nothing valid is there."""
    content = read_private(root_note_path(run_dir), _BYTES_MAX)
    if content is None:
        return None
    try:
        note = RootNote(**json.loads(content))
    except (ValueError, TypeError) as error:
        pass_on(error)
        return None
    return note if _makes_sense(note) else None


def write_root_note(run_dir: Path, note: RootNote) -> None:
    """Replace the note; its file is readable by its owner alone. Raises OSError."""
    replace_atomically(root_note_path(run_dir), json.dumps(asdict(note)).encode())


def _makes_sense(note: RootNote) -> bool:
    if note.url and not is_base_url(note.url):
        return False
    return isinstance(note.nodes, dict) and all(map(is_base_url, note.nodes.values()))


def is_base_url(text: object) -> bool:
    """Return whether `text` may be the URL of a node agent."""
    return (
        isinstance(text, str)
        and text.startswith(("http://", "https://"))
        and len(text) <= _URL_CHARACTERS_MAX
        and text.isprintable()
        and not set(text) & set(" @?#")
    )


FORMAT = 1
EVENTS_KEPT = 32
BYTES_MAX = 1 << 15
"""Most bytes of the file, and of what travels to other nodes."""


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


FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 30.0
"""Short against what a ring holds: 1 024 steps."""
HEALTHY_SECONDS = 20.0
"""After an agent has run for so long, deaths before it no longer count."""


@dataclass(slots=True)
class Restarts:
    """Counts consecutive deaths of one node agent; it never gives up."""

    deaths: int = 0
    """Since an agent was last healthy."""
    _next_start_seconds: float = 0.0
    _up_since_seconds: float | None = None
    _started: bool = False

    def saw_running(self, now_seconds: float) -> None:
        """Record that an agent is running at this moment."""
        if self._up_since_seconds is None:
            self._up_since_seconds = now_seconds
        self._started = True
        if now_seconds - self._up_since_seconds >= HEALTHY_SECONDS:
            self.deaths = 0

    def may_start(self, now_seconds: float, *, at_once: bool = False) -> bool:
        """Return whether to start an agent now that none runs, and count on its being started.

        at_once: there will be no later opportunity, so no pause is kept.
        """
        self._up_since_seconds = None
        if now_seconds < self._next_start_seconds and not at_once:
            return False
        self.deaths += self._started
        self._started = True
        self._next_start_seconds = now_seconds + self.pause_seconds
        return True

    @property
    def pause_seconds(self) -> float:
        """How long after a start the next one has to wait."""
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(self.deaths, 10), LONGEST_PAUSE_SECONDS)
