"""What is left of the last steps on a simulated device when the process dies."""

import os
import signal
from collections.abc import Callable
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mp_agent.node.collect.rank_source import RankSource
from mp_agent.probe.probe import Probe
from mp_agent.records.columns import GRADIENT_POSITIONS
from mp_agent.records.steps import LayerTable, StepRecord
from mp_agent.ring import writer as writer_module
from mp_agent.ring.reader import RingReader
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from tests.agent.gradient_reference import reference_row
from tests.agent.probe.ranks import exit_code_of_process
from tests.agent.probe.rings import make_identity
from tests.agent.probe.simulated_device import SimulatedDevice, install
from tests.agent.probe.small_model import make_loss, make_model

STEPS = 12
NONFINITE = [GRADIENT_POSITIONS[name] for name in ("nan_elements", "inf_elements")]


class Left:
    """What a node agent finds in the ring of a dead rank."""

    def __init__(self, path: Path) -> None:
        source = RankSource(path, RingReader.open(path))
        batches = source.poll()
        source.close()
        self.steps: list[StepRecord] = [step for batch in batches for step in batch.steps]
        self.tables: dict[int, LayerTable] = {
            table.sequence: table for batch in batches for table in batch.tables
        }
        self.dropped = source.state.records_dropped + sum(batch.dropped for batch in batches)

    @property
    def sequences(self) -> list[int]:
        return [step.sequence for step in self.steps]


def train(
    path: Path,
    end: Callable[[SimulatedDevice], None],
    at_step_end: Callable[[SimulatedDevice], None] | None = None,
    *,
    layer_interval: int = 1000,
    registers: bool = True,
    last_factor: float = 1.0,
    publishes: bool = False,
) -> None:
    """Train with a simulated device, which has run the copies of no step unless asked to.

    last_factor: of the last loss. publishes: has what has arrived published before the end.
    """
    with pytest.MonkeyPatch.context() as patched:
        device = install(patched)
        device.refuses = not registers
        writer = RingWriter.create(path, make_identity())
        probe = Probe(lambda: writer, Settings(layer_interval=layer_interval))
        probe.attach()
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for number in range(STEPS):
            factor = last_factor if number == STEPS - 1 else 1.0
            (make_loss(model, number) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            if at_step_end is not None:
                at_step_end(device)
        if publishes:
            probe.observe()
        end(device)


def die(device: SimulatedDevice) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_all(device: SimulatedDevice) -> None:
    device.run()


def die_after_all(device: SimulatedDevice) -> None:
    device.run()
    die(device)


def die_before_the_last_two_steps(device: SimulatedDevice) -> None:
    device.run(device.queued - 4)  # two steps, each with its layers
    die(device)


def die_within_the_last_copy(device: SimulatedDevice) -> None:
    device.run(device.queued - 1)
    device.torn = True
    device.run()
    die(device)


def abort_after_an_error(device: SimulatedDevice) -> None:
    device.run(device.queued - 2)
    device.fail()
    os.abort()  # as the watchdog of NCCL does


@pytest.fixture
def killed(tmp_path: Path) -> Callable[..., Left]:
    """Train in a separate process, which `end` kills after the last step."""

    def left_by(end: Callable[[SimulatedDevice], None], *arguments: Any, **options: Any) -> Left:
        path = tmp_path / "rank0.ring"
        job = partial(train, **options)
        assert exit_code_of_process(job, path, end, *arguments) == -signal.SIGKILL
        return Left(path)

    return left_by


def expected_rows(number: int) -> np.ndarray:
    """The rows of the layers at one step: weights do not change, for the rate is 0."""
    model = make_model()
    make_loss(model, number).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return np.array([reference_row(g.double().numpy().ravel()) for g in gradients if g is not None])


def test_all_that_the_device_has_brought_survives_sigkill(killed):
    left = killed(die_after_all)
    assert left.sequences == list(range(1, STEPS + 1))
    assert left.dropped == 0
    for number, step in enumerate(left.steps):
        rows_LC = expected_rows(number)
        assert step.gradients[0, 0] == pytest.approx(rows_LC[:, 0].sum(), rel=1e-6)
        assert step.values[0] == pytest.approx(make_loss(make_model(), number).item())


def test_so_do_the_layers_of_the_last_steps(killed):
    left = killed(die_after_all)
    assert set(left.tables) == set(range(STEPS - 7, STEPS + 1))
    for sequence, table in left.tables.items():
        np.testing.assert_allclose(table.gradients, expected_rows(sequence - 1), rtol=1e-6)


def test_so_do_those_of_a_step_that_was_published_with_trouble(killed):
    """Its layers need not be asked for: they are there when the step is."""
    left = killed(die, run_all, last_factor=nan, publishes=True)
    assert left.sequences == list(range(1, STEPS + 1))
    assert STEPS in left.tables
    counts_LN = left.tables[STEPS].gradients[:, NONFINITE]
    assert counts_LN.sum(axis=1).tolist() == [32.0, 8.0, 16.0, 2.0]


def test_what_the_device_has_not_brought_is_not_made_up(killed):
    assert killed(die_before_the_last_two_steps).sequences == list(range(1, STEPS - 1))


def test_a_step_that_has_come_in_part_is_not_taken_for_whole(killed):
    assert killed(die_within_the_last_copy).sequences == list(range(1, STEPS))


def test_where_the_ring_cannot_be_registered_nothing_is_read_that_is_not_there(killed):
    left = killed(die_after_all, registers=False)
    assert left.sequences == []
    assert left.dropped == 0


def test_a_device_error_leaves_what_came_before_it(tmp_path):
    path = tmp_path / "rank0.ring"
    assert exit_code_of_process(train, path, abort_after_an_error) == -signal.SIGABRT
    assert Left(path).sequences == list(range(1, STEPS))


def test_steps_that_were_published_are_not_found_twice(killed):
    left = killed(die, run_all, layer_interval=100)
    assert left.sequences == list(range(1, STEPS + 1))


def test_a_closed_ring_stays_mapped_while_a_device_may_write_to_it(watch, device):
    watched = watch()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    make_loss(model).backward()
    optimizer.step()
    before = len(writer_module._MAPPED_UNTIL_EXIT)
    watched.close()
    device.run()  # would end the process, were the memory gone
    assert len(writer_module._MAPPED_UNTIL_EXIT) == before + 1


@pytest.mark.slow
def test_memory_that_a_device_may_still_write_to_is_not_used_again(watch, device, monkeypatch):
    monkeypatch.setattr("mp_agent.ring.writer.BYTES_KEPT", 0)
    watched = watch()
    offsets = []
    for width in range(2, 12):
        model = torch.nn.Linear(width, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(20):
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            device.run()
        offsets.append(watched.writer.region.offset)
        del model, optimizer
    assert len(set(offsets)) < len(offsets), "it is used again once everything has arrived"
    held = [region for region in watched.writer._regions.all if region.held]
    assert held == [watched.writer.region]
