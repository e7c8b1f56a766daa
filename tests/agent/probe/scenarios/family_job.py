"""Trains one model on two ranks with all instruments, in each way of splitting it."""

import copy
from dataclasses import asdict, dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.agent.probe.fully_shard import runs, wrapped
from tests.agent.probe.instruments.fp8_scaled_layers import ScaledLinear
from tests.agent.probe.scenarios.test_routers import TokenRouter
from tests.agent.probe.watching import watched
from tests.gloo import process_group

RANKS, SAMPLED = 2, 10
STRATEGIES = ("ddp", "fsdp2")
ALL_INSTRUMENTS: dict[str, Any] = {
    name: True
    for name in (
        "measure_activations",
        "measure_attention",
        "measure_fp8",
        "measure_local_gradients",
        "measure_routers",
    )
}
DENSE_STEPS, TROUBLED = 170, 107


@dataclass(frozen=True)
class Batch:
    """What a rank is given in a step: more on the second rank, and larger numbers."""

    outputs: torch.Tensor
    sequences: torch.Tensor
    tokens: torch.Tensor
    operands: torch.Tensor
    """The second layer's scales stay 1: only what rank 1 is given is beyond 448."""


def batch_of(rank: int, step: int) -> Batch:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank))

    return Batch(
        outputs=random(3 + rank, 4),
        sequences=random(1 + rank, 4, 8),
        tokens=random(5 + 8 * rank, 8),
        operands=random(5 + 8 * rank, 8) * torch.logspace(-9, rank, 8) * (1e4 if rank else 1.0),
    )


def watched_tensor(rank: int) -> torch.Tensor:
    """Return [3 or 4, 4] of FP16; on rank 1 the third column is far larger than the others."""
    inputs = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(rank))
    return (inputs * torch.tensor([1.0, 1.0, 1.0 + 4000.0 * rank, 1.0])).half()


def logprobs_of(rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a rank reports: more tokens on the second rank, of which some are no numbers."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + part)
    shape = (2, 40 + 300 * rank)
    trainer = -torch.rand(shape, generator=generator).mul(3)
    sampler = trainer + 0.2 * (rank + 1) * torch.randn(shape, generator=generator)
    sampler[0, 7 * rank] = -inf
    return trainer, sampler, torch.rand(shape, generator=generator) < 0.8


class Model(nn.Module):
    """Four parts side by side, each with its own inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)
        self.router = TokenRouter()
        self.operands = nn.Sequential(nn.Linear(8, 8), ScaledLinear(8))
        with torch.no_grad():
            # As a tensor of its own nothing of it would be flushed.
            self.operands[0].weight[0] *= 1e-5  # type: ignore[operator, index]

    def forward(self, **batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [N, 4, 5], and the loss of what has no logits."""
        sequences = batch["sequences"]
        attended = self.attention(sequences, sequences, sequences, need_weights=False)[0]
        _, weights, _ = self.router(batch["tokens"])
        parts = (self.outputs(batch["outputs"]), weights, self.operands(batch["operands"]))
        loss: torch.Tensor = sum(part.square().mean() for part in parts)
        return self.head(attended), loss


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def run(rank: int, directory: Path) -> None:
    """Train each scenario in turn; called on each rank."""
    with process_group(directory, rank, RANKS):
        for strategy in filter(runs, STRATEGIES):
            _train(rank, strategy, directory / strategy)
            _train_with_one_nan(rank, strategy, directory / f"{strategy}_dense")
        _train(rank, "ddp", directory / "without_loss", without_loss=0)
        _train_with_bad_backward(rank, directory / "bad_backward")


def _train(rank: int, strategy: str, directory: Path, *, without_loss: int = -1) -> None:
    """Train with all instruments; one rank's loss may be none that is given logits."""
    with watched(directory, rank, RANKS, layer_interval=SAMPLED, **ALL_INSTRUMENTS) as probe:
        plain = make_model()
        model = wrapped(plain, strategy, plain.operands[0], plain.outputs[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(1, SAMPLED + 2):
            probe.watch_tensor("inputs", watched_tensor(rank), -1, True)
            if rank == 1:
                probe.watch_tensor("of one rank", watched_tensor(rank), None, False)
            if rank == 1 or step == 1:
                for part in range(2):
                    probe.observe_logprobs(*logprobs_of(rank, step, part))
            sequences_of_logits, loss = model(**asdict(batch_of(rank, step)))
            logits = sequences_of_logits.flatten(0, 1)
            if rank == without_loss:
                loss = loss + logits.square().mean()
            else:
                loss = loss + cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _train_with_one_nan(rank: int, strategy: str, directory: Path) -> None:
    settings: dict[str, Any] = {
        "layer_interval": 1000,
        "measure_activations": True,
        "overhead_budget": 1.0,
    }
    with watched(directory, rank, RANKS, layer_capacity=32, **settings):
        model = wrapped(make_model().outputs, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        healthy = copy.deepcopy(model.state_dict())
        for step in range(1, DENSE_STEPS + 1):
            loss = model(torch.ones(3, 4)).square().mean()
            (loss * (nan if (step, rank) == (TROUBLED, 1) else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.load_state_dict(healthy)


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * inf


class _BadInBackward(nn.Module):
    def __init__(self, *, bad: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.bad = bad

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs @ self.weight
        return _Overflow.apply(outputs) if self.bad else outputs


def _train_with_bad_backward(rank: int, directory: Path) -> None:
    with watched(directory, rank, RANKS, measure_activations=True):
        layers = [_BadInBackward(bad=place == 1 and rank == 1) for place in range(3)]
        model = DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.zero_grad()
            optimizer.step()
