"""Threads of one process that train at the same time, a model each."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mp_agent.records.columns import GRADIENT_POSITIONS, WEIGHTS
from mp_agent.ring import locations
from tests.agent.probe.rings import read_ring
from tests.agent.probe.small_model import make_loss, make_model, sum_squares

_STEPS = 150
_TRAINING_BEGUN_BY_THREADS = """
import sys, threading, torch, mp_agent
from mp_agent.probe import api

sys.setswitchinterval(1e-6)
together = threading.Barrier(8)

def begin():
    together.wait()
    mp_agent.init(run="together")

threads = [threading.Thread(target=begin) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


class Training(threading.Thread):
    """Trains a model, and notes what its gradients were before they were clipped.

    after: a thread that it lets end, halfway through its own steps.
    """

    def __init__(
        self, seed: int, together: threading.Barrier, after: threading.Thread | None = None
    ) -> None:
        super().__init__()
        self.squares: list[float] = []
        self.losses: list[float] = []
        self._model = make_model(seed)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._together = together
        self._after = after

    def run(self) -> None:
        self._train()
        # Once a thread has ended, the run goes on with the training that is left.
        self._together.wait()

    def _train(self) -> None:
        self._together.wait()
        for seed in range(_STEPS):
            if self._after is not None and seed == _STEPS // 2:
                self._after.join()
            self._optimizer.zero_grad()
            loss = make_loss(self._model, seed)
            loss.backward()
            self.losses.append(loss.item())
            self.squares.append(sum_squares(self._model))
            clip_grad_norm_(self._model.parameters(), 1e-3)
            self._optimizer.step()


class EndingTraining(Training):
    """Ends at once after its last step, and its optimizer with it."""

    def run(self) -> None:
        self._train()
        del self._optimizer


@pytest.mark.slow
def test_the_first_ones_steps_are_all_counted_with_their_own_loss_and_norm(watch):
    watched, together = watch(), threading.Barrier(2)
    threads = [Training(seed, together) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watched.probe.flush()
    contents = read_ring(watched.writer.path, one_schema=False)
    assert watched.steps_reported == len(contents.records) == _STEPS
    assert contents.state.probe_errors == 0
    seen = [record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records]
    first = min(threads, key=lambda thread: abs(thread.squares[1] - seen[1]))
    assert seen == pytest.approx(first.squares, rel=1e-6)
    assert contents.column("loss")[1:] == pytest.approx(first.losses[1:])


@pytest.mark.slow
def test_a_training_that_outlives_the_first_goes_on_with_norms_of_before_clipping(watch):
    watched, together = watch(), threading.Barrier(2)
    first = EndingTraining(0, together)
    second = EndingTraining(1, together, after=first)
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join()
    watched.probe.flush()
    contents = read_ring(watched.writer.path, one_schema=False)
    seen = [record.gradients[0, GRADIENT_POSITIONS["sum_squares"]] for record in contents.records]
    if len(seen) == _STEPS:  # the run was that of the second from the start
        assert seen == pytest.approx(second.squares, rel=1e-6)
    else:
        rest = second.squares[_STEPS // 2 :]
        assert seen == pytest.approx([*first.squares, *rest], rel=1e-6)


def test_another_threads_first_backward_leaves_what_was_measured_before_clipping(watch):
    watched, model = watch(), make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    make_loss(model, 0).backward()
    before = sum_squares(model)
    clip_grad_norm_(model.parameters(), 1e-3)
    other = threading.Thread(target=lambda: make_loss(make_model(1), 1).backward())
    other.start()
    other.join()
    optimizer.step()
    assert watched.read().gradients(0)["sum_squares"] == pytest.approx(before, rel=1e-6)


_GRADIENT: Any = torch.Tensor.grad


class _OwnedParameter(nn.Parameter):
    """Notes in which threads its gradient is read."""

    @property
    def grad(self) -> torch.Tensor | None:
        _readers.setdefault(id(self), set()).add(threading.get_ident())
        gradient: torch.Tensor | None = _GRADIENT.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRADIENT.__set__(self, value)


_readers: dict[int, set[int]] = {}


def test_no_thread_reads_gradients_that_another_one_makes(watch):
    """Nor weights: to do so while that one writes them ends the process, or gives torn numbers."""
    watched, models = watch(layer_interval=1), [make_model(seed) for seed in range(2)]
    watched.probe._registry.ranks_in_run = lambda: 2  # else there is nothing to compare
    _readers.clear()
    for model in models:
        for module in model:
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, _OwnedParameter(parameter.detach().clone()))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def take_turn(own: int, do: Callable[[], object]) -> None:
        turns[own].acquire()
        do()
        turns[1 - own].release()

    def train(own: int) -> None:
        for seed in range(3):
            take_turn(own, make_loss(models[own], seed).backward)
            take_turn(own, optimizers[own].step)
            optimizers[own].zero_grad()

    threads = [threading.Thread(target=train, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watched.probe.flush()
    assert [_readers[id(each)] for model in models for each in model.parameters()] == [
        {thread.ident} for thread in threads for _ in range(4)
    ]
    contents = read_ring(watched.writer.path, one_schema=False)
    assert len(contents.records) == 3
    assert WEIGHTS.name in contents.records[0].families
    assert WEIGHTS.name not in contents.records[1].families


@pytest.mark.slow
def test_several_threads_that_call_init_together_count_each_step_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_TRAINING_BEGUN_BY_THREADS)
    environment = {**os.environ, "MP_AGENT_DIR": str(tmp_path), "MP_AGENT_NODE_AGENT": "none"}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=120)
    rings = [ring for run in locations.find_runs(tmp_path) for ring in locations.find_rings(run)]
    assert [len(read_ring(ring).records) for ring in rings] == [3]
