"""Writes a rank's records into its ring, and finds room for them in its file.

Where in a ring's file its bodies lie: new ones at its end, until it is large enough.
A file in shared memory that grew with every new schema would, in a sweep of many small trainings,
take the memory that data loaders need. So old bodies make room for new ones.
"""

import errno
import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mp_agent.errors import RingError
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import EndReason, LayerTable, Phase, StepRecord
from mp_agent.ring.files import (
    SHORTAGES,
    appearing,
    beyond_standard_streams,
    is_still,
    lock_for_life,
    no_room,
)
from mp_agent.ring.format.device_part import DevicePart
from mp_agent.ring.format.layout import (
    EXIT_OFFSET,
    EXIT_STATUS,
    HEAD_BYTES,
    STATE_SLOTS,
    UNSUPPORTED_SLOTS,
    BodyLayout,
    align,
)
from mp_agent.ring.format.records import (
    RECORDER,
    BodyHeader,
    LiveState,
    encode_body_header,
    encode_layers,
    encode_name,
    encode_step,
    layout_for,
)
from mp_agent.ring.format.schema import Head, encode_head, encode_schema
from mp_agent.ring.format.slots import SlotWriter
from mp_agent.ring.interruptions import pass_on

BYTES_KEPT = 14 << 20
"""Bodies may take so much in all before the oldest ones are used again; the newest two always."""


@dataclass(slots=True)
class Region:
    """A part of the file, with its mapping; `used` counts up with each use of any region.

    held: not to be used again yet. kept: to be mapped until the process ends. registered: known to
    the runtime of a device as memory that it may write to.
    """

    offset: int
    memory: memoryview
    used: int = 0
    held: bool = False
    kept: bool = False
    registered: bool = False


class Regions:
    """The regions of one file, which are mapped for good: a mapping holds a descriptor of it."""

    def __init__(self, fd: int, map_file: Callable[[int, int], memoryview]) -> None:
        self._fd = fd
        self._file = os.fstat(fd)
        self._map = map_file
        self._regions: list[Region] = []
        self._uses = 0

    @property
    def all(self) -> Sequence[Region]:
        """All regions."""
        return self._regions

    def allocate(self, size_bytes: int) -> Region:
        """Return a region of at least `size_bytes`, all zero, that is not the one allocated last.

        Raises OSError when memory cannot be reserved; everything is then as it was.
        """
        held = sum(len(region.memory) for region in self._regions)
        region = None
        if held + size_bytes > BYTES_KEPT:
            region = self._oldest(size_bytes)
        if region is None:
            region = self._append(size_bytes)
        else:
            np.frombuffer(region.memory, dtype=np.uint8).fill(0)
        self._uses += 1
        region.used = self._uses
        return region

    def _oldest(self, size_bytes: int) -> Region | None:
        """Return the region that was allocated longest ago and is large enough."""
        fitting = [
            region
            for region in self._regions
            if len(region.memory) >= size_bytes and region.used < self._uses and not region.held
        ]
        return min(fitting, key=lambda region: region.used, default=None)

    def _append(self, size_bytes: int) -> Region:
        """Return a new region at the end of the file.

        Beyond what is kept anyway its size is a power of two, such that others fit into it later.
        """
        length = size_bytes
        if sum(len(region.memory) for region in self._regions) > BYTES_KEPT // 2:
            length = 1 << (length - 1).bit_length()
        if not is_still(self._fd, self._file):
            raise OSError(errno.EBADF, "the program has closed the descriptor of the ring")
        offset = align(os.fstat(self._fd).st_size, mmap.ALLOCATIONGRANULARITY)
        os.posix_fallocate(self._fd, offset, length)
        region = Region(offset, self._map(offset, length))
        self._regions.append(region)
        return region


_FEATURE_CHARACTERS_MAX = 120

_MAPPED_UNTIL_EXIT: list[tuple[mmap.mmap, memoryview]] = []
"""Memory of closed rings that a device may still write to."""


