"""Rules on what is done before and after an update: clipping, and schedules."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Place, Trace, Value, ValueKind
from mp_agent.lint.rules.events import (
    CLIP,
    common_loops,
    is_made_in,
    is_unlimited,
    loop_of,
    repeats,
    stepped,
)

_ON_PURPOSE = re.compile(
    r"per_?(layer|param|tensor|sample)|layer_?wise|adaptive|hook|\.step$", re.I
)
"""Names of functions that mean it; the `step` of an optimizer follows a published algorithm."""
_HAS_GRADIENT = re.compile(r"\brequires_grad\b|\.grad\b")
_PARAMETERS = re.compile(r"\.(named_)?parameters\(\)\)?$|\['params'\]$")


def _find_clipped_one_by_one(trace: Trace) -> Iterator[Problem]:
    for clip in trace.operations:
        if CLIP.match(clip.target) is None or "norm" not in clip.target or is_unlimited(clip):
            continue
        loop = loop_of(trace, clip.loops[-1]) if clip.loops else None
        if loop is None or loop.place.module is not clip.place.module:
            continue
        if not _clips_each(clip, loop) or _ON_PURPOSE.search(_function_at(clip.place)):
            continue
        extra = set(clip.path) - set(loop.path)
        if all(_HAS_GRADIENT.search(condition) for condition, _ in extra):
            yield Problem(
                clip.place,
                "each parameter's gradient is clipped by its own norm: large ones lose more than "
                "small ones, and the direction of the step changes",
            )


def _function_at(place: Place) -> str:
    """Return the name of the innermost function around a place, and its class."""
    around = [
        one.qualified_name
        for one in place.module.functions
        if one.node.lineno <= place.node.lineno <= (one.node.end_lineno or 0)
    ]
    return around[-1] if around else ""


def _clips_each(clip: Operation, loop: Operation) -> bool:
    """Return whether a loop goes over parameters, and clips each of them alone."""
    node, over = clip.place.node, loop.place.node
    if not isinstance(node, ast.Call) or not isinstance(over, ast.For):
        return False
    given = node.args[0] if node.args else next((one.value for one in node.keywords), None)
    if isinstance(given, ast.List | ast.Tuple) and len(given.elts) == 1:
        given = given.elts[0]
    target = over.target
    text = ast.unparse(over.iter)
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        if "named_parameters()" not in text:
            return False
        target = target.elts[1]
    is_parameter = loop.receiver.kind is ValueKind.PARAMETERS or _PARAMETERS.search(text)
    return (
        bool(is_parameter)
        and isinstance(given, ast.Name)
        and isinstance(target, ast.Name)
        and given.id == target.id
    )


CLIPPED_ONE_BY_ONE = Rule(
    code="MP222",
    name="clipped-one-by-one",
    severity=FindingSeverity.WARNING,
    summary="Gradients are clipped parameter by parameter.",
    explanation="`clip_grad_norm_` scales all gradients that it is given by one factor, which "
    "keeps the direction of the step. Called for each parameter, it has a limit and a factor for "
    "each: a layer with large gradients is scaled down, one with small gradients is not, and the "
    "norm of all together may be as large as the limit times the root of the number of "
    "parameters. Functions whose names say that this is meant (per layer, layer-wise, adaptive) "
    "are not reported, nor are optimizers that clip in their own `step`, nor is "
    "`clip_grad_value_`, which has no norm.",
    bad="""\
import torch


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        for parameter in model.parameters():
            torch.nn.utils.clip_grad_norm_(parameter, 1.0)
        optimizer.step()
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
    remedy="Call `clip_grad_norm_(model.parameters(), limit)` once, without the loop.",
    alert="MpAgentClippingOneByOne",
    find=_find_clipped_one_by_one,
)


