"""MP111: a GradScaler with BF16 autocast."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Trace
from mp_agent.lint.interpret.values import BF16
from mp_agent.lint.rule import Problem, Rule


def _find(trace: Trace) -> Iterator[Problem]:
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
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
""",
    remedy="Remove the scaler, or make it with `enabled=dtype == torch.float16`.",
    alert="MpAgentOverflowRatioHigh",
    find=_find,
)
