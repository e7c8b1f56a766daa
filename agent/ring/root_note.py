"""The note in a run's directory that says where the root node agent is.

A rank's short-lived helper (`mp_agent.probe.processes.rendezvous`) writes it, the node agent
reads it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

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
    """Of rank 0; the launchers of other nodes may count otherwise."""
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
    """At the root: base URLs of the other node agents, by node rank."""


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
