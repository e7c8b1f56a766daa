"""A loss scale that is not positive is a trainer's way of saying that there is none."""

from pathlib import Path

import pytest

from mp_agent.node.conditions import tracker
from tests.agent.node.training import Training


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_it_is_neither_shown_nor_at_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    monkeypatch.setattr(tracker, "PROCESSOR_SHARE", 1.0)
    training = Training(tmp_path)
    training.train(900, every=3.0, loss_scale=scale, learning_rate=1e-4)
    assert training.account.progress.loss_scale.scale is None
    assert [name for _, name, _ in training.heard() if "LossScale" in name] == []


def test_one_below_the_floor_is_a_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "PROCESSOR_SHARE", 1.0)
    training = Training(tmp_path)
    training.train(60, every=3.0, loss_scale=0.5, learning_rate=1e-4)
    assert "MpAgentLossScaleAtFloor" in [name for _, name, _ in training.heard()]
