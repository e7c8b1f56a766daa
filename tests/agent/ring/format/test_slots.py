"""A slot is accepted whole or not at all, in whatever order its bytes become visible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.ring.format.slots import SlotReader, SlotTable, SlotWriter

WORDS = 6
ONE_SLOT = SlotTable(offset=16, payload_bytes=8 * WORDS, count=1)


def image(*writes: tuple[int, bytes], table: SlotTable = ONE_SLOT) -> bytes:
    """Memory after some writes, each a number and its payload."""
    memory = bytearray(table.end)
    writer = SlotWriter(memoryview(memory), table)
    for number, payload in writes:
        writer.write(number, payload)
    return bytes(memory)


def reader_of(memory: bytes, table: SlotTable = ONE_SLOT) -> SlotReader:
    return SlotReader(lambda offset, length: memory[offset : offset + length], table)


def payload_of(seed: int, table: SlotTable = ONE_SLOT) -> bytes:
    return np.random.default_rng(seed).bytes(table.payload_bytes)


@pytest.mark.slow
@given(
    seen_new=st.lists(st.booleans(), min_size=(16 + 8 * WORDS) // 8, max_size=20),
    unit_bytes=st.sampled_from([1, 2, 4, 8, 16]),
    seed=st.integers(0, 2**32),
)
def test_any_mixture_of_an_old_and_a_new_write_is_refused(
    seen_new: list[bool], unit_bytes: int, seed: int
) -> None:
    old, new = payload_of(seed), payload_of(seed + 1)
    before, after = image((5, old)), image((6, new))
    units = range(0, len(before), unit_bytes)
    mixed = b"".join(
        (after if seen_new[index % len(seen_new)] else before)[at : at + unit_bytes]
        for index, at in enumerate(units)
    )
    newest = reader_of(mixed).newest()
    expected = {before: (5, old), after: (6, new)}.get(mixed)
    assert newest == expected


@given(at=st.integers(0, ONE_SLOT.slot_bytes - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(at: int, bit: int) -> None:
    memory = bytearray(image((7, payload_of(0))))
    memory[ONE_SLOT.offset + at] ^= 1 << bit
    reader = reader_of(bytes(memory))
    # Bytes 12 to 15 of a slot mean nothing.
    assert (reader.payload(7) is None) == (not 12 <= at < 16)


@given(count=st.integers(1, 5), writes=st.integers(0, 12))
def test_the_last_writes_are_kept_and_older_ones_are_gone(count: int, writes: int) -> None:
    table = SlotTable(offset=8, payload_bytes=16, count=count)
    payloads = {number: payload_of(number, table) for number in range(1, writes + 1)}
    reader = reader_of(image(*payloads.items(), table=table), table)
    for number, payload in payloads.items():
        expected = payload if number > writes - count else None
        assert reader.payload(number) == expected
    assert reader.newest() == ((writes, payloads[writes]) if writes else None)


def test_a_payload_written_as_another_number_is_refused() -> None:
    memory = bytearray(image((3, payload_of(0))))
    begin, end = ONE_SLOT.offset, ONE_SLOT.end
    for word in (begin, end - 8):
        memory[word : word + 8] = (4).to_bytes(8, "little")
    assert reader_of(bytes(memory)).newest() is None


def test_a_write_that_ends_while_it_is_read_is_taken_at_the_next_attempt() -> None:
    whole = image((1, payload_of(0)))
    torn = whole[:-8] + bytes(8)
    images = iter([torn, torn, whole])
    reader = SlotReader(lambda offset, length: next(images)[offset : offset + length], ONE_SLOT)
    assert reader.payload(1) == payload_of(0)


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError):
        image((1, bytes(8)))
