"""The alerts that rules of the check name are those that the mistake brings in a run."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mp_agent.lint.rules import BY_CODE
from mp_agent.node.run.run import Run
from mp_agent.ring import locations, reader
from mp_agent.settings import Settings
from tests.agent.node.shown import shown
from tests.agent.probe.rings import make_identity

STEPS, STEPS_PER_POLL, STEP_SECONDS = 320, 10, 5


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [32, 16], and classes [32] that a linear map makes of them."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    weight = torch.randn(16, 10, generator=torch.Generator().manual_seed(10**6))
    return inputs, (inputs @ weight).argmax(1)


def train(mistake: str) -> Iterator[int]:
    """Train, and yield the number of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if mistake == "MP208":
        model[2] = nn.Linear(64, 10)
    for step in range(STEPS):
        inputs, classes = batch(step)
        if mistake != "MP201":
            optimizer.zero_grad()
        if mistake == "MP204":
            optimizer.step()
        cross_entropy(model(inputs), classes).backward()
        if mistake != "MP204":
            optimizer.step()
        if mistake == "MP203":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield step


@pytest.fixture
def alerts_of(watch, tmp_path: Path, monkeypatch) -> Callable[[str], set[str]]:
    """Train with a mistake under a node agent's run, and return the alerts that fired."""
    # A process does not see its own locks.
    monkeypatch.setattr(reader, "is_locked", lambda fd: True)

    def found(mistake: str) -> set[str]:
        watched = watch()
        run_dir = locations.run_directory(tmp_path / "shm", "test")
        ring = locations.ring_path(run_dir, make_identity())
        ring.parent.mkdir(parents=True)
        ring.hardlink_to(watched.writer.path)
        settings = Settings(dir=tmp_path / "shm", flight_dir=tmp_path / "flight")
        with closing(Run(run_dir, settings)) as run:
            for step in train(mistake):
                if step % STEPS_PER_POLL == 0:
                    run.poll(float(step * STEP_SECONDS))
            return {_alert_of(series) for series, count in shown(run).items() if count} - {""}

    return found


def _alert_of(series: str) -> str:
    """Return the name of the alert that a counter of alerts is of; empty for another series."""
    start = "condition_fired_total{"
    return series.removeprefix(start).partition(",")[0] if series.startswith(start) else ""


@pytest.mark.parametrize("mistake", ["MP201", "MP204", "MP208"])
def test_the_alert_that_the_rule_names_fires(alerts_of, mistake):
    assert BY_CODE[mistake].alert in alerts_of(mistake)


@pytest.mark.parametrize("mistake", ["", "MP203"])
def test_none_fires_without_a_mistake_and_where_the_rule_names_none(alerts_of, mistake):
    assert not mistake or not BY_CODE[mistake].alert
    assert alerts_of(mistake) == set()
