"""Models under DDP and FSDP2; with torch 2.6, `fully_shard` does not run on a CPU."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

_FAILS = torch.__version__.startswith("2.6.")
_REASON = "fully_shard of torch 2.6 does not run on a CPU"

fails_on_2_6 = pytest.mark.xfail(_FAILS, reason=_REASON, raises=AttributeError, strict=True)
"""Asserts that it fails there; for tests that call it in their own process."""


def runs(strategy: str) -> bool:
    """Return whether a way of splitting a model can be trained with this release of torch."""
    return not (_FAILS and strategy.startswith(("fsdp2", "hsdp")))


def wrapped(model: nn.Module, strategy: str, *apart: nn.Module) -> nn.Module:
    """Return the model as it trains by `strategy`; as it is, if that is neither DDP nor FSDP2.

    apart: modules that FSDP2 shards by themselves.
    """
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp2":
        for module in (*apart, model):
            fully_shard(module)
    return model


def skipped_where_it_fails(strategy: str) -> pytest.MarkDecorator:
    """Return the mark of a test of whole jobs that train by `strategy`."""
    return pytest.mark.skipif(not runs(strategy), reason=_REASON)


def strategies(names: Iterable[str]) -> list[Any]:
    """Return parameters of such a test."""
    return [pytest.param(name, marks=skipped_where_it_fails(name)) for name in names]