class RingWriter:
    """The ring of this process.

    In a forked child, after `close()`, and once it is truncated, every method does nothing.

    The process must not open the file a second time: closing that fd would drop the lock by which
    others see that it lives.
    """

    def __init__(self, path: Path, fd: int, head: Head) -> None:
        self.path = path
        self._fd = fd
        self._file = os.fstat(fd)
        self._head = head
        self._owner_pid = os.getpid()
        """0 once the ring is closed; a forked child has another one."""
        self._maps: list[tuple[mmap.mmap, memoryview]] = []
        self._size_bytes = 0
        self.is_truncated = False
        """Whether another process has truncated the file; nothing is written to it then."""
        memory = self._map(0, HEAD_BYTES)
        self._state = LiveState()
        self._states = SlotWriter(memory, STATE_SLOTS)
        self._states_written = 0
        self._unsupported: list[str] = []
        self._unsupported_slots = SlotWriter(memory, UNSUPPORTED_SLOTS)
        self._body: _BodyWriter | None = None
        self._regions = Regions(fd, self._map)
        self.on_complete: Callable[[StepRecord, Schema], None] | None = None
        """Called with each complete record before it is written."""
        self._newest_sequence = 0
        """Newest sequence number of the steps that were written or dropped."""

    @classmethod
    def create(
        cls,
        path: Path,
        identity: RankIdentity,
        *,
        step_capacity: int = 1024,
        layer_capacity: int = 4,
    ) -> "RingWriter":
        """Make the ring, and its directories, and hold its lock.

        Raises OSError when the file cannot be made or its memory reserved, FileExistsError when
        there is one already, RingError when the directories are foreign.
        """
        head = Head(step_capacity, layer_capacity, identity)
        encoded = encode_head(head)
        with appearing(path) as fd:
            os.posix_fallocate(fd, 0, HEAD_BYTES)
            os.pwrite(fd, encoded, 0)
            lock_for_life(fd)
            writer = cls(path, fd, head)
            writer.stamp(Phase.STARTING)
        return writer

    @property
    def has_descriptor(self) -> bool:
        """Whether the program has left the ring's descriptor open, and with it the lock."""
        return is_still(self._fd, self._file)

    @property
    def identity(self) -> RankIdentity:
        """Identity of the rank that writes it."""
        return self._head.identity

    def write_schema(self, schema: Schema, *, device_slots: tuple[int, int] = (0, 0)) -> None:
        """Begin a body for records of `schema`; later records must have its shape.

        device_slots: of steps and of layers that a device itself is to write into the body.

        It replaces the oldest one when the ring has grown large enough: what has not been
        read of that is lost, and readers count it.

        Raises OSError when memory cannot be reserved, which says what size would do where a file
        system is full; the ring then goes on as it was.
        """
        if not self._may_write():
            return
        encoded = encode_schema(schema)
        layout = layout_for(schema, len(encoded), self._head, device_slots)
        header = BodyHeader(
            size_bytes=layout.size_bytes,
            generation=self._state.generation + 1,
            previous_offset=self._state.body_offset,
            first_step=self._state.steps_written,
            first_layer=self._state.layers_written,
            schema=schema,
            layout=layout,
        )
        try:
            region = self._regions.allocate(header.size_bytes)
        except OSError as error:
            if error.errno in SHORTAGES:
                error.strerror = no_room(self.path, header.size_bytes, error.errno)
            raise
        start = encode_body_header(header, encoded)
        region.memory[: len(start)] = start
        self._body = _BodyWriter(region, layout, schema)
        self._state.body_offset = region.offset
        self._state.generation = header.generation
        self._publish()

    def write_step(self, record: StepRecord, *, complete: bool = True) -> None:
        """Write the record of a step, whole, or open while the step is under way.

        An open record is read only if the rank dies before the record is written complete. Raises
        ValueError when its arrays do not fit the schema, RingError before `write_schema`.
        """
        if not self._may_write():
            return
        body, state = self._body, self._state
        if body is None:
            raise self._no_schema()
        payload = encode_step(record, body.schema)
        state.started_sequence = max(state.started_sequence, record.sequence)
        if complete and self.on_complete is not None:
            self.on_complete(record, body.schema)
        if not complete:
            number = body.open_written = body.open_written + 1
            body.open_steps.write(number, payload)
            return
        if 0 < self._newest_sequence < record.sequence:
            state.records_dropped += record.sequence - self._newest_sequence - 1
        self._newest_sequence = max(self._newest_sequence, record.sequence)
        number = state.steps_written = state.steps_written + 1
        body.steps.write(number, payload)
        state.committed_sequence = max(state.committed_sequence, record.sequence)
        self._publish()

    @property
    def device_part(self) -> DevicePart | None:
        """The part of the newest body that a device writes to; None where there is none."""
        return None if self._body is None else self._body.device

    @property
    def region(self) -> Region | None:
        """Where the newest body lies; None before there is one."""
        return None if self._body is None else self._body.region

    def hold_region(self) -> Region | None:
        """Keep the newest body from being overwritten by later ones until it is released.

        Its memory stays mapped until the process ends: a device may write to it at any time.
        """
        if os.getpid() != self._owner_pid or self._body is None:
            return None
        region = self._body.region
        region.held = region.kept = True
        return region

    def drop_step(self, sequence: int) -> None:
        """Count a step that will not be written. Skipped sequence numbers are counted too."""
        self._newest_sequence = max(self._newest_sequence, sequence)
        self.count(records_dropped=1)

    def write_layers(self, table: LayerTable) -> None:
        """Write the layers of a step. Raises like `write_step`."""
        if not self._may_write():
            return
        body, state = self._body, self._state
        if body is None:
            raise self._no_schema()
        payload = encode_layers(table, body.schema)
        number = state.layers_written = state.layers_written + 1
        body.layers.write(number, payload)
        self._publish()

    def stamp(self, phase: Phase, *, name: str = "", sequence: int | None = None) -> None:
        """Set the rank's phase, the phase's own name, and the step that it works on."""
        if not self._may_write():
            return
        state = self._state
        state.phase = phase
        state.phase_name = encode_name(name) if name else b""
        state.phase_unix_ns = time.time_ns()
        if sequence is not None:
            state.started_sequence = sequence
        self._publish()

    def end(self, reason: EndReason) -> None:
        """Record that the rank ended, and how. It may still wait for its last state's export."""
        self._state.end_reason = reason
        self.stamp(Phase.ENDED)

    def record_exit_status(self, record: bool = True) -> None:
        """Have the exit status of this process written into the ring; False: not any more.

        Raises OSError or AttributeError where the C library cannot do it.
        """
        if not self._may_write():
            return
        if record:
            RECORDER.arm(self._fd)
        else:
            end = EXIT_OFFSET + EXIT_STATUS.size
            self._maps[0][1][EXIT_OFFSET:end] = bytes(EXIT_STATUS.size)

    def wait_for_export(self, waiting: bool) -> None:
        """Record whether the rank stays only until its last state has been exported."""
        if not self._may_write():
            return
        self._state.scrape_wait = waiting
        self._publish()

    def count(
        self,
        *,
        probe_errors: int = 0,
        setting_errors: int = 0,
        records_dropped: int = 0,
        probe_seconds: float = 0.0,
    ) -> None:
        """Add to the counters of the rank's state."""
        if not self._may_write():
            return
        self._state.probe_errors += probe_errors
        self._state.setting_errors += setting_errors
        self._state.records_dropped += records_dropped
        self._state.probe_seconds += probe_seconds
        self._publish()

    def spend(self, probe_seconds: float) -> None:
        """Add to the time of the probe, which is published with what is written next."""
        if os.getpid() == self._owner_pid:
            self._state.probe_seconds += probe_seconds

    def note_unsupported(self, feature: str) -> None:
        """List a feature that cannot be measured, once; those that no longer fit are left out."""
        feature = feature[:_FEATURE_CHARACTERS_MAX]
        if not self._may_write() or feature in self._unsupported:
            return
        listed = [*self._unsupported, feature]
        encoded = json.dumps(listed).encode()
        if len(encoded) <= UNSUPPORTED_SLOTS.payload_bytes:
            self._unsupported = listed
            payload = encoded.ljust(UNSUPPORTED_SLOTS.payload_bytes, b"\0")
            self._unsupported_slots.write(len(listed), payload)

    def close(self) -> None:
        """Release the lock: to other processes, the rank is dead now. The file stays."""
        if os.getpid() != self._owner_pid:
            return
        self._owner_pid = 0
        # Closing a mapping closes its descriptor, which may be the program's own by now.
        lost = not self.has_descriptor
        kept = {id(region.memory) for region in self._regions.all if region.kept}
        for mapping, memory in self._maps:
            if lost or id(memory) in kept:
                _MAPPED_UNTIL_EXIT.append((mapping, memory))
            else:
                memory.release()
                mapping.close()
        if not lost:
            os.close(self._fd)

    def _may_write(self) -> bool:
        """Return whether this process owns the ring, and all of it is there.

        To write to what a mapping has of a truncated file would end the process by SIGBUS.
        """
        if os.getpid() != self._owner_pid or self.is_truncated:
            return False
        try:
            status = os.fstat(self._fd)
        except OSError as error:
            pass_on(error)
            return True  # the program has closed the descriptor, and the mapping is there
        if status.st_size < self._size_bytes and os.path.samestat(status, self._file):
            self.is_truncated = True
            RECORDER.disarm()
        return not self.is_truncated

    def _publish(self) -> None:
        # The number is taken before anything is written: a signal handler that interrupts the
        # write and publishes too gets the next slot.
        number = self._states_written = self._states_written + 1
        self._states.write(number, self._state.pack())

    def _no_schema(self) -> RingError:
        return RingError(f"{self.path}: records can only be written after write_schema()")

    def _map(self, offset: int, length: int) -> memoryview:
        # Every mapping holds an fd of the file, and closing any fd would drop the lock: they are
        # all kept until close().
        with beyond_standard_streams():
            mapping = mmap.mmap(self._fd, length, offset=offset)
        self._size_bytes = max(self._size_bytes, offset + length)
        self._maps.append((mapping, memoryview(mapping)))
        return self._maps[-1][1]


class _BodyWriter:
    """The body that records are written to."""

    def __init__(self, region: Region, layout: BodyLayout, schema: Schema) -> None:
        memory = region.memory
        self.region = region
        self.schema = schema
        self.steps = SlotWriter(memory, layout.steps)
        self.open_steps = SlotWriter(memory, layout.open_steps)
        self.open_written = 0
        self.layers = SlotWriter(memory, layout.layers)
        self.device = None if layout.device is None else DevicePart(memory, layout, schema)
        if self.device is not None:
            region.kept = True
