"""Functions that save a checkpoint, called when the guard asks for one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import mp_agent
from mp_agent.probe import api
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader

POLICY = {"request_checkpoint": {"troubles": 2, "trouble_steps": 5, "window_steps": 10}}


class Job:
    """A process of a world of one, whose gradients are NaN on some steps."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._weight = torch.nn.Parameter(torch.ones(2))
        self._optimizer = torch.optim.SGD([self._weight], lr=0.1)
        self.ended = 0

    def train(self, steps: int, *, poisoned: tuple[int, ...] = ()) -> None:
        for _ in range(steps):
            mp_agent.observe(step=100 + self.ended)
            factor = torch.nan if self.ended in poisoned else 1.0
            (self._weight * factor).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.ended += 1

    @property
    def probe_errors(self) -> int:
        reader = RingReader.open(locations.find_rings(self._run_dir)[0])
        try:
            return reader.state.probe_errors
        finally:
            reader.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.setattr(api, "_checkpoint_callbacks", [])

    def start(*, dry_run: bool = False) -> Job:
        directory = tmp_path / "shm"
        guard = {**POLICY, "skip_nonfinite": {}}
        mp_agent.init(
            dir=directory, run="run", node_agent="none", guard=guard, guard_dry_run=dry_run
        )
        return Job(locations.run_directory(directory, "run"))

    yield start
    mp_agent.shutdown()


def test_all_are_called_once_per_request_at_the_end_of_the_step(job):
    saved: list[tuple[int, int]] = []

    @mp_agent.on_checkpoint_request
    def early(step: int) -> None:
        saved.append((step, training.ended))

    training = job()
    late: list[int] = []
    mp_agent.on_checkpoint_request(late.append)
    mp_agent.on_checkpoint_request(early)
    training.train(6, poisoned=(2, 4))
    # Called within optimizer.step(), after the update: the loop has not counted the step yet.
    assert saved == [(104, 4)]
    assert late == [104]
    assert mp_agent.checkpoint_requested()


def test_no_more_than_the_limits_of_the_policy_allow(job):
    saved: list[int] = []
    mp_agent.on_checkpoint_request(saved.append)
    job().train(24, poisoned=tuple(range(24)))
    # Two troubled updates set it off; then there is one action per ten steps.
    assert saved == [101, 111, 121]


def test_what_a_callback_raises_is_contained_and_counted_and_the_next_is_called(job, caplog):
    saved: list[int] = []

    def broken(step: int) -> None:
        raise OSError("disk full")

    mp_agent.on_checkpoint_request(broken)
    mp_agent.on_checkpoint_request(saved.append)
    training = job()
    training.train(4, poisoned=(0, 1))
    assert saved == [101]
    assert training.ended == 4
    assert training.probe_errors == 1
    assert "broken raised OSError; training goes on" in caplog.text


def test_a_dry_run_calls_nothing(job):
    saved: list[int] = []
    mp_agent.on_checkpoint_request(saved.append)
    job(dry_run=True).train(4, poisoned=(0, 1))
    assert saved == []
    assert not mp_agent.checkpoint_requested()


def test_what_cannot_be_called_is_refused_without_raising(job, caplog):
    mp_agent.on_checkpoint_request("save")  # type: ignore[type-var]
    assert "on_checkpoint_request: 'save' cannot be called" in caplog.text
    job().train(3, poisoned=(0, 1))
