"""mp_agent watches the numbers inside distributed PyTorch training and exports them.

Importing it starts no thread, opens no socket and does not import torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from mp_agent.errors import SettingError
from mp_agent.records.conditions import ConditionEvent
from mp_agent.records.reduction.global_statistics import GlobalStatistics
from mp_agent.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn, optim
    from torch.amp import GradScaler
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from mp_agent.advice.plan import PrecisionPlan
    from mp_agent.advice.report.model import Recommendation
    from mp_agent.compare.report.model import PrecisionReport
    from mp_agent.evaluate.report.model import PlanEvaluation
    from mp_agent.lint.results import CheckReport

__all__ = [
    "ConditionEvent",
    "GlobalStatistics",
    "__version__",
    "check",
    "checkpoint_requested",
    "compare_precision",
    "declare",
    "evaluate_plan",
    "global_statistics",
    "init",
    "observe",
    "observe_logprobs",
    "on_checkpoint_request",
    "on_condition",
    "phase",
    "recommend",
    "shutdown",
    "stop_requested",
    "watch_tensor",
]

CheckpointCallback = TypeVar("CheckpointCallback", bound=Callable[[int], object])
ConditionCallback = TypeVar("ConditionCallback", bound=Callable[[ConditionEvent], object])


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
    else that fails is logged and counted, and training goes on unwatched.
    """
    try:
        from mp_agent.probe import api

        api.init(model, optimizer, process_group, settings)
    except SettingError:
        raise
    except Exception as error:
        _pass_on(error)
        _log_failure("mp_agent could not attach; training goes on unwatched")


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
    if (api := _loaded()) is not None:
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
    effective sample size of the weights exp(Δ). Tokens with a NaN or Inf are left out and counted.
    What cannot be compared is counted, and said once in the log. Never raises, never waits.
    """
    if (api := _loaded()) is not None:
        api.observe_logprobs(trainer, sampler, mask)


def watch_tensor(
    name: str, tensor: Tensor, *, dim: int | None = None, reduction: bool = False
) -> None:
    """Measure a tensor of the step under way, such as inputs, logits or the terms of a loss.

    Call it in the forward pass, on any rank, each time under the same name. On the steps on which
    layers are measured (`layer_interval`) it adds up, on the tensor's device and without waiting
    for it: largest and smallest non-zero magnitude, mean, L2 norm, non-finite elements, and how
    much a running sum in the tensor's dtype would lose. On all other steps it returns at once.

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
    if (api := _loaded()) is not None:
        api.watch_tensor(name, tensor, dim, reduction)


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a stretch that is not training, such as `with mp_agent.phase("rollout"):`.

    It is then not taken for a stall. Evaluation (`model.eval()`, `no_grad`) and checkpoints
    (`torch.save`, distributed ones, safetensors) are recognised without it. Never raises by itself.
    """
    api = _loaded()
    return nullcontext() if api is None else api.phase(name)


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
    if (api := _load()) is not None:
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
    if (api := _load()) is not None:
        api.on_checkpoint_request(callback)
    return callback


def global_statistics() -> GlobalStatistics | None:
    """Return the newest statistics of the run that the ranks have merged, on any rank.

    With `init(reduction="process_group")`, every `reduction_interval` steps; a step or two behind
    the step under way, on a GPU four more. None before the first ones, or without the setting. The
    numbers are those that the node agents export. Never raises.
    """
    api = _loaded()
    found: GlobalStatistics | None = None if api is None else api.global_statistics()
    return found


def checkpoint_requested() -> bool:
    """Return whether the guard has asked for a checkpoint since the last call.

    True once per request, at the same step on every rank, so that it may be asked of each in the
    training loop; False without the policy `request_checkpoint`. Never raises.
    """
    api = _loaded()
    return False if api is None else bool(api.checkpoint_requested())


def stop_requested() -> bool:
    """Return whether the guard has asked the training to stop.

    True from the same step on every rank; False without the policy `request_stop`. The guard ends
    nothing by itself. Never raises.
    """
    api = _loaded()
    return False if api is None else bool(api.stop_requested())


def _loaded() -> ModuleType | None:
    """Return what serves these calls, if `init` has come far enough to load it."""
    return sys.modules.get("mp_agent.probe.api")


def _load() -> ModuleType | None:
    """Return what serves these calls; None, with a line in the log, where it cannot be loaded."""
    try:
        return import_module("mp_agent.probe.api")
    except Exception as error:
        _pass_on(error)
        _log_failure("mp_agent cannot be loaded; training goes on unwatched")
        return None


def _pass_on(error: Exception) -> None:
    """Raise what a signal handler of the script's has raised."""
    try:
        from mp_agent.ring.interruptions import interruption_in

        found = interruption_in(error)
    except Exception:
        return
    if found is not None:
        raise found


