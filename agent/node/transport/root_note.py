"""The file with a run's root address, as this agent last read or wrote it."""

import logging

from mp_agent.node.transport.run_protocol import RunOnNode
from mp_agent.ring.root_note import RootNote, read_root_note, write_root_note

log = logging.getLogger("mp_agent.node")


class RootNoteFile:
    """Keeps the last note, which may be of an earlier attempt."""

    def __init__(self, run: RunOnNode) -> None:
        self.last: RootNote | None = None
        self._run = run

    @property
    def present(self) -> RootNote | None:
        """The note, if it is of the current attempt."""
        note = self.last
        if note is None or not self._run.seen:
            return None
        return note if note.asked_by_unix_ns in self._run.created_unix_ns else None

    @property
    def attempt_unix_ns(self) -> int:
        """Identifies the current attempt, by rank 0's clock; 0 until it is known."""
        note = self.present
        return note.created_unix_ns if note else 0

    def read(self) -> RootNote | None:
        """Read the note; return the previous one if that was of an attempt that is now over."""
        note, before = read_root_note(self._run.run_dir), self.last
        if note is None or note == before:
            return None
        self.last = note
        over = before is not None and before.created_unix_ns not in (0, note.created_unix_ns)
        return before if over else None

    def write(self, note: RootNote) -> None:
        """Replace the note, also for a successor of this agent; a full directory is only logged."""
        self.last = note
        try:
            write_root_note(self._run.run_dir, note)
        except OSError as error:
            log.warning(
                "run %s: the note of the root address cannot be written: %s", self._run.name, error
            )
