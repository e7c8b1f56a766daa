"""What a device has written into a ring is read whole or not at all."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mp_agent.records.steps import LayerTable, StepRecord
from mp_agent.ring.format.device_part import HostPart
from mp_agent.ring.format.slots import weights
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.samples import identity, schema, step_record

SCHEMA = schema(shares=2, layers=5, columns=3)


def transfer(number: int, *values: float) -> np.ndarray:
    body = np.concatenate(([number], np.array(values, dtype=np.float64).view(np.int64)))
    return np.concatenate((body, [(body * weights(len(body))).sum()]))


class Ring:
    def __init__(self, path: Path) -> None:
        self.writer = RingWriter.create(path, identity())
        self.writer.write_schema(SCHEMA, device_slots=(4, 2))

    def step(self, number: int, sequence: int, *, brought: bool = True) -> None:
        part = self.writer.device_part
        known = HostPart(
            sequence=sequence,
            step=sequence,
            time_unix_ns=0,
            scalars={"step1": float(sequence)},
            places={"step0": 0},
            numbers=7,
            totals_place=1,
        )
        assert part is not None
        part.write(number, known)
        if brought:
            values = transfer(number, sequence + 0.5, *range(6))
            part.memory.steps_SW[number % 4, : len(values)] = values

    def layers(self, sequence: int) -> None:
        values = transfer(sequence, *np.arange(15) + sequence)
        assert self.writer.device_part is not None
        self.writer.device_part.memory.layers_SW[sequence % 2] = values

    def recovered(self, after: int = 0) -> tuple[list[StepRecord], list[LayerTable]]:
        reader = RingReader.open(self.writer.path)
        assert reader.schema is not None
        found = reader.recovered(after)
        reader.close()
        return found


@pytest.fixture
def ring(path: Path) -> Iterator[Ring]:
    made = Ring(path)
    yield made
    made.writer.close()


def sequences(steps: Sequence[StepRecord | LayerTable]) -> list[int]:
    return [step.sequence for step in steps]


def test_host_and_device_parts_make_one_record(ring):
    ring.step(1, 5)
    ((record,), _) = ring.recovered()
    assert (record.sequence, record.step) == (5, 5)
    np.testing.assert_array_equal(record.values, [5.5, 5.0, np.nan])
    np.testing.assert_array_equal(record.gradients, [[0, 1, 2], [3, 4, 5]])


def test_the_last_ones_are_kept(ring):
    for number in range(1, 11):
        ring.step(number, number)
    assert sequences(ring.recovered()[0]) == [7, 8, 9, 10]


def test_a_step_that_the_device_has_not_brought_is_left_out(ring):
    for number in (1, 2, 3):
        ring.step(number, number, brought=number != 2)
    assert sequences(ring.recovered()[0]) == [1, 3]


@pytest.mark.parametrize("word", range(9))
def test_so_is_one_of_which_a_word_is_not_there_yet(ring, word):
    ring.step(1, 1)
    words = ring.writer.device_part.memory.steps_SW[1]
    words[word] ^= 1
    assert ring.recovered() == ([], [])


def test_what_the_rank_has_written_itself_is_not_recovered(ring):
    for number in (1, 2, 3):
        ring.step(number, number)
    ring.writer.write_step(step_record(SCHEMA, 1))
    ring.writer.write_step(step_record(SCHEMA, 2))
    assert sequences(ring.recovered()[0]) == [3]
    assert sequences(ring.recovered(after=3)[0]) == []


def test_layers_come_with_their_steps(ring):
    for number in (1, 2, 3):
        ring.step(number, number, brought=number < 3)
        ring.layers(number)
    steps, tables = ring.recovered()
    assert (sequences(steps), sequences(tables)) == ([1, 2], [2])
    np.testing.assert_array_equal(tables[0].gradients.ravel(), np.arange(15) + 2)


def test_damaged_numbers_are_no_record(ring):
    """A number of float64 that no slot has room for, as a damaged file may hold."""
    part = HostPart(
        sequence=1,
        step=1,
        time_unix_ns=0,
        scalars={},
        places={},
        numbers=1 << 40,
        totals_place=None,
    )
    ring.writer.device_part.write(1, part)
    assert ring.recovered() == ([], [])


def test_a_body_that_another_one_follows_has_none(ring):
    """What was on its way when the next one was begun was counted as dropped."""
    reader = RingReader.open(ring.writer.path)
    before = reader.schema
    ring.step(1, 5)
    ring.layers(5)
    assert sequences(reader.recovered(0)[0]) == [5]
    ring.writer.write_schema(SCHEMA, device_slots=(4, 2))
    reader.steps_after(0)
    assert reader.recovered(0) == ([], [])
    assert reader.schema is not before
    ring.step(1, 6)
    assert sequences(reader.recovered(0)[0]) == [6]
    reader.close()
