"""The hooks for torchtitan with its own metric classes, where it is installed.

`make test` does not install it: it needs another version of datasets than TRL. A loop of the same
calls shows what a trainer that resumes does; torchtitan's own is run in test_torchtitan_trainer.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mp_agent
from mp_agent.ring import locations
from mp_agent.ring.run_files import ConditionNews, write_conditions
from tests.agent.probe.rings import read_ring
from tests.agent.records.samples import make_event

metrics = pytest.importorskip("torchtitan.components.metrics", reason="torchtitan is not installed")


class Logged(metrics.BaseLogger):  # type: ignore[name-defined]
    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, Any], int]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.lines.append((values, step))


class Trainer:
    """What the hooks use of torchtitan's trainer; this is one of two data-parallel ranks."""

    def __init__(self, step: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step, self.ntokens_seen = step, tokens
        self.parallel_dims = SimpleNamespace(
            pp_enabled=False, dp_replicate=1, dp_shard=2, cp=1, tp=2, pp=1
        )
        container = metrics.LoggerContainer()
        self.logged = Logged()
        container.add_logger(self.logged)
        self.metrics_processor = SimpleNamespace(logger=container)
        self.losses: list[float] = []

    def batch_generator(self) -> Any:
        while True:
            self.ntokens_seen += 16
            yield torch.randn(2, 4)

    def forward_backward_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch).pow(2).mean() / 4  # of 2 ranks and 2 micro-batches
        loss.backward()
        return loss

    def train(self, steps: int) -> None:
        batches = self.batch_generator()
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad()
            total = sum(self.forward_backward_step(next(batches)).item() for _ in range(2))
            self.optimizer.step()
            self.losses.append(total * 2)
            self.metrics_processor.logger.log({"loss": total}, self.step)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    from mp_agent.probe import attachment

    monkeypatch.setattr(attachment, "POLL_INTERVAL_SECONDS", 0.0)
    yield locations.run_directory(tmp_path, "titan")
    mp_agent.shutdown()


def test_step_loss_tokens_and_conditions_pass_between_both(run_dir, tmp_path):
    from mp_agent.integrations.torchtitan import watch

    trainer = Trainer(step=100, tokens=5_000)
    watch(trainer, run="titan", dir=tmp_path, node_agent="none")
    trainer.train(1)
    write_conditions(run_dir, ConditionNews(epoch="a").with_event(make_event()))
    trainer.train(2)
    (path,) = locations.find_rings(run_dir)
    ring = read_ring(path)
    assert [record.step for record in ring.records] == [101, 102, 103]
    assert ring.column("loss") == pytest.approx(trainer.losses)
    assert ring.column("tokens") == [16.0] * 3  # 2 · 16, shared by two tensor-parallel ranks
    conditions = [values for values, _ in trainer.logged.lines if "loss" not in values]
    assert [values["mp_agent/MpAgentGradientExplosion"] for values in conditions] == [1.0]
