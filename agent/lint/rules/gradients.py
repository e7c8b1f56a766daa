"""Rules on the order of backward, clipping, step and zero_grad."""

import re
from collections.abc import Callable, Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace, Value, ValueKind
from mp_agent.lint.rules.events import (
    CLIP,
    backwards,
    clears,
    common_loops,
    is_backward,
    is_clearing,
    is_made_in,
    is_unlimited,
    loop_of,
    may_clear,
    may_touch,
    may_use,
    mentions_clearing,
    models_of,
    reads_gradients,
    repeats,
    stepped,
    steps,
    within,
)


def _find_gradients_add_up(trace: Trace) -> Iterator[Problem]:
    for step, optimizer in steps(trace):
        loop = _step_loop(trace, step)
        if loop is None or is_made_in(trace, optimizer, loop) or not repeats(trace, step, loop):
            continue
        inside = [one for one in within(trace, loop.loops[-1]) if one.compatible(step)]
        if any(one.result.kind is ValueKind.MODEL and _makes(one) for one in inside):
            continue
        clearing = [one for one in inside if may_clear(one)]
        if not clearing and not mentions_clearing(trace, loop, step):
            yield Problem(
                step.place,
                "no zero_grad in this loop: each step uses the sum of all gradients since the "
                "loop began",
            )
        elif clearing and (
            all(_clears_another(one, optimizer) for one in clearing)
            or all(_clears_for_itself(one, optimizer, inside) for one in clearing)
        ):
            yield Problem(
                step.place,
                "zero_grad in this loop clears the gradients of other optimizers alone: this step "
                "uses the sum of all gradients since the loop began",
            )


def _makes(operation: Operation) -> bool:
    return operation.target == "<new>" or operation.target.startswith("torch.nn.")


def _step_loop(trace: Trace, step: Operation) -> Operation | None:
    """Return the innermost loop that a step shares with a backward pass that it may use."""
    for backward in backwards(trace):
        shared = common_loops(step, backward)
        if shared and step.compatible(backward):
            return loop_of(trace, shared[-1])
    return None


def _clears_another(operation: Operation, optimizer: Value) -> bool:
    other, own, theirs = operation.receiver, models_of(optimizer), models_of(operation.receiver)
    return (
        is_clearing(operation)
        and all(one.place is not None and not one.maybe for one in (other, optimizer))
        and other.kind is ValueKind.OPTIMIZER is optimizer.kind
        and len(optimizer.items) == len(other.items) == 1
        and all(one.items[0].kind is ValueKind.PARAMETERS for one in (other, optimizer))
        and bool(own)
        and bool(theirs)
        and not own & theirs
        and all(":" in name for name in own | theirs)
        and not any(
            mine.startswith(f"{one}.") or one.startswith(f"{mine}.")
            for mine in own
            for one in theirs
        )
    )


def _clears_for_itself(operation: Operation, optimizer: Value, inside: list[Operation]) -> bool:
    """Return whether another optimizer clears before or after a step of its own, as ours does not.

    What it holds is unknown; but of optimizers that are stepped one by one, each with its own
    `zero_grad`, the one without forgot it.
    """
    other = operation.receiver
    names = [_OWN_NAME.match(value.key) for value in (other, optimizer)]
    owners = {"" if name is None else name[1] for name in names}
    return (
        is_clearing(operation)
        and other.kind is ValueKind.OPTIMIZER is optimizer.kind
        and other.key != optimizer.key
        and len(owners) == 1
        and "" not in owners
        and any((used := stepped(one)) is not None and used.key == other.key for one in inside)
    )


_OWN_NAME = re.compile(r"(.+[.:])\w*opt\w*$", re.IGNORECASE)
"""The key of an attribute or an argument that is one of several optimizers: whose it is."""

GRADIENTS_ADD_UP = Rule(
    code="MP201",
    name="gradients-add-up",
    severity=FindingSeverity.ERROR,
    summary="A training loop never clears the gradients.",
    explanation="`backward()` adds to the gradients that are there. Without `zero_grad` every "
    "step goes along the sum of all gradients since the loop began, which looks like a learning "
    "rate that grows and a momentum that never decays. A loop is reported when neither it nor "
    "what it calls clears gradients, by whatever spelling, and all of that code is seen. "
    "`zero_grad` before the loop clears once.",
    bad="""\
def train(model, loader, optimizer):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
""",
    good="""\
def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
""",
    remedy="Call `optimizer.zero_grad()` once per step: before the first `backward()` of the "
    "step, or right after `optimizer.step()`.",
    alert="MpAgentGradientsAddUp",
    find=_find_gradients_add_up,
)


