"""Ways of training with DeepSpeed, and what a single process in float64 makes of the same data."""

from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.agent.probe.reference import row_of

STEPS, MICRO_BATCHES, CLIP = 4, 2, 0.5
POISONED_STEP, RESUMED_STEPS = 2, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Variant:
    """One way of training.

    own_backward: `loss.backward()` in place of `engine.backward(loss)`. poisoned: the data of a
    rank are once infinite. watched_late: the engine was made before the probe attached.
    """

    stage: int
    dtype: str = "fp32"
    accumulate: str = ""
    offload: bool = False
    own_backward: bool = False
    poisoned: bool = False
    clips: bool = True
    round_robin: bool = False
    watched_late: bool = False
    resumed: bool = False
    muon: bool = False

    @property
    def name(self) -> str:
        """The stage, and all that is not as usual."""
        usual = asdict(Variant(self.stage))
        changed = [
            key if value is True else f"{key}={value}"
            for key, value in asdict(self).items()
            if value != usual[key]
        ]
        return "-".join([f"zero{self.stage}", *changed])


VARIANTS = {
    variant.name: variant
    for variant in (
        *(Variant(stage, dtype) for stage in range(4) for dtype in DTYPES),
        *(Variant(stage, "fp16", poisoned=True) for stage in range(4)),
        Variant(2, "bf16", poisoned=True),
        *(Variant(stage, offload=True) for stage in (1, 2, 3)),
        Variant(1, "bf16", accumulate="fp32"),
        Variant(2, "bf16", accumulate="fp32", round_robin=True),
        Variant(2, own_backward=True),
        Variant(3, "bf16", own_backward=True),
        Variant(2, "fp16", own_backward=True),
        Variant(2, clips=False),
        Variant(3, watched_late=True),
        Variant(2, resumed=True),
        Variant(2, "bf16", muon=True),
    )
}


def import_deepspeed() -> Any:
    """Return DeepSpeed, without the operators that it would compile first, for minutes."""
    deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


class Model(nn.Module):
    """Parameters that partitions cut in two, of odd sizes, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 7, bias=False))
        self.head = nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.head(self.body(inputs)) * self.frozen
        wide: torch.Tensor = output.to(torch.promote_types(output.dtype, torch.float32))
        return wide.pow(2).mean()


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    return Model()


def batch(step: int, rank: int, micro_batch: int) -> torch.Tensor:
    """The data of one micro-batch."""
    data = torch.Generator().manual_seed(1000 * step + 10 * rank + micro_batch)
    return 3 * torch.randn(5, 6, generator=data)


def reference_of(
    weights: Path, step: int, dtype: str, world: int
) -> tuple[dict[str, np.ndarray], float]:
    """The gradient columns of each layer, and the loss, of all data of a step in float64."""
    model = make_model().double()
    model.load_state_dict(torch.load(weights))
    losses = []
    for rank in range(world):
        for micro_batch in range(MICRO_BATCHES):
            inputs = batch(step, rank, micro_batch).to(DTYPES[dtype]).double()
            loss = model(inputs) / (MICRO_BATCHES * world)
            loss.backward()
            losses.append(loss.item())
    rows = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            rows[name] = row_of(parameter.grad, 1.0)
    return rows, float(np.sum(losses))
