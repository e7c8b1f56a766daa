"""Reads the ring of a rank from another process, without waiting for it or disturbing it."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mp_agent.errors import RingError
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import LayerTable, RankState, StepRecord
from mp_agent.ring.files import is_locked, lock_holder, open_private
from mp_agent.ring.format.device_part import DevicePartReader
from mp_agent.ring.format.layout import (
    BODY,
    EXIT_OFFSET,
    EXIT_STATUS,
    HEAD_BYTES,
    STATE_SLOTS,
    UNSUPPORTED_SLOTS,
)
from mp_agent.ring.format.records import (
    BodyHeader,
    LiveState,
    decode_body_header,
    decode_layers,
    decode_step,
    generation_of,
    schema_bytes_of,
)
from mp_agent.ring.format.records import decode as decode_exit_status
from mp_agent.ring.format.schema import Head, decode_head, decode_names
from mp_agent.ring.format.slots import SlotReader


class RingReader:
    """One ring, read by polling: `schema`, `steps_after`, `layers_after`, in this order.

    Every method raises RingError, naming the file, when the ring turns out to be damaged.
    """

    def __init__(self, path: Path, fd: int, head: Head) -> None:
        self.path = path
        self.identity: RankIdentity = head.identity
        self._fd = fd
        self._head = head
        self._states = SlotReader(self._read, STATE_SLOTS)
        self._unsupported = SlotReader(self._read, UNSUPPORTED_SLOTS)
        self._body: _BodyReader | None = None
        self._later_bodies: deque[_BodyReader] = deque()
        self._steps_read = 0
        """All records up to this number were returned, or are lost."""
        self._unreadable = 0
        """Records that could not be read since the last one that was returned."""
        self._layers_read = 0
        self._newest_layers = 0
        """Tables up to this number were read, and the greatest sequence number among them."""

    @classmethod
    def open(cls, path: Path, *, owner_uid: int | None = None) -> "RingReader":
        """Open a ring of ours, or of `owner_uid`.

        Raises RingError when it cannot be read: absent, foreign, truncated, damaged, or of
        another format version.
        """
        try:
            fd = open_private(path, owner_uid=owner_uid)
        except OSError as error:
            raise RingError(f"{path}: {error.strerror}") from error
        try:
            reader = cls(path, fd, _read_head(path, fd))
            reader._find_bodies(reader._live_state())
            _ = reader.state
        except BaseException:
            os.close(fd)
            raise
        return reader

    @property
    def schema(self) -> Schema | None:
        """How to read the records that the next calls return; None until it is known.

        When the rank has changed its schema, the new one is returned once `steps_after` has
        returned every record of the old one.
        """
        self._find_bodies(self._live_state())
        while self._later_bodies and self._steps_read >= self._later_bodies[0].first_step:
            self._body = self._later_bodies.popleft()
        if self._body is None and self._later_bodies:
            # All bodies before it have been overwritten, with records that were not read.
            self._unreadable += self._later_bodies[0].first_step - self._steps_read
            self._steps_read = self._later_bodies[0].first_step
            self._body = self._later_bodies.popleft()
        return None if self._body is None else self._body.schema

    @property
    def state(self) -> RankState:
        """The live state of the rank, as of one moment."""
        newest = self._unsupported.newest()
        with _damage_named(self.path):
            unsupported = () if newest is None else decode_names(newest[1])
            return self._live_state().rank_state(unsupported)

    @property
    def exit_status(self) -> int | None:
        """The exit code of a process that has ended by `exit()`; None for any other."""
        return decode_exit_status(self._read(EXIT_OFFSET, EXIT_STATUS.size))

    @property
    def version(self) -> int:
        """A number that rises with all that the rank writes, save an open record.

        While it does not change, there is nothing new to read.
        """
        newest = self._states.newest()
        return 0 if newest is None else newest[0]

    def steps_after(self, sequence: int) -> tuple[list[StepRecord], int]:
        """Return the complete records with a greater sequence number, and how many were lost.

        Records ascend. Lost are those that were overwritten before they were read; they are
        counted by the call that returns what follows them.
        """
        body = self._body
        if body is None:
            return [], 0
        live = self._live_state()
        self._find_bodies(live)
        end = self._later_bodies[0].first_step if self._later_bodies else live.steps_written
        begin = max(body.first_step, end - body.steps.count)
        found: dict[int, StepRecord] = {}
        unreadable = 0
        for number in range(end, begin, -1):
            payload = body.steps.payload(number)
            if payload is None:
                unreadable += 1
                continue
            record = decode_step(payload, body.schema)
            if record.sequence <= sequence:
                break
            # A signal handler that flushes may write the record that it interrupts once more.
            found.setdefault(record.sequence, record)
        else:
            unreadable += begin - max(body.first_step, min(begin, self._steps_read))
        self._steps_read = end
        records = [found[number] for number in sorted(found)]
        if not records:
            self._unreadable += unreadable
            return [], 0
        unreadable, self._unreadable = unreadable + self._unreadable, 0
        return records, min(unreadable, _absent(sequence, records))

    def layers_after(self, sequence: int) -> list[LayerTable]:
        """Return the layer tables with a greater sequence number, ascending, as far as kept."""
        body = self._body
        if body is None:
            return []
        live = self._live_state()
        self._find_bodies(live)
        end = self._later_bodies[0].first_layer if self._later_bodies else live.layers_written
        if end == self._layers_read and sequence >= self._newest_layers:
            return []
        payloads = (
            body.layers.payload(number)
            for number in range(max(body.first_layer, end - body.layers.count) + 1, end + 1)
        )
        tables = [decode_layers(payload, body.schema) for payload in payloads if payload]
        self._layers_read = end
        self._newest_layers = max((table.sequence for table in tables), default=0)
        return [table for table in tables if table.sequence > sequence]

    def recovered(self, sequence: int) -> tuple[list[StepRecord], list[LayerTable]]:
        """Return steps that a device has brought, and their layers, but the rank has not written.

        Those with a greater sequence number, ascending. Only meaningful once `writer_alive()` is
        false and `steps_after` has returned everything. A body that others follow has none: what
        was on its way when the next was begun is counted as dropped.
        """
        if self._body is None or self._later_bodies:
            return [], []
        after = max(sequence, self._live_state().committed_sequence)
        steps = self._body.device.steps_after(after)
        found = {record.sequence for record in steps}
        tables = self._body.device.layers_after(after) if found else []
        return steps, [table for table in tables if table.sequence in found]

    def open_record(self) -> StepRecord | None:
        """Return the record of the step during which the rank died, as far as it was written.

        None when that step was written complete. Only meaningful once `writer_alive()` is false
        and `steps_after` has returned everything.
        """
        newest = self._body and self._body.open_steps.newest()
        if not self._body or not newest:
            return None
        record = decode_step(newest[1], self._body.schema)
        return record if record.sequence > self._live_state().committed_sequence else None

    def writer_alive(self) -> bool:
        """Return whether the rank's process lives and has not closed its ring.

        Always false in that process itself.
        """
        return is_locked(self._fd)

    def writer_pid(self) -> int:
        """Return the living writer's process id as this process sees it; 0 if it sees none.

        The identity has the number in the writer's PID namespace, which may not be this one.
        """
        return lock_holder(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _live_state(self) -> LiveState:
        newest = self._states.newest()
        if newest is None:
            raise RingError(f"{self.path}: no state can be read")
        return LiveState.unpack(newest[1])

    def _find_bodies(self, live: LiveState) -> None:
        """Read the headers of the bodies that were appended since the last call."""
        newest = self._later_bodies[-1] if self._later_bodies else self._body
        known = 0 if newest is None else newest.generation
        offset, found = live.body_offset, deque[_BodyReader]()
        for generation in range(live.generation, known, -1):
            try:
                body, offset = self._read_body(offset, generation)
            except RingError:
                if self._live_state().generation != live.generation:
                    return  # it has been overwritten meanwhile: the next call finds newer ones
                if found and self._was_written_over(offset, generation):
                    break
                raise
            found.appendleft(body)
        self._later_bodies.extend(found)

    def _was_written_over(self, offset: int, generation: int) -> bool:
        """Return whether a newer body has taken the place of one that was there before."""
        fixed = self._read(offset, BODY.size)
        return generation_of(fixed) not in range(1, generation + 1)

    def _read_body(self, offset: int, generation: int) -> tuple["_BodyReader", int]:
        """Return the body at an offset, and the offset of the one before it."""
        fixed = self._read(offset, BODY.size)
        file_bytes = os.fstat(self._fd).st_size
        with _damage_named(self.path):
            encoded = self._read(offset + BODY.size, min(schema_bytes_of(fixed), file_bytes))
            header = decode_body_header(fixed + encoded, self._head)
            if header.generation != generation:
                raise RingError(f"generation {generation} of the schema is missing")
        if offset + header.size_bytes > file_bytes:
            raise RingError(f"{self.path}: truncated at {file_bytes} bytes")
        return _BodyReader.at(offset, header, self._read), header.previous_offset

    def _read(self, offset: int, length: int) -> bytes:
        # Not through a mapping: a file that someone truncates would end the reader with SIGBUS.
        try:
            data = os.pread(self._fd, length, offset)
        except (OSError, OverflowError) as error:
            raise RingError(f"{self.path}: {length} bytes at {offset}: {error}") from error
        if len(data) < length:
            raise RingError(f"{self.path}: truncated at {offset + len(data)} bytes")
        return data


@dataclass(frozen=True, slots=True)
class _BodyReader:
    """One body: its records' schema, and its slots."""

    generation: int
    schema: Schema
    first_step: int
    first_layer: int
    steps: SlotReader
    open_steps: SlotReader
    layers: SlotReader
    device: DevicePartReader

    @classmethod
    def at(
        cls, offset: int, header: BodyHeader, read: Callable[[int, int], bytes]
    ) -> "_BodyReader":
        layout = header.layout
        return cls(
            generation=header.generation,
            schema=header.schema,
            first_step=header.first_step,
            first_layer=header.first_layer,
            steps=SlotReader(read, layout.steps.shifted(offset)),
            open_steps=SlotReader(read, layout.open_steps.shifted(offset)),
            layers=SlotReader(read, layout.layers.shifted(offset)),
            device=DevicePartReader(read, offset, layout, header.schema),
        )


def _read_head(path: Path, fd: int) -> Head:
    data = os.pread(fd, HEAD_BYTES, 0)
    if len(data) < HEAD_BYTES:
        raise RingError(f"{path}: truncated at {len(data)} bytes")
    with _damage_named(path):
        return decode_head(data)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn what decoding raises into a RingError that names the file, once."""
    try:
        yield
    except (RingError, ValueError, TypeError, KeyError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise RingError(f"{path}: {reason}") from error


def _absent(sequence: int, records: list[StepRecord]) -> int:
    """Return how many sequence numbers after `sequence` have no record before the last one."""
    return records[-1].sequence - sequence - len(records) if records else 0
