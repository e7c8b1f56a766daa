"""MP110: training under FP16 autocast without loss scaling."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Trace
from mp_agent.lint.interpret.values import FP16
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import backwards, loss_of

_SCALES_BY_OTHER_MEANS = frozenset({"scal", "accelerat", "deepspeed", "fabric", "apex", "engine"})


def _find(trace: Trace) -> Iterator[Problem]:
    passes = [operation for operation in backwards(trace) if not loss_of(operation).scaled]
    if not passes or trace.mentions(_SCALES_BY_OTHER_MEANS):
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
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
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
    remedy="Use `torch.amp.GradScaler`, or `dtype=torch.bfloat16` where the hardware has it.",
    alert="MpAgentGradientUnderflow",
    find=_find,
    needs_callers=True,
)
