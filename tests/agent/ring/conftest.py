"""A ring made for each test, and everything closed afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mp_agent.records.schema import Schema
from mp_agent.ring.writer import RingWriter
from tests.agent.ring.samples import identity
from tests.agent.ring.samples import schema as sample_schema


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "launch-0" / "rank0.ring"


@pytest.fixture
def schema() -> Schema:
    return sample_schema()


@pytest.fixture
def writer(path: Path, schema: Schema) -> Iterator[RingWriter]:
    """A writer with 8 step slots, whose schema is written."""
    ring = RingWriter.create(path, identity(), step_capacity=8)
    ring.write_schema(schema)
    yield ring
    ring.close()
