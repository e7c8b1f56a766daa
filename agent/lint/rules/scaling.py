"""Rules on gradient scaling: a missing or superfluous GradScaler, and the order of its calls."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import BF16, FP16, Operation, Trace
from mp_agent.lint.rules.events import backwards, has_one_pass, last_backward, loop_of, loss_of

_CLIP = re.compile(r"^torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm_?|value_)$")
_CLIP_BARE = re.compile(r"^torch\.nn\.utils\.(clip_grad\.)?clip_grad_norm$")


def _find_clip_without_unscale(trace: Trace) -> Iterator[Problem]:
    for clip in trace.operations:
        if not (_CLIP.match(clip.target) or _CLIP_BARE.match(clip.target)):
            continue
        backward = last_backward(trace, clip)
        if backward is None or not loss_of(backward).scaled:
            continue
        if not any(_helps(unscale, clip, trace) for unscale in trace.of("<scaler>.unscale_")):
            yield Problem(
                clip.place,
                "gradients are clipped while they are multiplied by the loss scale: call "
                "scaler.unscale_(optimizer) first",
            )


def _helps(unscale: Operation, clip: Operation, trace: Trace) -> bool:
    if unscale.index > clip.index or not unscale.compatible(clip):
        return False
    return not any(
        unscale.index < over.index < clip.index
        and (over.target == "<scaler>.update" or _optimizer(over) == _optimizer(unscale) != "")
        for over in trace.of("<scaler>.update", "<scaler>.step")
    )


CLIP_WITHOUT_UNSCALE = Rule(
    code="MP106",
    name="clip-without-unscale",
    severity=FindingSeverity.ERROR,
    summary="Gradients are clipped without, or before, `scaler.unscale_`.",
    explanation="After `scaler.scale(loss).backward()` the gradients are multiplied by the loss "
    "scale, 65536 at first. A limit of 1.0 then cuts every step down to about 1/65536 of what was "
    "meant.",
    bad="""\
import torch


def step(model, loss, optimizer, scaler):
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    good="""\
import torch


def step(model, loss, optimizer, scaler):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    remedy="Call `scaler.unscale_(optimizer)` between `backward()` and clipping.",
    alert="MpAgentClippingBeforeUnscale",
    find=_find_clip_without_unscale,
    needs_callers=True,
)


def _find_unscale_twice(trace: Trace) -> Iterator[Problem]:
    updates = list(trace.of("<scaler>.update"))
    calls = list(trace.of("<scaler>.unscale_"))
    for position, call in enumerate(calls):
        if any(_again(earlier, call, updates) for earlier in calls[:position]):
            yield Problem(call.place, "unscale_ was already called for this optimizer")
        elif _repeats(trace, call, updates):
            yield Problem(
                call.place, "unscale_ runs at every pass of the loop, scaler.update() does not"
            )


def _again(earlier: Operation, call: Operation, updates: list[Operation]) -> bool:
    return (
        _optimizer(earlier) == _optimizer(call) != ""
        and not _optimizer(call).startswith("each:")
        and earlier.receiver.key == call.receiver.key
        and earlier.compatible(call)
        and not any(
            earlier.index < update.index < call.index and update.compatible(call)
            for update in updates
        )
    )


def _optimizer(call: Operation) -> str:
    value = call.argument(0, "optimizer")
    return "" if value is None else value.key


def _repeats(trace: Trace, call: Operation, updates: list[Operation]) -> bool:
    """Return whether a loop calls unscale_ again before the scaler is updated."""
    if not call.loops or not updates:
        return False
    optimizer = _optimizer(call)
    if optimizer.startswith("each:"):
        return False  # one call per optimizer
    loop = loop_of(trace, call.loops[-1])
    if loop is not None and has_one_pass(loop):
        return False
    own = [update for update in updates if update.loops[: len(call.loops)] == call.loops]
    if own:
        needed = [set(update.path) - set(call.path) for update in own]
        return all(any("%" in condition for condition, _ in extra) for extra in needed)
    return any(
        update.compatible(call) and update.loops == call.loops[: len(update.loops)]
        for update in updates
    )


UNSCALE_TWICE = Rule(
    code="MP107",
    name="unscale-twice",
    severity=FindingSeverity.ERROR,
    summary="`scaler.unscale_` is called twice for an optimizer between two updates.",
    explanation="GradScaler raises RuntimeError at the second call. With gradient accumulation "
    "this happens when `unscale_` runs at every micro-batch and `update()` only at the last.",
    bad="""\
import torch


def train(model, loader, optimizer, scaler, accumulate):
    for index, x in enumerate(loader):
        scaler.scale(model(x).mean()).backward()
        scaler.unscale_(optimizer)
        if (index + 1) % accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    good="""\
import torch


def train(model, loader, optimizer, scaler, accumulate):
    for index, x in enumerate(loader):
        scaler.scale(model(x).mean()).backward()
        if (index + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    remedy="Call it once per optimizer and step, right before what needs unscaled gradients.",
    alert="MpAgentRunFailed",
    find=_find_unscale_twice,
)


def _find_step_without_update(trace: Trace) -> Iterator[Problem]:
    scales = {operation.receiver.key for operation in trace.of("<scaler>.scale")}
    updates = list(trace.of("<scaler>.update"))
    for step in trace.of("<scaler>.step"):
        if step.receiver.key not in scales or any(step.compatible(update) for update in updates):
            continue
        if not _updated_elsewhere(step):
            yield Problem(
                step.place,
                "scaler.step() is never followed by scaler.update(): the second step raises, and "
                "the loss scale never adapts",
            )


def _updated_elsewhere(step: Operation) -> bool:
    """Return whether another function of the module updates the scaler, by its name."""
    node = step.place.node
    scaler = (
        ast.unparse(node.func.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        else ""
    )
    last = scaler.rpartition(".")[2]
    return f"{last}.update(" in step.place.module.source.text


STEP_WITHOUT_UPDATE = Rule(
    code="MP108",
    name="step-without-update",
    severity=FindingSeverity.ERROR,
    summary="`scaler.step` is called without `scaler.update`.",
    explanation="`update()` ends a step for the scaler: it adapts the loss scale and forgets "
    "which optimizers were unscaled and stepped. Without it the next `step()` raises RuntimeError.",
    bad="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
""",
    good="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    remedy="Call `scaler.update()` once per step, after the last `scaler.step()`.",
    alert="MpAgentRunFailed",
    find=_find_step_without_update,
    needs_callers=True,
)


