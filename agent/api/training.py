"""Serves the calls of a training script without loading torch before it is needed; never raises."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from mp_agent.errors import SettingError
from mp_agent.records.conditions import ConditionEvent
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.version import torch_problem

if TYPE_CHECKING:
    from torch import Tensor, nn, optim
    from torch.amp import GradScaler
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def loaded_probe() -> ModuleType | None:
    """Return what serves these calls, if `init` has come far enough to load it."""
    return sys.modules.get("mp_agent.probe.api")


def load_probe() -> ModuleType | None:
    """Return what serves these calls; None, with a line in the log, where it cannot be loaded."""
    try:
        return import_module("mp_agent.probe.api")
    except Exception as error:
        raise_interruption(error)
        log_failure("mp_agent cannot be loaded; training goes on unwatched")
        return None


def raise_interruption(error: Exception) -> None:
    """Raise what a signal handler of the script's has raised."""
    try:
        from mp_agent.ring.interruptions import interruption_in

        found = interruption_in(error)
    except Exception:
        return
    if found is not None:
        raise found


def log_failure(message: str) -> None:
    """Log the exception being handled; nothing where logging fails as well."""
    try:
        logging.getLogger("mp_agent").exception(message)
    except Exception:
        return


CheckpointCallback = TypeVar("CheckpointCallback", bound=Callable[[int], object])
ConditionCallback = TypeVar("ConditionCallback", bound=Callable[[ConditionEvent], object])


def on_condition(callback: ConditionCallback) -> ConditionCallback:
    """Have `callback(condition)` called when a condition begins to hold, and when it ceases to.

    On every rank, on the training thread, at the end of a step, a second or two after the finding;
    once per event. It may take its time, mark it with `phase`, and end training; an exception of
    its own is logged, counted and contained. Before or after `init()`; returns `callback`, so that
    it can decorate a function. A second registration of the same one changes nothing.

        @mp_agent.on_condition
        def save_early(condition: mp_agent.ConditionEvent) -> None:
            if condition.severity == "critical" and condition.state == "firing":
                request_checkpoint()

    Rank 0 logs each event, with its remedy, under the logger `mp_agent` as well.
    """
    if (api := load_probe()) is not None:
        api.on_condition(callback)
    return callback


def on_checkpoint_request(callback: CheckpointCallback) -> CheckpointCallback:
    """Have `callback(step)` called when the guard asks for a checkpoint.

    With the policy `request_checkpoint`, as often as its limits allow. On every rank, on the
    training thread, at the end of the same step, so that it may save by collectives; `step` is that
    step, the trainer's own where `observe` gives it. It may take its time; an exception of its own
    is logged, counted and contained. Before or after `init()`; returns `callback`, so that it can
    decorate a function. A second registration of the same one changes nothing. A request is
    `checkpoint_requested()` as well: use the one or the other.

        @mp_agent.on_checkpoint_request
        def save(step: int) -> None:
            torch.save(model.state_dict(), f"guard-{step}.pt")
    """
    if (api := load_probe()) is not None:
        api.on_checkpoint_request(callback)
    return callback


def checkpoint_requested() -> bool:
    """Return whether the guard has asked for a checkpoint since the last call.

    True once per request, at the same step on every rank, so that it may be asked of each in the
    training loop; False without the policy `request_checkpoint`. Never raises.
    """
    api = loaded_probe()
    return False if api is None else bool(api.checkpoint_requested())


def stop_requested() -> bool:
    """Return whether the guard has asked the training to stop.

    True from the same step on every rank; False without the policy `request_stop`. The guard ends
    nothing by itself. Never raises.
    """
    api = loaded_probe()
    return False if api is None else bool(api.stop_requested())