def _find_cleared_unused(trace: Trace) -> Iterator[Problem]:
    alone = reads_gradients(trace)
    for step, optimizer in steps(trace):
        cleared = _cleared_before(trace, step, optimizer)
        if cleared is not None:
            if _earlier_backward(trace, cleared) is not None:
                yield Problem(
                    cleared.place,
                    "gradients are cleared between backward and the step that should use them: "
                    "the step changes nothing, or applies momentum and weight decay alone",
                )
        elif not alone:
            yield from _lost_micro_batches(trace, step, optimizer)


def _cleared_before(trace: Trace, step: Operation, optimizer: Value) -> Operation | None:
    """Return what clears the gradients of a step, with nothing after it that computes some."""
    for operation in reversed(trace.operations[: step.index]):
        if not operation.compatible(step):
            continue
        if clears(operation, optimizer):
            certain = set(operation.path) <= set(step.path) and operation.loops == step.loops
            return operation if certain else None
        if is_backward(operation) or may_touch(operation) or is_clearing(operation):
            return None
        if stepped(operation) is not None and stepped(operation) != optimizer:
            return None
    return None


def _earlier_backward(
    trace: Trace, cleared: Operation, hides: Callable[[Operation], bool] = may_touch
) -> Operation | None:
    """Return a backward pass of the same pass of the loops before gradients are cleared."""
    for operation in reversed(trace.operations[: cleared.index]):
        if not operation.compatible(cleared):
            continue
        if is_backward(operation):
            return operation if operation.loops[: len(cleared.loops)] == cleared.loops else None
        if stepped(operation) is not None or hides(operation):
            return None
    return None


def _lost_micro_batches(trace: Trace, step: Operation, optimizer: Value) -> Iterator[Problem]:
    """Find gradients that are cleared at each micro-batch, while the step comes after several."""
    for cleared in trace.operations:
        if not clears(cleared, optimizer) or not cleared.compatible(step) or not cleared.loops:
            continue
        loop = cleared.loops[-1]
        passes = [
            one
            for one in backwards(trace)
            if one.loops == cleared.loops and set(cleared.path) <= set(one.path)
        ]
        if not passes or any(map(may_touch, within(trace, loop))):
            continue
        if _is_rarer(trace, step, optimizer, cleared, passes[0]):
            yield Problem(
                cleared.place,
                "gradients are cleared at every micro-batch, but the optimizer steps after "
                "several: only those of the last one are used",
            )


def _is_rarer(
    trace: Trace, step: Operation, optimizer: Value, cleared: Operation, backward: Operation
) -> bool:
    """Return whether a step comes once after several passes of the loop that clears."""
    others = [one for one, of in steps(trace) if of.key == optimizer.key and one is not step]
    loop = loop_of(trace, cleared.loops[-1])
    if others or loop is None or not repeats(trace, cleared, loop):
        return False
    if step.loops == cleared.loops:
        extra = set(step.path) - set(backward.path)
        return set(cleared.path) <= set(step.path) and any("%" in text for text, _ in extra)
    inner = len(cleared.loops) == len(step.loops) + 1
    return inner and cleared.loops[: len(step.loops)] == step.loops and bool(step.loops)