def _log_failure(message: str) -> None:
    """Log the exception being handled; nothing where logging fails as well."""
    try:
        logging.getLogger("mp_agent").exception(message)
    except Exception:
        return


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
    if (api := _load()) is not None:
        api.declare(target, shard=shard, replicate=replicate, counted=counted)


def check(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    jobs: int = 1,
) -> CheckReport:
    """Find mixed-precision mistakes in training code without running it, as `mp-agent check` does.

    `paths` are Python files, notebooks, and folders of them; `select` and `ignore` codes of rules,
    or their beginnings, on top of the settings in pyproject.toml. The report has `findings` (path,
    span, code, message), the files that were `skipped`, and `counts()` by rule. Any process, before
    or without `init()`; with `jobs` above 1, processes of its own share the files.

    Raises SettingError, naming the path, the code or the setting that is wrong.
    """
    from mp_agent.lint.api import check_paths

    return check_paths(paths, select=select, ignore=ignore, jobs=jobs)


def compare_precision(
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[[nn.Module, Any], Tensor] | None,
    *,
    dtypes: Iterable[str | torch.dtype] = (
        "fp16-autocast",
        "bf16-autocast",
        "fp16",
        "bf16",
        "tf32",
        "fp8-e4m3",
        "fp8-e5m2",
    ),
    reference: str | torch.dtype = "fp32",
    tolerance: float = 1e-3,
    loss_scale: float = 1.0,
    search_trials: int = 40,
    progress: bool | None = None,
) -> PrecisionReport:
    """Compare one forward and backward pass in several precisions with FP32, module by module.

    Reports where error begins, where it is amplified and where it is only handed on, and which
    modules have to stay in FP32 for a precision to pass. Independent of `init`, in one process.

    `batch` is what `loss(model, batch)` gets, which returns a loss of one element. A loss module is
    called with `model(inputs)` and `target` of a pair `(inputs, target)`; None stands for the loss
    that `model(**batch)`, `model(*batch)` or `model(batch)` returns, itself or as `.loss`.
    `dtypes` are names (`fp8-e4m3-autocast` and `fp8-e5m2-autocast` exist besides the default) or
    torch dtypes, each of which stands for its precisions with and without autocast. `reference` is
    `fp32` or `fp64`. A precision passes if the mean absolute difference of the model's outputs is
    below `tolerance` and nothing is NaN or Inf that is finite in the reference. `loss_scale` is the
    factor of its loss in the backward pass. `search_trials` bounds the runs, per precision that
    fails, that search what to keep in FP32; 0 searches nothing. `progress` shows a bar on standard
    error; by default on terminals.

    The model itself is never run: its weights, gradients, buffers, mode, and all random number
    generators are as before, also after an exception. Both sides
    hold their activations at the same time; a reference in FP64 needs twice the bytes of FP32.

    Raises CompareError (a ValueError), naming the argument or the module, for what cannot be
    compared, such as sharded models, and whatever the reference's own run raises.
    """
    from mp_agent.compare.api import compare
    from mp_agent.compare.progress import progress_bar

    with progress_bar(progress) as bar:
        return compare(
            model,
            batch,
            loss,
            dtypes=dtypes,
            reference=reference,
            tolerance=tolerance,
            loss_scale=loss_scale,
            search_trials=search_trials,
            progress=bar,
        )