def init(
    model: nn.Module | None = None,
    *,
    optimizer: optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    **settings: Any,
) -> None:
    """Begin to watch this process; call it on every rank, before or after `init_process_group`.

    Needs no arguments: optimizers, GradScalers, clipping, the module tree and the loss are found
    by themselves. `model` and `optimizer` settle which ones count where a process has several;
    `scaler` is accepted for symmetry and needs no help. `settings` are the fields of
    `mp_agent.settings.Settings` (`run="llama-7b"`, `layer_interval=50`, …). A second call is
    harmless and changes nothing.

    `process_group`, a process group or a device mesh, makes a run of its ranks alone: on other
    ranks the call does nothing. They are renumbered in ascending order, and should hold all
    shards of what they train. Groups of one job are runs of their own: the ranks are added to the
    run's name, unless this call gives `run`, a different one for each group then.

    Raises SettingError, naming field and value, when a setting given here is wrong. Everything
    else that fails, a torch that is absent or too old among it, is logged and counted, and training
    goes on unwatched.
    """
    try:
        if problem := torch_problem():
            logging.getLogger("mp_agent").error("%s; training goes on unwatched", problem)
            return
        from mp_agent.probe import api

        api.init(model, optimizer, process_group, settings)
    except SettingError:
        raise
    except Exception as error:
        raise_interruption(error)
        log_failure("mp_agent could not attach; training goes on unwatched")


def observe(
    *,
    loss: Tensor | float | None = None,
    step: int | None = None,
    lr: float | None = None,
    tokens: int | None = None,
) -> None:
    """Report what the hooks cannot know of the step under way; optional, on any rank.

    Call it before the optimizer's step; after it, what is reported counts for the next step.
    `loss` (0-dim, stays on its device) replaces the sum of what backward was called on; `step` is
    the trainer's own count; `lr` the learning rate; `tokens` are added up over ranks. Never raises.
    """
    if (api := loaded_probe()) is not None:
        api.observe(loss=loss, step=step, lr=lr, tokens=tokens)


def observe_logprobs(trainer: Tensor, sampler: Tensor, mask: Tensor | None = None) -> None:
    """Report log-probabilities of the same tokens by the trainer and by the sampler that drew them.

    For reinforcement learning with a rollout engine of its own; optional, on the ranks that have
    tokens. `trainer` and `sampler` are floating-point tensors of one shape, such as [B, T], on any
    device: they stay there, and no graph is kept. `mask`, of that shape, chooses the tokens where
    it is not 0. Several calls in a step (micro-batches) add up; those after the optimizer's step
    count for the next one.

    With Δ = trainer - sampler, over the tokens of all ranks: estimates k1 = mean(-Δ) and
    k3 = mean(exp(Δ) - 1 - Δ) of KL(sampler || trainer), in nats (Schulman, Approximating KL
    Divergence, r = exp(Δ)); the largest and the 99.9th percentile of |Δ|; the correlation; the
    effective sample size of the weights exp(Δ); the mean of -trainer, which estimates the
    policy's entropy. Tokens with a NaN or Inf are left out and counted.
    What cannot be compared is counted, and said once in the log. Never raises, never waits.
    """
    if (api := loaded_probe()) is not None:
        api.observe_logprobs(trainer, sampler, mask)


