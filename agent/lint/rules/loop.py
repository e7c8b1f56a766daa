"""Rules on what a training loop does besides its gradients: modes, schedules, batches."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace, Value, ValueKind
from mp_agent.lint.rules.events import (
    backwards,
    common_loops,
    is_fixed,
    is_made_in,
    keyword,
    loop_of,
    method_of,
    repeats,
    stepped,
    text_of,
    within,
)


def _find_first_batch(trace: Trace) -> Iterator[Problem]:
    passes = [one for one in backwards(trace) if one.loops]
    for operation in trace.of("next"):
        loader = operation.argument(0)
        if loader is None or not operation.loops or not _takes_first(operation.place.node):
            continue
        loop = loop_of(trace, operation.loops[-1])
        if loop is None or is_made_in(trace, loader, loop) or not _is_in_order(loader):
            continue
        if repeats(trace, operation, loop) and any(
            operation.loops == one.loops and set(operation.path) <= set(one.path) for one in passes
        ):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` makes a new iterator at every pass of the loop: it "
                "trains on the first batch alone",
            )


def _takes_first(node: ast.expr | ast.stmt) -> bool:
    return (
        isinstance(node, ast.Call)
        and bool(node.args)
        and isinstance(node.args[0], ast.Call)
        and isinstance(node.args[0].func, ast.Name)
        and node.args[0].func.id == "iter"
    )


def _is_in_order(loader: Value) -> bool:
    """Return whether a loader certainly begins with the same samples whenever it is iterated."""
    if loader.kind is not ValueKind.LOADER or loader.maybe or not loader.items:
        return False
    shuffle = keyword(loader, 2, "shuffle")
    return (
        is_fixed(loader.items[0])
        and (shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is False))
        and keyword(loader, 3, "sampler") is None
        and keyword(loader, 4, "batch_sampler") is None
    )


FIRST_BATCH = Rule(
    code="MP206",
    name="first-batch",
    severity=FindingSeverity.ERROR,
    summary="`next(iter(loader))` in a training loop takes the first batch at every step.",
    explanation="`iter(loader)` begins a new epoch. Without shuffling, every step trains on the "
    "same samples, and the loss falls nicely. Reported where the trace shows a DataLoader that "
    "does not shuffle, over a dataset whose samples are fixed. With shuffling, each call draws "
    "another batch (and starts the workers again): that is slow, not wrong.",
    bad="""\
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(model, x, y, optimizer, steps):
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    for _ in range(steps):
        inputs, targets = next(iter(loader))
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(model, x, y, optimizer, steps):
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    batches = iter(loader)
    for _ in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        inputs, targets = batch
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    remedy="Make the iterator once, before the loop, or loop over the loader itself.",
    alert="MpAgentSameBatch",
    find=_find_first_batch,
)


_TRAINS = re.compile(r"train|fit|epoch|mode|run|eval|valid|test")
_MODE_MATTERS = re.compile(r"drop_?out|batch_?norm|instance_?norm|self\.training|drop_?path", re.I)


def _find_left_in_evaluation(trace: Trace) -> Iterator[Problem]:
    for change in trace.of("<model>.eval"):
        model = change.receiver
        trained = _training_call(trace, change)
        if trained is None or not _mode_matters(model):
            continue
        shared = common_loops(change, trained)
        loop = loop_of(trace, shared[-1])
        if loop is None or is_made_in(trace, model, loop) or not repeats(trace, change, loop):
            continue
        if ".train(" in "".join(_lines(loop)):
            continue
        if not any(_may_train(one, model) for one in within(trace, shared[-1])):
            yield Problem(
                change.place,
                "the model stays in evaluation mode: from the second pass of the loop on it is "
                "trained without dropout and with frozen batch statistics",
            )


def _training_call(trace: Trace, change: Operation) -> Operation | None:
    """Return the call of a model for a backward pass, in a loop that calls eval() after it.

    Or before it, every so many steps: what is meant to stay in evaluation does not wait for them.
    """
    for backward in backwards(trace):
        if not common_loops(backward, change):
            continue
        if backward.index > change.index and not _at_times(change, backward):
            continue
        for call in trace.of("<model>()"):
            if (
                call.receiver.key == change.receiver.key
                and (call.index > change.index) == (backward.index > change.index)
                and call.index < backward.index
                and not call.no_grad
                and call.compatible(backward)
                and common_loops(call, backward) == backward.loops
                and len(common_loops(call, change)) == len(common_loops(backward, change))
            ):
                return call
    return None


def _at_times(change: Operation, backward: Operation) -> bool:
    extra = set(change.path) - set(backward.path)
    return any(arm and "%" in condition for condition, arm in extra)


def _mode_matters(model: Value) -> bool:
    """Return whether a model has layers that differ in evaluation, as far as known."""
    if model.klass is not None:
        return _MODE_MATTERS.search(model.klass.module.source.text) is not None
    if model.place is None:
        return True
    if model.name.startswith("torch.nn."):
        node = model.place.node
        text = model.place.module.source.excerpt(model.place.module.source.span(node))
        return _MODE_MATTERS.search(text) is not None or "*" in text
    return True


def _may_train(operation: Operation, model: Value) -> bool:
    method = method_of(operation)
    if method in ("train", "set_train", "train_mode"):
        return True
    if operation.target == "<unseen>":
        given = (operation.receiver, *operation.arguments, *operation.keywords.values())
        return any(value.key == model.key or value.kind is ValueKind.INSTANCE for value in given)
    if method:
        return operation.target.startswith("<instance>.") and _TRAINS.search(method) is not None
    package = operation.target.partition(".")[0]
    return package != "torch" and any(value.key == model.key for value in operation.arguments)


def _lines(loop: Operation) -> list[str]:
    node = loop.place.node
    return loop.place.module.source.lines[node.lineno - 1 : node.end_lineno]


LEFT_IN_EVALUATION = Rule(
    code="MP207",
    name="left-in-evaluation",
    severity=FindingSeverity.ERROR,
    summary="`model.eval()` in the epoch loop is not followed by `train()` before training.",
    explanation="After the first evaluation the model trains on without dropout, and batch "
    "normalization uses and keeps its running statistics instead of the batch's. The loss gets "
    "smaller at that moment, if anything. Models that the check knows to have no such layers are "
    "not reported, nor is `eval()` before the training of each pass, which may freeze them on "
    "purpose; every so many steps it is an evaluation.",
    bad="""\
import torch


def fit(model, loader, validation, optimizer, epochs):
    model.train()
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(sum(model(x).mean() for x in validation))
""",
    good="""\
import torch


def fit(model, loader, validation, optimizer, epochs):
    for epoch in range(epochs):
        model.train()
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(sum(model(x).mean() for x in validation))
""",
    remedy="Call `model.train()` at the start of every epoch, or after the evaluation.",
    alert="MpAgentLeftInEvaluation",
    find=_find_left_in_evaluation,
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