def _find_schedule_first(trace: Trace) -> Iterator[Problem]:
    for change in trace.of("<scheduler>.step"):
        schedule = change.receiver
        if change.arguments or change.keywords or not schedule.items or schedule.maybe:
            continue
        optimizer = schedule.items[0]
        own = [
            one
            for one in trace.of("<optimizer>.step", "<scaler>.step")
            if (value := stepped(one)) is not None and value.key == optimizer.key
        ]
        if not own or not change.loops or schedule.name.endswith("ReduceLROnPlateau"):
            continue
        first = own[0]
        same = first.loops[: len(change.loops)] == change.loops
        loop = loop_of(trace, change.loops[-1])
        if loop is None or is_made_in(trace, schedule, loop):
            continue
        others = [one for one in trace.of("<scheduler>.step") if one is not change]
        if (
            same
            and first.index > change.index
            and not change.path
            and not others
            and not _steps_before(trace, loop, optimizer)
        ):
            yield Problem(
                change.place,
                "the schedule moves on before the optimizer's first step: its first learning "
                "rate is never used",
            )


def _steps_before(trace: Trace, loop: Operation, optimizer: Value) -> bool:
    """Return whether the optimizer steps before the loop, which may be a warm-up."""
    return any(
        value is not None and value.key == optimizer.key and one.index < loop.index
        for one in trace.operations
        for value in [stepped(one)]
    )


SCHEDULE_FIRST = Rule(
    code="MP212",
    name="schedule-first",
    severity=FindingSeverity.WARNING,
    summary="`scheduler.step()` runs before `optimizer.step()`.",
    explanation="Since PyTorch 1.1 a schedule sets its first learning rate when it is made, and "
    "`step()` moves to the next one. Called before the optimizer's step it skips the first value, "
    "and every other one comes an epoch (or a step) too early. PyTorch warns once. Schedules that "
    "are given an epoch, plateau schedules, and schedules whose class is unknown are not reported.",
    bad="""\
import torch


def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    for epoch in range(epochs):
        scheduler.step()
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
""",
    good="""\
import torch


def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        scheduler.step()
""",
    remedy="Move `scheduler.step()` behind the steps of the optimizer.",
    alert="",
    no_alert="A learning rate that is one epoch ahead of its schedule looks like a schedule.",
    find=_find_schedule_first,
)


def _find_stepped_twice(trace: Trace) -> Iterator[Problem]:
    changes = [
        one
        for one in trace.of("<scheduler>.step")
        if not (one.arguments or one.keywords or one.receiver.maybe or not one.receiver.items)
    ]
    for inner in changes:
        for outer in changes:
            if inner.receiver.key == outer.receiver.key and _are_nested(trace, inner, outer):
                yield Problem(
                    outer.place,
                    f"the schedule is stepped in the loop over batches as well (line "
                    f"{inner.place.node.lineno}): after each pass it skips a rate",
                )
                break


def _are_nested(trace: Trace, inner: Operation, outer: Operation) -> bool:
    """Return whether a loop makes the first of two calls, and the loop around it the second."""
    shared = outer.loops
    loop = loop_of(trace, inner.loops[-1]) if inner.loops else None
    around = loop_of(trace, shared[-1]) if shared else None
    return (
        loop is not None
        and around is not None
        and len(inner.loops) == len(shared) + 1
        and common_loops(inner, outer) == shared
        and not set(inner.path) - set(around.path)
        and not set(outer.path) - set(around.path)
        and not is_made_in(trace, outer.receiver, around)
        and repeats(trace, inner, loop)
        and repeats(trace, outer, around)
    )


SCHEDULE_STEPPED_TWICE = Rule(
    code="MP227",
    name="schedule-stepped-twice",
    severity=FindingSeverity.WARNING,
    summary="A schedule is stepped for each batch, and again for each epoch.",
    explanation="A schedule counts its steps. One that is made for batches comes to its end too "
    "early by the number of epochs, and one that is made for epochs, such as `StepLR(optimizer, "
    "30)`, is at its end within the first epoch. Reported where the same schedule is stepped "
    "without a condition in a loop and in the loop around it.",
    bad="""\
import torch


def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            scheduler.step()
        scheduler.step()
""",
    good="""\
import torch


def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        scheduler.step()
""",
    remedy="Step the schedule in one of the two loops: the one whose passes its arguments count.",
    alert="",
    no_alert="A rate that falls early is what many schedules do; one that collapses raises "
    "`MpAgentLearningRateFallen`.",
    find=_find_stepped_twice,
)
