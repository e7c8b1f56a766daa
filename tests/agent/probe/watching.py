"""A probe on one of several ranks, with its ring."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mp_agent.probe.probe import Probe
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import make_identity


@contextmanager
def watched(
    directory: Path,
    rank: int,
    world_size: int,
    *,
    name: str = "rank",
    layer_capacity: int = 4,
    **settings: Any,
) -> Iterator[Probe]:
    """Watch this rank; by default, look at layers on every second step."""
    path = directory / f"{name}{rank}.ring"
    writer = RingWriter.create(path, make_identity(rank, world_size), layer_capacity=layer_capacity)
    probe = Probe(lambda: writer, Settings(**{"layer_interval": 2, **settings}))
    probe.attach()
    try:
        yield probe
    finally:
        probe.flush()
        probe.detach()
        writer.close()
