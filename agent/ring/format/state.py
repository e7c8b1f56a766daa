"""The live state of a rank, and the status that its process ended with.

The exit status of a rank, written into its ring by the C library as the process ends.
Python has no place for it: once `SystemExit` has left the program, no Python code sees its code.
"""

import os
from dataclasses import dataclass

from mp_agent.records.steps import EndReason, Phase, RankState
from mp_agent.ring.files import beyond_standard_streams
from mp_agent.ring.format.layout import (
    EXIT_ARMED,
    EXIT_OFFSET,
    EXIT_PENDING,
    EXIT_STATUS,
    NAME_BYTES_MAX,
    STATE,
)


@dataclass(slots=True)
class LiveState:
    """Live state, changed in place and published as a whole, so that readers see one moment."""

    phase: int = Phase.STARTING
    end_reason: int = EndReason.RUNNING
    phase_unix_ns: int = 0
    started_sequence: int = 0
    committed_sequence: int = 0
    steps_written: int = 0
    layers_written: int = 0
    body_offset: int = 0
    generation: int = 0
    probe_errors: int = 0
    setting_errors: int = 0
    records_dropped: int = 0
    probe_seconds: float = 0.0
    scrape_wait: bool = False
    phase_name: bytes = b""
    """UTF-8, cut to 64 bytes; empty when the phase's own name says it."""

    def pack(self) -> bytes:
        """Return the payload of a state slot."""
        return STATE.pack(
            self.phase,
            self.end_reason,
            self.phase_unix_ns,
            self.started_sequence,
            self.committed_sequence,
            self.steps_written,
            self.layers_written,
            self.body_offset,
            self.generation,
            self.probe_errors,
            self.setting_errors,
            self.records_dropped,
            self.probe_seconds,
            self.scrape_wait,
            len(self.phase_name),
            self.phase_name,
        )

    @classmethod
    def unpack(cls, payload: bytes) -> "LiveState":
        """Return the state that `pack` wrote."""
        *numbers, scrape_wait, name_bytes, name = STATE.unpack(payload)
        fields = (*numbers, bool(scrape_wait), name[:name_bytes])
        return cls(*fields)

    def rank_state(self, unsupported: tuple[str, ...]) -> RankState:
        """Return the part that readers use."""
        phase = Phase(self.phase)
        return RankState(
            phase=phase,
            phase_name=self.phase_name.decode(errors="ignore") or phase.name.lower(),
            phase_unix_ns=self.phase_unix_ns,
            started_sequence=self.started_sequence,
            committed_sequence=self.committed_sequence,
            end_reason=EndReason(self.end_reason),
            scrape_wait=self.scrape_wait,
            probe_errors=self.probe_errors,
            setting_errors=self.setting_errors,
            records_dropped=self.records_dropped,
            probe_seconds=self.probe_seconds,
            unsupported=unsupported,
        )


def encode_name(name: str) -> bytes:
    """Return a phase's name as the state holds it."""
    return name.encode(errors="replace")[:NAME_BYTES_MAX]


_UNBUFFERED = 2
_STATUS_OFFSET = EXIT_OFFSET + 4


class ExitStatusRecorder:
    """Has glibc's `exit()` write its status to a file, in this process alone.

    `on_exit` calls `putw(status, stream)`: no Python runs at that point. Where the C library has
    no `on_exit`, nothing is recorded.
    """

    def __init__(self) -> None:
        self._stream_fd = -1
        self._pid = 0

    def arm(self, ring_fd: int) -> None:
        """Record into this ring; one that was armed before keeps what it has."""
        if self._pid != os.getpid():
            with beyond_standard_streams():
                self._open_stream(os.dup(ring_fd))
        else:
            os.dup2(ring_fd, self._stream_fd, inheritable=False)
        os.pwrite(ring_fd, EXIT_STATUS.pack(EXIT_ARMED, EXIT_PENDING), EXIT_OFFSET)
        os.lseek(self._stream_fd, _STATUS_OFFSET, os.SEEK_SET)

    def _open_stream(self, fd: int) -> None:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(libc.fdopen(fd, b"w"))
        libc.setvbuf(stream, None, _UNBUFFERED, 0)
        if not stream or libc.on_exit(libc.putw, stream) != 0:
            raise OSError("the exit status cannot be recorded")
        self._stream_fd, self._pid = fd, os.getpid()
        os.register_at_fork(after_in_child=self._disconnect)

    def _disconnect(self) -> None:
        """Keep a forked child, which has the same exit handlers, from writing into the ring."""
        if self._stream_fd >= 0:
            null_fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null_fd, self._stream_fd, inheritable=False)
            os.close(null_fd)
            self._stream_fd = -1


RECORDER = ExitStatusRecorder()


def disarm(ring_fd: int) -> None:
    """Keep the end that the ring records, however the process exits."""
    os.pwrite(ring_fd, bytes(EXIT_STATUS.size), EXIT_OFFSET)


def decode(field: bytes) -> int | None:
    """Return the exit code that a ring holds, 0 to 255; None when there is none."""
    armed, status = EXIT_STATUS.unpack(field)
    return status & 0xFF if armed == EXIT_ARMED and status != EXIT_PENDING else None