def _find_step_bypasses_scaler(trace: Trace) -> Iterator[Problem]:
    for step in trace.of("<optimizer>.step"):
        backward = last_backward(trace, step)
        if backward is None or not loss_of(backward).scaled or _is_alternative(step, trace):
            continue
        yield Problem(
            step.place,
            "optimizer.step() applies gradients that are multiplied by the loss scale, and Inf or "
            "NaN among them: use scaler.step(optimizer)",
        )


def _is_alternative(step: Operation, trace: Trace) -> bool:
    """Return whether another branch of the same test takes the step with the scaler."""
    mine = dict(step.path)
    return any(
        key in mine and mine[key] != arm
        for other in trace.of("<scaler>.step")
        for key, arm in other.path
    )


STEP_BYPASSES_SCALER = Rule(
    code="MP109",
    name="step-bypasses-scaler",
    severity=FindingSeverity.ERROR,
    summary="`optimizer.step` is called in place of `scaler.step`.",
    explanation="After `scaler.scale(loss).backward()`, only `scaler.step(optimizer)` divides the "
    "gradients by the loss scale and skips the step when one of them is Inf or NaN.",
    bad="""\
import torch


def step(model, x, optimizer, scaler):
    scaler.scale(model(x).mean()).backward()
    optimizer.step()
    scaler.update()
""",
    good="""\
import torch


def step(model, x, optimizer, scaler):
    scaler.scale(model(x).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    remedy="Call `scaler.step(optimizer)`, for every optimizer whose loss was scaled.",
    alert="MpAgentNonFiniteUpdate",
    find=_find_step_bypasses_scaler,
)


_SCALES_BY_OTHER_MEANS = frozenset({"accelerat", "deepspeed", "fabric", "apex", "engine"})
_SCALES_DATA = re.compile(r"(standard|minmax|robust|maxabs)_?scaler$")


def _find_fp16_without_scaler(trace: Trace) -> Iterator[Problem]:
    passes = [operation for operation in backwards(trace) if not loss_of(operation).scaled]
    if not passes or trace.mentions(_SCALES_BY_OTHER_MEANS) or _scales_losses(trace):
        return
    for enter in trace.of("<autocast>.enter"):
        context = enter.receiver
        if (
            context.dtypes == {FP16}
            and not context.maybe
            and not enter.no_grad
            and any(enter.compatible(backward) for backward in passes)
        ):
            yield Problem(
                context.place or enter.place,
                "FP16 autocast trains without a GradScaler: gradients below 6e-8 become zero",
            )


def _scales_losses(trace: Trace) -> bool:
    """Return whether a module has names of loss scaling; those of data in it do not count."""
    for module in trace.modules:
        names = {name for name in module.identifiers if "scal" in name}
        of_data = {name for name in names if _SCALES_DATA.match(name)}
        if names - of_data - ({"scaler"} if of_data else set()):
            return True
    return False


FP16_WITHOUT_SCALER = Rule(
    code="MP110",
    name="fp16-without-scaler",
    severity=FindingSeverity.ERROR,
    summary="A model is trained under FP16 autocast without a GradScaler.",
    explanation="FP16 has no numbers between 0 and 6e-8, and few below 6e-5. Without loss scaling "
    'a large part of most models\' gradients becomes zero. `autocast("cuda")` without a dtype is '
    "FP16.",
    bad="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
""",
    remedy="Use `torch.amp.GradScaler`, or `dtype=torch.bfloat16` where the hardware has it.",
    alert="MpAgentGradientUnderflow",
    find=_find_fp16_without_scaler,
    needs_callers=True,
)


def _find_scaler_with_bf16(trace: Trace) -> Iterator[Problem]:
    enters = list(trace.of("<autocast>.enter"))
    if not enters or any(enter.receiver.dtypes != {BF16} for enter in enters):
        return
    for scale in trace.of("<scaler>.scale"):
        scaler = scale.receiver
        if scaler.place is not None and scaler.constant and not scaler.maybe:
            yield Problem(
                scaler.place,
                "a GradScaler scales the loss of BF16 autocast: BF16 has FP32's range, so "
                "gradients neither underflow nor overflow, and the loss scale grows for ever",
            )


SCALER_WITH_BF16 = Rule(
    code="MP111",
    name="scaler-with-bf16",
    severity=FindingSeverity.WARNING,
    summary="A GradScaler is used with BF16 autocast.",
    explanation="BF16 has the exponent of FP32, so there is nothing to scale. As BF16 gradients "
    "hardly ever overflow, the scale doubles every 2000 steps until FP32 overflows, and then "
    "steps are skipped; `unscale_` also costs a pass over all gradients and a synchronization.",
    bad="""\
import torch


def train(model, loader, optimizer):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    good="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
""",
    remedy="Remove the scaler, or make it with `enabled=dtype == torch.float16`.",
    alert="MpAgentOverflowRatioHigh",
    find=_find_scaler_with_bf16,
)