def recommend(
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    goal: str = "speed",
    capability: str | None = None,
    steps: int = 8,
    learning_rate: float = 1e-4,
    tolerance: float = 0.05,
    search_trials: int = 40,
    progress: bool | None = None,
) -> Recommendation:
    """Recommend a precision for a model on this hardware, with the reason for each part.

    The result has `plan` (precision, initial loss scale, modules to keep in FP32, Adam's epsilon,
    the norm to clip at, and `settings` for `init`), `reasons`, `considered`, what was measured,
    estimates of speed and memory, `code()` to paste and `as_json()`. Independent of `init`, in one
    process.

    `batch` and `loss` are those of `compare_precision`; a DataLoader or an iterator in place of the
    batch gives one batch per step. `goal` is `speed`, `memory` or `stability`. `capability`, such
    as "8.0", plans for a GPU that is not here. Gradients are measured in `steps` steps in FP32 with
    AdamW at `learning_rate`. A precision passes if the mean absolute difference of the model's
    outputs is below `tolerance` times their RMS, and nothing is NaN or Inf that is finite in FP32;
    `search_trials` bounds the search for what to keep in FP32. `progress` shows a bar on standard
    error; by default on terminals.

    The model itself is never run or changed. Needs the memory of several copies: weights, gradients
    and Adam's state in FP32.

    Raises AdviceError (a ValueError), naming the argument, for wrong ones and for a model whose
    loss or gradients are not finite in FP32; CompareError for models that cannot be copied.
    """
    from mp_agent.advice.api import recommend_plan
    from mp_agent.compare.progress import progress_bar

    with progress_bar(progress) as bar:
        return recommend_plan(
            model,
            batch,
            loss,
            goal=goal,
            capability=capability,
            steps=steps,
            learning_rate=learning_rate,
            tolerance=tolerance,
            search_trials=search_trials,
            progress=bar,
        )


def evaluate_plan(
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[[nn.Module, Any], Tensor] | None,
    plan: PrecisionPlan,
    *,
    steps: int = 50,
    warmup_steps: int = 5,
    learning_rate: float = 1e-4,
    progress: bool | None = None,
) -> PlanEvaluation:
    """Measure a precision plan against FP32: speed-up, memory saved, difference of the loss.

    `plan` is that of `recommend(…).plan`; model, batch and loss are those of `recommend`. Copies of
    the model are trained by turns with AdamW, from the same weights, batches and random numbers, in
    FP32 and by the plan; a third one, in FP32 from weights that differ in their last bit, shows
    what a difference of the loss means. The first `warmup_steps` of `steps` do not count for speed.
    The result has `targets` with what was measured, `missed`, the losses and times of all steps,
    `as_json()` and `as_html()`. Independent of `init`, in one process; the model is never run.

    Raises AdviceError (a ValueError), naming the argument, for wrong ones; CompareError for models
    that cannot be copied; and whatever the training itself raises.
    """
    from mp_agent.compare.progress import progress_bar
    from mp_agent.evaluate.api import measure_plan

    with progress_bar(progress) as bar:
        return measure_plan(
            model,
            batch,
            loss,
            plan,
            steps=steps,
            warmup_steps=warmup_steps,
            learning_rate=learning_rate,
            progress=bar,
        )


def shutdown() -> None:
    """Write what is still open, mark this rank as completed and remove all hooks.

    Optional: a normal exit does the same. Harmless when `init()` was never called.
    """
    if (api := _loaded()) is not None:
        api.shutdown()


def load_ipython_extension(ipython: Any) -> None:
    """Attach to a notebook's kernel, for `%load_ext mp_agent`; `%unload_ext mp_agent` detaches.

    The address of the status page is printed after the cell in which training begins.
    """
    from mp_agent.integrations.ipython import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Detach from a notebook's kernel."""
    from mp_agent.integrations.ipython import unload

    unload(ipython)
