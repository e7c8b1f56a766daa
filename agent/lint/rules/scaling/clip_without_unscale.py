"""MP106: gradients are clipped while they are multiplied by the loss scale."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import last_backward, loss_of

_CLIP = re.compile(r"^torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm_?|value_)$")
_CLIP_BARE = re.compile(r"^torch\.nn\.utils\.(clip_grad\.)?clip_grad_norm$")


def _find(trace: Trace) -> Iterator[Problem]:
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
        unscale.index < update.index < clip.index for update in trace.of("<scaler>.update")
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
    find=_find,
    needs_callers=True,
)
