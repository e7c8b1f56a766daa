"""Experts that each rank has for itself, next to layers that all have."""

from collections.abc import Callable
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

import mp_agent
from tests.numerics.models import Experts, batch, seeded
from tests.numerics.naming import renamed, united
from tests.numerics.registry import variant
from tests.numerics.training import (
    STEPS,
    WORLD,
    Reference,
    loss_of,
    optimizer_of,
    rows_of,
    watched,
)


@variant("mixed")
def experts(place: Path, rank: int) -> Reference:
    """Each rank holds an expert that the others lack; DDP leaves it alone."""
    return _experts(place, rank, same_name=False)


@variant("mixed")
def experts_of_equal_name(place: Path, rank: int) -> Reference:
    return _experts(place, rank, same_name=True)


@variant("ddp+declared")
def experts_declared(place: Path, rank: int) -> Reference:
    return _experts(
        place, rank, same_name=True, declare=lambda model: mp_agent.declare(model.expert)
    )


def _experts(
    place: Path, rank: int, *, same_name: bool, declare: Callable[[Experts], None] | None = None
) -> Reference:
    whole = seeded(Experts, numbers=list(range(WORLD)), same_name=False)
    optimizer = optimizer_of(whole.parameters())
    reference: Reference = []
    for step in range(1, STEPS + 1):
        whole.zero_grad()
        for share in range(WORLD):
            (loss_of(whole(batch(step, [share]), f"expert{share}")) / WORLD).backward()
        reference.append({"": rows_of(dict(whole.named_parameters()))})
        optimizer.step()
    del optimizer, whole
    with watched(place, rank):
        inner = seeded(Experts, numbers=[rank], same_name=same_name)
        own = "expert" if same_name else f"expert{rank}"
        ignored = [name for name, _ in inner.named_parameters() if name.startswith(own)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ignored)
        if declare is not None:
            declare(inner)
        model = DistributedDataParallel(inner)
        optimizer = optimizer_of(model.parameters())
        for step in range(1, STEPS + 1):
            model.zero_grad()
            loss_of(model(batch(step, [rank]), own)).backward()
            for parameter in inner.get_submodule(own).parameters():
                assert parameter.grad is not None
                parameter.grad.div_(WORLD)
            optimizer.step()
    if not same_name:
        return reference
    names = [f"expert{n}" for n in range(WORLD)]
    if declare is not None:
        return renamed(reference, _expert_at_home)
    return [{"": united(rows[""], names, "expert.")} for rows in reference]


def _expert_at_home(name: str) -> str:
    """`expert2.bias` stands as `expert.bias` of rank 2."""
    expert, _, rest = name.partition(".")
    return f"expert.{rest}@{expert[6:]}" if expert.startswith("expert") else name
