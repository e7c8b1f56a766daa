"""Threads of one process that train at the same time, a model each."""

import threading

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.agent.probe.rings import read_ring
from tests.agent.probe.small_model import make_loss, make_model, sum_squares

_STEPS = 150


class Training(threading.Thread):
    """Trains a model, and notes what its gradients were before they were clipped."""

    def __init__(self, seed: int, together: threading.Barrier) -> None:
        super().__init__()
        self.squares: list[float] = []
        self.losses: list[float] = []
        self._model = make_model(seed)
        self._together = together

    def run(self) -> None:
        optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._together.wait()
        for seed in range(_STEPS):
            optimizer.zero_grad()
            loss = make_loss(self._model, seed)
            loss.backward()
            self.losses.append(loss.item())
            self.squares.append(sum_squares(self._model))
            clip_grad_norm_(self._model.parameters(), 1e-3)
            optimizer.step()


def test_the_first_ones_steps_are_all_counted_with_their_own_loss_and_norm(watch):
    watched, together = watch(), threading.Barrier(2)
    threads = [Training(seed, together) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watched.probe.flush()
    contents = read_ring(watched.writer.path, one_schema=False)
    assert watched.steps_told == len(contents.records) == _STEPS
    assert contents.state.probe_errors == 0
    seen = [record.gradients[0, 0] for record in contents.records]
    first = min(threads, key=lambda thread: abs(thread.squares[1] - seen[1]))
    assert seen == pytest.approx(first.squares, rel=1e-6)
    assert contents.column("loss")[1:] == pytest.approx(first.losses[1:])