CLEARED_UNUSED = Rule(
    code="MP202",
    name="cleared-unused",
    severity=FindingSeverity.ERROR,
    summary="Gradients are cleared before a step has used them.",
    explanation="Either `zero_grad` stands between `backward()` and `step()`, so that nothing is "
    "trained; or it runs at every micro-batch of an accumulated step, so that of four micro-"
    "batches three are computed for nothing. Modules that handle `.grad` themselves are not "
    "reported for the second.",
    bad="""\
def train(model, loader, optimizer, accumulate):
    for index, x in enumerate(loader):
        optimizer.zero_grad()
        loss = model(x).mean() / accumulate
        loss.backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
""",
    good="""\
def train(model, loader, optimizer, accumulate):
    for index, x in enumerate(loader):
        loss = model(x).mean() / accumulate
        loss.backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    remedy="Clear the gradients right after the step, under the same condition.",
    alert="MpAgentGradientsDiscarded",
    find=_find_cleared_unused,
)


def _find_clipped_after_step(trace: Trace) -> Iterator[Problem]:
    for clip in trace.operations:
        if CLIP.match(clip.target) is None or is_unlimited(clip):
            continue
        step = _event(reversed(trace.operations[: clip.index]), clip, may_use)
        following = _event(iter(trace.operations[clip.index + 1 :]), clip, may_use)
        if _is_cleared_at_once(trace, clip, step, following):
            yield Problem(
                clip.place,
                "gradients are clipped right before they are cleared: nothing is clipped",
            )
            continue
        if step is None or stepped(step) is None:
            continue
        if not set(step.path) <= set(clip.path) or step.loops != clip.loops:
            continue
        if following is not None and (stepped(following) is not None or may_use(following)):
            continue
        if _earlier_backward(trace, step, may_use) is not None:
            yield Problem(
                clip.place,
                "gradients are clipped after the step that used them: nothing is clipped",
            )


def _is_cleared_at_once(
    trace: Trace, clip: Operation, before: Operation | None, following: Operation | None
) -> bool:
    """Return whether a loop clips before anything computes gradients, and then clears them."""
    if following is None or not is_clearing(following) or following.loops != clip.loops:
        return False
    if before is not None and before.loops[: len(clip.loops)] == clip.loops:
        return False
    later = trace.operations[following.index :]
    return (
        bool(clip.loops)
        and set(following.path) <= set(clip.path)
        and any(is_backward(one) and one.loops == clip.loops for one in later)
        and any(stepped(one) is not None and one.loops == clip.loops for one in later)
    )


def _event(
    operations: Iterator[Operation], around: Operation, hides: Callable[[Operation], bool]
) -> Operation | None:
    """Return the first of some operations that computes, uses, clears or may hide gradients."""
    for one in operations:
        if one.compatible(around) and (
            is_backward(one)
            or one.target in ("<optimizer>.step", "<scaler>.step", "<scaler>.unscale_")
            or is_clearing(one)
            or hides(one)
        ):
            return one
    return None


CLIPPED_AFTER_STEP = Rule(
    code="MP203",
    name="clipped-after-step",
    severity=FindingSeverity.ERROR,
    summary="Gradients are clipped after the optimizer has used them.",
    explanation="`clip_grad_norm_` changes the gradients in place, so it acts on a step only "
    "between `backward()` and `step()`. After the step, or at the start of a pass, before "
    "`zero_grad`, it changes what is thrown away.",
    bad="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    good="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
    remedy="Move the clipping between `backward()` (and `scaler.unscale_`) and `step()`.",
    alert="MpAgentClippingAfterStep",
    find=_find_clipped_after_step,
)


def _find_step_before_backward(trace: Trace) -> Iterator[Problem]:
    for step, optimizer in steps(trace):
        cleared = _cleared_before(trace, step, optimizer)
        if cleared is None or _earlier_backward(trace, cleared) is not None:
            continue
        later = next(
            (
                one
                for one in backwards(trace)
                if one.index > step.index
                and one.compatible(step)
                and one.loops[: len(step.loops)] == step.loops
            ),
            None,
        )
        if later is not None:
            yield Problem(
                step.place,
                "the step comes after zero_grad and before backward: it has no gradients, and "
                "those of backward are cleared before the next step",
            )


STEP_BEFORE_BACKWARD = Rule(
    code="MP204",
    name="step-before-backward",
    severity=FindingSeverity.ERROR,
    summary="The optimizer steps between `zero_grad` and `backward`.",
    explanation="The step finds no gradients (or zeros, with which momentum and weight decay "
    "still change the weights); what `backward()` computes afterwards is cleared by the next "
    "`zero_grad`. Nothing is learned, and no number is odd. A step at the start of the loop, "
    "before `zero_grad`, uses the gradients of the previous pass and is not reported.",
    bad="""\
def train(model, loader, optimizer):
    for x in loader:
        loss = model(x).mean()
        optimizer.zero_grad()
        optimizer.step()
        loss.backward()
""",
    good="""\
def train(model, loader, optimizer):
    for x in loader:
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    remedy="Call `zero_grad`, `backward`, `step`, in this order.",
    alert="MpAgentLayersWithoutGradient",
    find=_find_step_before_backward,
)