def watch_tensor(
    name: str, tensor: Tensor, *, dim: int | None = None, reduction: bool = False
) -> None:
    """Measure a tensor of the step under way, such as inputs, logits or the terms of a loss.

    Call it in the forward pass, on any rank, each time under the same name. On the steps on which
    layers are measured (`layer_interval`) it adds up, on the tensor's device and without waiting
    for it: largest and smallest non-zero magnitude, how many lie in each power of two and so
    their first percentile, mean, L2 norm, non-finite elements, and how much a running sum in the
    tensor's dtype would lose. On all other steps it returns at once.

    `tensor` has any shape and dtype; of complex ones real and imaginary parts count separately, of
    a DTensor the local part. `dim` compares its slices along that dimension: the largest range (of
    a slice, from its smallest to its largest element) divided by the smallest, and the slice at
    fault. `reduction=True` says that the script adds the elements up in their own dtype, as a loop
    of `total += term` or an all-reduce in 16 bits does, while torch.sum and torch.mean accumulate
    in FP32: MpAgentReductionSwallows is judged of those only. All tensors of one name in a step, of
    micro-batches and ranks, count as one; a range is compared within each.

    Never raises. Of one process 64 names of up to 128 characters are measured, and 64 calls of each
    in a step; not in evaluation, within `torch.compile` and in what backward recomputes. What has
    no numbers (sparse, quantized and meta tensors, other objects) is logged once and counted in
    `mp_agent_tensor_unmeasured_calls_total`.

        logits = model(inputs)
        mp_agent.watch_tensor("inputs", inputs, dim=-1)
        mp_agent.watch_tensor("logits", logits)
        losses = cross_entropy(logits, targets, reduction="none")
        mp_agent.watch_tensor("token losses", losses)
        losses.mean().backward()
    """
    if (api := loaded_probe()) is not None:
        api.watch_tensor(name, tensor, dim, reduction)


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a stretch that is not training, such as `with mp_agent.phase("rollout"):`.

    It is then not taken for a stall. Evaluation (`model.eval()`, `no_grad`) and checkpoints
    (`torch.save`, distributed ones, safetensors) are recognised without it. Never raises by itself.
    """
    api = loaded_probe()
    return nullcontext() if api is None else api.phase(name)


def global_statistics() -> GlobalStatistics | None:
    """Return the newest statistics of the run that the ranks have merged, on any rank.

    With `init(reduction="process_group")`, every `reduction_interval` steps; a step or two behind
    the step under way, on a GPU four more. None before the first ones, or without the setting. The
    numbers are those that the node agents export. Never raises.
    """
    api = loaded_probe()
    found: GlobalStatistics | None = None if api is None else api.global_statistics()
    return found


def declare(
    target: nn.Module | Tensor,
    *,
    shard: ProcessGroup | DeviceMesh | Sequence[int] | None = None,
    replicate: ProcessGroup | DeviceMesh | Sequence[int] | None = None,
    counted: bool = True,
) -> None:
    """Say over which ranks a parameter, or every parameter of a module, is split and copied.

    Needed only where nothing else shows it: DDP, FSDP, DTensors and Megatron's attributes and
    groups are known. Ranks are those of a process group or mesh, or a list of global ranks, this
    one among them; both sets together must form a regular grid. Call it on all of these ranks,
    after wrapping, before the first step (later it counts from the next one on)::

        mp_agent.declare(layer.weight, shard=tensor_group, replicate=data_group)
        mp_agent.declare(norm, replicate=tensor_group)      # DDP's copies are known as well
        mp_agent.declare(experts, replicate=expert_data_group)
        mp_agent.declare(stage)                             # of this rank alone
        mp_agent.declare(head.weight, counted=False)        # a copy that another rank counts

    Shards add up to one tensor of the run; of copies one is taken, and they are compared. With
    neither, the parameters are this rank's alone. What is said of a parameter, then of the closest
    module around it, counts; what a DTensor says of itself is added to it.

    Raises SettingError, naming the argument and its value, and leaves everything as it was.
    """
    if (api := load_probe()) is not None:
        api.declare(target, shard=shard, replicate=replicate, counted=counted)


def collection(name: str, *, include: str | Sequence[str]) -> None:
    """Measure the gradients of several parameters as one group, under its own name.

    On the steps on which layers are measured (`layer_interval`): L2 norm, largest and smallest
    non-zero magnitude, NaN and Inf elements, and with `measure_distribution=True` mean, standard
    deviation and the share of elements near FP16's overflow, unscaled and before clipping. A series
    each with the label `collection`, over the elements of all ranks: shards are added up, replicas
    counted once. The node agents make them of the layers' numbers, all of them, whatever
    `max_series` leaves out: training pays nothing.

    `include` is a regular expression, or a list of which one suffices, that is searched in the
    parameters' names, as `mp_agent_layer_grad_norm` has them in its label `layer` (those of
    `named_parameters()` without wrappers). A parameter may be in several collections. One without
    any is named in the log of the node agent and in `mp_agent_unsupported_info`, and
    `mp_agent_collection_layers` is 0.

    Call it before or after `init()`, on every rank: what the run's lowest rank has defined counts,
    from its next step on, for as long as the process lasts. The same definition again is harmless.

    Raises SettingError, naming the argument and its value, for a name that is not printable, is
    longer than 128 characters or is defined otherwise already, for what is no regular expression,
    and beyond 64 collections.

        mp_agent.collection("attention", include="attn")
        mp_agent.collection("norms", include=["ln_[12]", "ln_f"])
    """
    if (api := load_probe()) is not None:
        api.collection(name, include)


def shutdown() -> None:
    """Write what is still open, mark this rank as completed and remove all hooks.

    Optional: a normal exit does the same. Harmless when `init()` was never called.
    """
    if (api := loaded_probe()) is not None:
        api.shutdown()
