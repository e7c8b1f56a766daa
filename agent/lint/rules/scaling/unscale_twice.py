"""MP107: unscale_ is called twice between two updates."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.rule import Problem, Rule


def _find(trace: Trace) -> Iterator[Problem]:
    updates = list(trace.of("<scaler>.update"))
    calls = list(trace.of("<scaler>.unscale_"))
    for position, call in enumerate(calls):
        if any(_again(earlier, call, updates) for earlier in calls[:position]):
            yield Problem(call.place, "unscale_ was already called for this optimizer")
        elif _repeats(call, updates):
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


def _repeats(call: Operation, updates: list[Operation]) -> bool:
    """Return whether a loop calls unscale_ again before the scaler is updated."""
    if not call.loops or not updates:
        return False
    optimizer = _optimizer(call)
    if optimizer.startswith("each:"):
        return False  # one call per optimizer
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
""",
    remedy="Call it once per optimizer and step, right before what needs unscaled gradients.",
    alert="MpAgentRunFailed",
    find=_find,
)
