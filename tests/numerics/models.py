"""Small models in float64, their data, and tensor parallelism written by hand."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, INPUTS, OUTPUTS, ROWS = 8, 12, 6, 3, 4

M = TypeVar("M", bound=nn.Module)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(F.gelu(self.up(self.norm(inputs))))
        return inputs + change


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, INPUTS if tied else OUTPUTS, bias=False)
        if tied:
            self.head.weight = nn.Parameter(self.embed.weight.detach().t().clone())
            self.register_module("embed", None)
        self.tied = tied

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs @ self.head.weight if self.tied else self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.head(hidden)
        return outputs


class TiedModel(nn.Module):
    """The weights of two modules are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, INPUTS, bias=False)
        self.second = nn.Linear(INPUTS, INPUTS, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return outputs


class Stage(nn.Module):
    """A pipeline stage; every one has parameters of the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, INPUTS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(inputs))


class Experts(nn.Module):
    """A dense layer, and one expert per share of the data."""

    def __init__(self, *, numbers: list[int], same_name: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(INPUTS, WIDTH)
        for number in numbers:
            torch.manual_seed(100 + number)
            name = "expert" if same_name else f"expert{number}"
            self.add_module(name, nn.Linear(WIDTH, OUTPUTS))

    def forward(self, inputs: torch.Tensor, expert: str) -> torch.Tensor:
        outputs: torch.Tensor = self.get_submodule(expert)(torch.relu(self.dense(inputs)))
        return outputs


def seeded(kind: Callable[..., M], *args: Any, seed: int = 1, **kwargs: Any) -> M:
    """The same model on every rank, in float64."""
    torch.manual_seed(seed)
    return kind(*args, **kwargs).double()


def batch(step: int, shares: range | list[int], micro_batch: int = 0) -> torch.Tensor:
    """The data of some shares of a step, one after the other."""
    return torch.cat([_share(step, share, micro_batch) for share in shares])


def _share(step: int, share: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * micro_batch + 100 * step + share)
    return torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, group):
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ManualBlock(nn.Module):
    """This rank's part of a Block, split over a group as Megatron does it."""

    def __init__(self, whole: Block, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        part = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
        self.norm = whole.norm
        self.up = nn.Linear(WIDTH, HIDDEN // size).double()
        self.down = nn.Linear(HIDDEN // size, WIDTH).double()
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight[part])
            self.up.bias.copy_(whole.up.bias[part])
            self.down.weight.copy_(whole.down.weight[:, part])
            self.down.bias.copy_(whole.down.bias)

    @property
    def split(self) -> list[nn.Parameter]:
        """The parameters that are shards."""
        weight, _ = self.down.parameters()
        return [*self.up.parameters(), weight]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(_Copy.apply(self.norm(inputs), self._group)))
        out: torch.Tensor = _Reduce.apply(F.linear(hidden, self.down.weight), self._group)
        return inputs + out + self.down.bias
