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

pytestmark = pytest.mark.slow

STEPS, STEPS_PER_POLL, STEP_SECONDS = 320, 10, 5
ONSET, AT_LATEST = 100, 64
"""Step from which on a loop makes a mistake, and wrong steps by which its alert has fired."""
PARTS = 4
AUTOCAST_UNUSED = "MpAgentAutocastWithoutEffect"
AT_ONCE = ("MP201", "MP202", "MP203", "MP207", AUTOCAST_UNUSED)
"""Mistakes that are found as they are made; others by what becomes of the training."""


def batch(step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [32, 16], and classes [32] that a linear map makes of them."""
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(PARTS * step + part))
    weight = torch.randn(16, 10, generator=torch.Generator().manual_seed(10**6))
    return inputs, (inputs @ weight).argmax(1)


def train(mistake: str, steps: int) -> Iterator[int]:
    """Train, and yield the number of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.01), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if mistake == "MP208":
        model[3] = nn.Linear(64, 10)
    for step in range(steps):
        wrong = mistake if step >= ONSET else ""
        if mistake == "MP204":
            optimizer.zero_grad()
            optimizer.step()
        for part in range(PARTS):
            inputs, classes = batch(step, part)
            if wrong == "MP202" or (part == 0 and wrong != "MP201" and mistake != "MP204"):
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=wrong != AUTOCAST_UNUSED):
                outputs = model(inputs)
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(outputs, classes) / PARTS
            loss.backward()
        if mistake != "MP204":
            optimizer.step()
        if wrong == "MP203":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield step
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                model(inputs)
            model.train(wrong != "MP207")


@pytest.fixture
def alerts_of(watch, tmp_path: Path, monkeypatch) -> Callable[[str, int], dict[str, int]]:
    """Train with a mistake under a node agent's run, and return by when which alerts fired."""
    # A process does not see its own locks.
    monkeypatch.setattr(reader, "is_locked", lambda fd: True)

    def found(mistake: str, steps: int) -> dict[str, int]:
        watched = watch()
        run_dir = locations.run_directory(tmp_path / "shm", "test")
        ring = locations.ring_path(run_dir, make_identity())
        ring.parent.mkdir(parents=True)
        ring.hardlink_to(watched.writer.path)
        settings = Settings(dir=tmp_path / "shm", flight_dir=tmp_path / "flight")
        fired: dict[str, int] = {}
        with closing(Run(run_dir, settings)) as run:
            for step in train(mistake, steps):
                if step % STEPS_PER_POLL == 0:
                    run.poll(float(step * STEP_SECONDS))
                    for series, count in shown(run).items():
                        if count and (name := _alert_of(series)):
                            fired.setdefault(name, step)
        return fired

    return found


def _alert_of(series: str) -> str:
    """Return the name of the alert that a counter of alerts is of; empty for another series."""
    start = "condition_fired_total{"
    return series.removeprefix(start).partition(",")[0] if series.startswith(start) else ""


def _named(mistake: str) -> str:
    return BY_CODE[mistake].alert if mistake in BY_CODE else mistake


CONSEQUENCES = {"MpAgentGradientExplosion", "MpAgentGradientNormGrown", "MpAgentLossDiverging"}


@pytest.mark.parametrize("mistake", AT_ONCE)
def test_a_mistake_in_the_loop_fires_its_alert_within_64_steps(alerts_of, mistake):
    fired = alerts_of(mistake, ONSET + AT_LATEST + STEPS_PER_POLL)
    assert ONSET < fired[_named(mistake)] <= ONSET + AT_LATEST
    assert set(fired) - {_named(mistake)} <= CONSEQUENCES


@pytest.mark.parametrize("mistake", ["MP204", "MP208"])
def test_the_alert_that_the_rule_names_fires(alerts_of, mistake):
    assert _named(mistake) in alerts_of(mistake, STEPS)


def test_none_fires_without_a_mistake(alerts_of):
    assert alerts_of("", STEPS) == {}
