"""A probe on this process, with its ring."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mp_agent.probe import accelerator
from mp_agent.probe.optimizers import live_objects
from mp_agent.probe.probe import Probe
from mp_agent.records.steps import RankState
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.probe.rings import RingContents, make_identity, read_ring
from tests.agent.probe.seen_steps import SCHEMA, Clock
from tests.agent.probe.simulated_device import SimulatedDevice, install


class Watch:
    """An attached probe and what it wrote."""

    def __init__(
        self,
        path: Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        ranks_in_run: int = 1,
        **settings: Any,
    ) -> None:
        self.writer = RingWriter.create(path, make_identity())
        self.steps_reported = 0
        self.probe = Probe(
            lambda: self.writer,
            Settings(**settings),
            on_step=self._count_step,
            ranks_in_run=lambda: ranks_in_run,
        )
        self.probe.attach(optimizer=optimizer)

    def read(self, *, one_schema: bool = True) -> RingContents:
        return read_ring(self.writer.path, one_schema=one_schema)

    def state(self) -> RankState:
        """The ring's live part, which is there before any schema."""
        reader = RingReader.open(self.writer.path)
        try:
            return reader.state
        finally:
            reader.close()

    def close(self) -> None:
        self.probe.detach()
        self.writer.close()

    def _count_step(self) -> None:
        self.steps_reported += 1


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_walked() -> Iterator[None]:
    """Have probes look for models among the objects that were made since the module began.

    A test process holds a million others, and a walk over them takes longer than most tests.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_objects, "_all_objects", gc.get_objects)
        yield
    gc.unfreeze()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watch]]:
    """Attach a probe; it is detached after the test."""
    watches: list[Watch] = []

    def start(**settings: Any) -> Watch:
        watches.append(Watch(tmp_path / f"watch{len(watches)}" / "rank0.ring", **settings))
        return watches[-1]

    yield start
    for started in watches:
        started.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter]:
    """A ring for `seen_steps`."""
    ring = RingWriter.create(tmp_path / "rings" / "rank0.ring", make_identity())
    ring.write_schema(SCHEMA)
    yield ring
    ring.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """A device in the place of the processor, which executes copies on request."""
    return install(monkeypatch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(accelerator, "copy_to_host", clock.copy_to_host)
    return clock
