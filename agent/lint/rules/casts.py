"""Rules on explicit casts to 16 bits."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.methods import cast_dtypes
from mp_agent.lint.interpret.values import SIXTEEN_BITS, Operation, Trace, ValueKind
from mp_agent.lint.rules.events import backwards, parameters_of, text_of

_MASTERS = re.compile(r"master_?(param|weight|cop|model)|(fp|float)_?32_?(param|weight|cop|master)")
_STEPS = re.compile(r"optimizer|\boptim\b|\.step\(|\bengine\b|accelerat|[Tt]rainer")
_FREEZING = ("<model>.eval", "<model>.requires_grad_")


def _find_cast_model(trace: Trace) -> Iterator[Problem]:
    trained = _trained(trace)
    if trained and not any(_STEPS.search(module.source.text) for module in trace.modules):
        return  # gradients for their own sake: a test of a kernel, a benchmark
    for operation in trace.operations:
        role, _, method = operation.target.partition(".")
        if role not in ("<model>", "<tensor>"):
            continue
        model = operation.receiver if role == "<model>" else operation.result
        if model.key not in trained:
            continue
        dtypes = cast_dtypes(operation.receiver, method, operation.arguments, operation.keywords)
        if dtypes and dtypes <= SIXTEEN_BITS and not _has_masters(trace):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` makes the weights that are trained "
                f"{'/'.join(sorted(dtypes))}: updates smaller than their spacing are lost",
            )


def _has_masters(trace: Trace) -> bool:
    """Return whether the optimizer seems to step FP32 copies of the weights."""
    return any(True for _ in trace.of("<grad>.set")) or any(
        _MASTERS.search(module.source.text) for module in trace.modules
    )


def _trained(trace: Trace) -> set[str]:
    """Return the keys of the models that an optimizer or a backward pass of the trace trains."""
    optimized = {
        parameters.name
        for operation in trace.operations
        if operation.result.kind is ValueKind.OPTIMIZER
        for parameters in parameters_of(operation.argument(0, "params"))
    }
    frozen = {operation.receiver.key for operation in trace.of(*_FREEZING)}
    if not any(True for _ in backwards(trace)):
        return optimized
    called = {operation.receiver.key for operation in trace.of("<model>()") if _learns(operation)}
    return optimized | (called - frozen)


def _learns(operation: Operation) -> bool:
    return not operation.no_grad


CAST_MODEL = Rule(
    code="MP101",
    name="cast-model",
    severity=FindingSeverity.WARNING,
    summary="A model that is trained is cast to 16 bits.",
    explanation="`.half()`, `.bfloat16()` and `.to(torch.float16)` leave no FP32 copy of the "
    "weights. An update below 2⁻¹¹ (FP16) or 2⁻⁸ (BF16) of its weight is rounded away, operations "
    "that autocast would run in FP32 run in 16 bits, and GradScaler refuses FP16 gradients. Models "
    "that only infer, or that are frozen, are not reported, nor is code without an optimizer.",
    bad="""\
import torch

model = torch.nn.Linear(64, 64).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for batch in torch.randn(8, 16, 64):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
""",
    good="""\
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for batch in torch.randn(8, 16, 64):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
""",
    remedy="Remove the cast and run forward and loss under `torch.autocast`; to save memory, keep "
    "FP32 master weights (FSDP's MixedPrecision, DeepSpeed).",
    alert="MpAgentGradientUnderflow",
    find=_find_cast_model,
)


def _find_cast_input(trace: Trace) -> Iterator[Problem]:
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
        optimizer.zero_grad()
        loss = model(batch.half()).mean()
        loss.backward()
        optimizer.step()
""",
    good="""\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).mean()
        loss.backward()
        optimizer.step()
""",
    remedy="Remove the cast and call the model under `torch.autocast`.",
    alert="MpAgentLossNonFinite",
    find=_find_cast_input,
)
