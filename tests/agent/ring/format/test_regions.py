"""A ring stays small however often its schema changes, and what it writes over is counted."""

from pathlib import Path

import pytest

from mp_agent.node.collect.rank_source import RankSource
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import BYTES_KEPT, RingWriter
from tests.agent.ring import samples


def schemas(count: int, *, layers: int):
    """Schemas of different models, one after the other."""
    return [samples.schema(shares=1 + index % 3, layers=layers + index) for index in range(count)]


def write_steps(writer: RingWriter, schema, first: int, count: int) -> None:
    writer.write_schema(schema)
    for sequence in range(first, first + count):
        writer.write_step(samples.step_record(schema, sequence))


def test_a_ring_of_500_schemas_is_bounded_and_what_was_not_read_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "rings" / "rank0.ring"
    writer = RingWriter.create(path, samples.identity())
    source = RankSource(path, RingReader.open(path))
    for number, schema in enumerate(schemas(500, layers=40)):
        write_steps(writer, schema, 3 * number + 1, 3)
    held = path.stat().st_size
    writer.count()
    seen = lost = 0
    for _ in range(60):
        for delivery in source.poll():
            assert delivery.schema is not None
            assert all(
                samples.same_step(record, samples.step_record(delivery.schema, record.sequence))
                for record in delivery.steps
            )
            seen += len(delivery.steps)
            lost += delivery.dropped
    source.close()
    writer.close()
    assert held < BYTES_KEPT + (1 << 20)
    assert seen + lost == 1500
    assert 0 < seen < 1500


def test_17_schemas_between_two_looks_lose_nothing_also_of_a_rank_that_is_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rings" / "rank0.ring"
    writer = RingWriter.create(path, samples.identity(), step_capacity=16)
    source = RankSource(path, RingReader.open(path))
    for number, schema in enumerate(schemas(17, layers=2)):
        write_steps(writer, schema, 10 * number + 1, 10)
    writer.close()
    deliveries = [*source.poll(), *source.poll(), *source.poll()]
    assert sum(len(delivery.steps) for delivery in deliveries) == 170
    assert source.gone
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize("looks", [1, 3, 7])
def test_a_reader_that_looks_now_and_then_counts_all_that_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    monkeypatch.setattr(RingReader, "writer_alive", lambda _: True)
    path = tmp_path / "rings" / "rank0.ring"
    writer = RingWriter.create(path, samples.identity(), step_capacity=700)
    source = RankSource(path, RingReader.open(path))
    seen = lost = 0
    for number, schema in enumerate(schemas(210, layers=300)):
        write_steps(writer, schema, 2 * number + 1, 2)
        if number % (30 * looks) == 0 or number == 209:
            for _ in range(20):
                for delivery in source.poll():
                    seen += len(delivery.steps)
                    lost += delivery.dropped
                writer.count()
    source.close()
    writer.close()
    assert seen + lost == 420
