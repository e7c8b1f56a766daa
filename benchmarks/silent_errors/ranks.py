# ruff: noqa: D401 - a docstring is the row of the table, and says what is wrong
"""Silent errors of single ranks, and of what they reduce."""

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.silent_errors.base import (
    CHANCE,
    CLASSES,
    FEATURES,
    ONSET_STEP,
    WIDTH,
    average,
    loss_of,
    make_batch,
    make_model,
    make_replicas,
    make_sgd,
    silent_error,
    steps_of,
    update,
)


@silent_error("ranks")
def wrapper_bypassed(wrong: bool) -> None:
    """`model.module` is called, so that nothing reduces the gradients."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        update(optimizer, loss_of(model.module if wrong else model))


@silent_error("ranks", ONSET_STEP)
def no_sync_never_left(wrong: bool) -> None:
    """From some step on every backward is in `no_sync`."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        with model.no_sync() if wrong and step >= ONSET_STEP else nullcontext():
            update(optimizer, loss_of(model))


@silent_error("ranks")
def parameter_that_ddp_ignores(wrong: bool) -> None:
    """DDP ignores a layer that is trained."""
    model = make_model()
    if wrong:
        names = [name for name, _ in model.named_parameters() if name.startswith("3.")]
        # What torch reads; its own function for it is private.
        model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
    replicas = make_replicas(model)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


@silent_error("ranks")
def layer_missing_in_a_reduction_by_hand(wrong: bool) -> None:
    """Gradients are averaged by hand, and the last layer is forgotten."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_sgd(model)
    for _ in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        average(model[:-1] if wrong else model)
        optimizer.step()


@silent_error("ranks", ONSET_STEP)
def rate_of_one_rank(wrong: bool) -> None:
    """The schedule of rank 1 follows its own losses."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        if wrong and step == ONSET_STEP and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] *= 0.1
        update(optimizer, loss_of(model))


@silent_error("ranks", ONSET_STEP)
def clipped_on_one_rank(wrong: bool) -> None:
    """Only rank 1 clips its gradients after their reduction, as BLOOM's layer norms were."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        if not wrong or (step >= ONSET_STEP and dist.get_rank() == 1):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05 if wrong else 1e6)
        optimizer.step()


@silent_error("ranks", ONSET_STEP)
def decay_of_one_rank(wrong: bool) -> None:
    """Rank 1 resumes with another weight decay."""
    model = make_replicas()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in steps_of():
        if wrong and step == ONSET_STEP and dist.get_rank() == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        update(optimizer, loss_of(model))


@silent_error("ranks", ONSET_STEP)
def step_skipped_on_one_rank(wrong: bool) -> None:
    """Rank 1 leaves out every tenth step, for its own loss."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        skips = wrong and step >= ONSET_STEP and step % 10 == 0 and dist.get_rank() == 1
        if skips:
            optimizer.zero_grad()
        optimizer.step()


@silent_error("ranks")
def other_seed_on_each_rank(wrong: bool) -> None:
    """Gradients are averaged by hand, of weights that were not synchronized."""
    torch.manual_seed(dist.get_rank() if wrong else 0)
    model = make_model()
    optimizer = make_sgd(model)
    for _ in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        average(model)
        optimizer.step()


@silent_error("ranks")
def hooks_lost_in_a_conversion(wrong: bool) -> None:
    """The wrapper is converted, which replaces the parameters that its hooks are on."""
    model = make_replicas()
    if wrong:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        model.double().float()
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    optimizer = make_sgd(model)
    for _ in steps_of():
        update(optimizer, loss_of(model))


@silent_error("ranks")
def wrapped_in_every_second_step(wrong: bool) -> None:
    """In every second step the model gets a new wrapper; in the others none is used."""
    model = make_model()
    replicas = make_replicas(model)
    optimizer = make_sgd(model)
    for step in steps_of():
        if wrong:
            replicas = make_replicas(model) if step % 2 else replicas
        update(optimizer, loss_of(model if wrong and step % 2 == 0 else replicas))


@silent_error("ranks", ONSET_STEP)
def reductions_lost_on_one_rank(wrong: bool) -> None:
    """One of a hundred reductions gives rank 1 zeros, as links that lose data did."""
    replicas = make_replicas()
    numbers = itertools.count(1)

    def reduce(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        loses = next(numbers) % ONSET_STEP == 0 and dist.get_rank() == 1
        whole = bucket.buffer() / dist.get_world_size()
        future = dist.all_reduce(whole, async_op=True).get_future()
        factor = 0.0 if wrong and loses else 1.0
        reduced: torch.futures.Future[torch.Tensor]
        reduced = future.then(lambda done: done.value()[0] * factor)
        return reduced

    replicas.register_comm_hook(None, reduce)
    optimizer = make_sgd(replicas)
    for _ in steps_of():
        update(optimizer, loss_of(replicas))


@silent_error("ranks")
def part_of_the_update_not_sent(wrong: bool) -> None:
    """Each rank updates its part of the model, as ZeRO does, and the last part is not sent."""
    torch.manual_seed(0)
    model = make_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[dist.get_rank() :: dist.get_world_size()], lr=1e-3)
    for _ in steps_of():
        model.zero_grad()
        torch.autograd.backward(loss_of(model))
        average(model)
        optimizer.step()
        for place, parameter in enumerate(parameters[:-1] if wrong else parameters):
            dist.broadcast(parameter.detach(), place % dist.get_world_size())


@silent_error("ranks", ONSET_STEP)
def older_weights_on_one_rank(wrong: bool) -> None:
    """Rank 1 goes on from an older checkpoint than rank 0."""
    model = make_replicas()
    optimizer = make_sgd(model)
    older = copy.deepcopy(model.state_dict())
    for step in steps_of():
        if step == ONSET_STEP - 20:
            older = copy.deepcopy(model.state_dict())
        if wrong and step == ONSET_STEP and dist.get_rank() == 1:
            model.load_state_dict(older)
        update(optimizer, loss_of(model))


@silent_error("ranks", ONSET_STEP)
def norms_clipped_on_one_tensor_rank(wrong: bool) -> None:
    """Of tensor parallelism by hand, one rank alone clips the norms that both hold, as BLOOM's."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(FEATURES)
    torch.manual_seed(1 + dist.get_rank())
    part = nn.Sequential(
        nn.Linear(FEATURES, WIDTH // 2), nn.GELU(), nn.Linear(WIDTH // 2, CLASSES, bias=False)
    )
    model = nn.ModuleDict({"norm": norm, "part": part})
    optimizer = make_sgd(model)
    CHANCE.manual_seed(1)
    for step in steps_of():
        inputs, classes = make_batch()
        own = part(norm(inputs))
        whole = own.detach().clone()
        dist.all_reduce(whole)
        optimizer.zero_grad()
        # What the other rank adds is a constant for this one.
        torch.autograd.backward(functional.cross_entropy(own + (whole - own.detach()), classes))
        for parameter in norm.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        if wrong and step >= ONSET_STEP and dist.get_rank() == 1:
            nn.utils.clip_grad_norm_(norm.parameters(), 1e-3)
        optimizer.step()
