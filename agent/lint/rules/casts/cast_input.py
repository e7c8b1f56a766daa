"""MP102: the input of a model that is trained is cast to 16 bits."""

from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Trace
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules.facts import backwards


def _find(trace: Trace) -> Iterator[Problem]:
    passes = list(backwards(trace))
    for call in trace.of("<model>()"):
        if call.no_grad or call.receiver.is_sixteen_bits:
            continue
        if not any(call.compatible(backward) for backward in passes):
            continue
        for value in (*call.arguments, *call.keywords.values()):
            if value.cast is not None:
                dtypes = "/".join(sorted(value.dtypes))
                yield Problem(
                    value.cast,
                    f"an input of the model is cast to {dtypes} by hand: autocast casts what each "
                    "operation needs, and keeps the rest",
                )


CAST_INPUT = Rule(
    code="MP102",
    name="cast-input",
    severity=FindingSeverity.WARNING,
    summary="The input of a model that is trained is cast to 16 bits.",
    explanation="The cast rounds the data before the first layer sees them, and values beyond "
    "65504 become Inf in FP16. Without autocast, the model's FP32 weights do not fit such an "
    "input; with it, the cast is superfluous.",
    bad="""\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        loss = model(batch.half()).mean()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).mean()
        loss.backward()
        optimizer.step()
""",
    remedy="Remove the cast and call the model under `torch.autocast`.",
    alert="MpAgentLossNonFinite",
    find=_find,
)
