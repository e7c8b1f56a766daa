"""Rules on what runs under autocast, and what should."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import Edit, FindingSeverity, Problem, Rule, Span
from mp_agent.lint.interpret.values import Operation, Trace
from mp_agent.lint.rules.events import backwards, loss_of, text_of

_LOSS = re.compile(r"^torch\.nn\.functional\.(\w*_loss|\w*cross_entropy\w*|kl_div)$")


def _find_loss_outside_autocast(trace: Trace) -> Iterator[Problem]:
    passes = list(backwards(trace))
    for operation in trace.operations:
        if (
            _is_loss(operation)
            and operation.autocast is None
            and not operation.no_grad
            and operation.arguments
            and operation.arguments[0].from_autocast
            and "softmax" not in operation.arguments[0].activation  # autocast made that in FP32
            and any(operation.compatible(backward) for backward in passes)
        ):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` runs outside autocast on an output that autocast made: "
                "it is computed in the output's 16 bits",
            )

    trained = {loss_of(backward).key for backward in passes}
    trained |= {scale.arguments[0].key for scale in trace.of("<scaler>.scale") if scale.arguments}
    for operation in trace.of("<tensor>.mean", "<tensor>.sum", "torch.mean", "torch.sum"):
        if (
            operation.result.key in trained
            and operation.autocast is None
            and _is_written_out(operation)
        ):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` is a loss outside autocast of an output that autocast "
                "made: it is computed in 16 bits where the target has them too",
            )


def _is_loss(operation: Operation) -> bool:
    return operation.target == "<loss>()" or _LOSS.match(operation.target) is not None


def _is_written_out(operation: Operation) -> bool:
    """Return whether what is averaged is a square or a difference of an output of autocast."""
    on_tensor = operation.target.startswith("<")
    operand = operation.receiver if on_tensor else operation.argument(0, "input")
    if operand is None or not operand.from_autocast or operation.keywords.get("dtype"):
        return False
    differs = any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
        for node in ast.walk(operation.place.node)
    )
    return differs or (operand.form is not None and operand.form[0].startswith("square"))


LOSS_OUTSIDE_AUTOCAST = Rule(
    code="MP103",
    name="loss-outside-autocast",
    severity=FindingSeverity.WARNING,
    summary="The loss is computed after autocast has ended.",
    explanation="Autocast runs losses in FP32. Outside of it, the loss takes the dtype of the "
    "model's output, 16 bits as a rule: its sum can overflow, and small differences vanish. "
    "Losses of an output that was made FP32 (`output.float()`) are not reported.",
    bad="""\
import torch


def step(model, criterion, x, y, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(x)
    loss = criterion(output, y)
    loss.backward()
    optimizer.step()
""",
    good="""\
import torch


def step(model, criterion, x, y, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = model(x)
        loss = criterion(output, y)
    loss.backward()
    optimizer.step()
""",
    remedy="Move the loss into the with-block, or pass `output.float()`.",
    alert="MpAgentLossNonFinite",
    find=_find_loss_outside_autocast,
)


_FUNCTION = "torch.nn.functional.binary_cross_entropy"
_MODULE = re.compile(r"^torch\.nn\.(\w+\.)*BCELoss$")


def _find_binary_cross_entropy(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        if operation.autocast is not None and _is_unsafe(operation):
            device = operation.autocast.name
            if "cpu" not in device:
                yield Problem(
                    operation.place,
                    "binary cross entropy of probabilities raises RuntimeError under autocast on "
                    "CUDA: use the form with logits",
                )


def _is_unsafe(operation: Operation) -> bool:
    if operation.target == "<loss>()":
        return _MODULE.match(operation.receiver.name) is not None
    return operation.target == _FUNCTION


BINARY_CROSS_ENTROPY = Rule(
    code="MP104",
    name="binary-cross-entropy-under-autocast",
    severity=FindingSeverity.ERROR,
    summary="Binary cross entropy of probabilities is computed under autocast.",
    explanation="The backward pass of `binary_cross_entropy` and `BCELoss` has gradients that "
    "FP16 cannot represent, so PyTorch refuses both under autocast on CUDA. The form with logits "
    "combines the sigmoid and the loss, and is safe.",
    bad="""\
import torch
import torch.nn.functional as F


def compute_loss(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return F.binary_cross_entropy(torch.sigmoid(model(x)), y)
""",
    good="""\
import torch
import torch.nn.functional as F


def compute_loss(model, x, y):
    with torch.autocast("cuda", dtype=torch.float16):
        return F.binary_cross_entropy_with_logits(model(x), y)
""",
    remedy="Use `binary_cross_entropy_with_logits` or `BCEWithLogitsLoss` on the output before "
    "the sigmoid; or leave autocast (`torch.autocast(..., enabled=False)`) and pass FP32.",
    alert="MpAgentRunFailed",
    find=_find_binary_cross_entropy,
)


def _find_backward_under_autocast(trace: Trace) -> Iterator[Problem]:
    for operation in backwards(trace):
        if operation.autocast is not None:
            yield Problem(
                operation.place,
                "backward runs under autocast: its operations take the dtypes of their forward "
                "counterparts by themselves, and others are cast a second time",
            )


BACKWARD_UNDER_AUTOCAST = Rule(
    code="MP105",
    name="backward-under-autocast",
    severity=FindingSeverity.WARNING,
    summary="`backward()` is called under autocast.",
    explanation="Backward operations run in the dtype that autocast chose for their forward "
    "operation; PyTorch advises against backward within the block. What backward computes again "
    "there, such as custom functions, hooks and FP32 gradients, is cast to 16 bits, where "
    "small gradients underflow.",
    bad="""\
import torch


def step(model, x, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
        loss.backward()
    optimizer.step()
""",
    good="""\
import torch


def step(model, x, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
""",
    remedy="End the with-block before `backward()`.",
    alert="MpAgentGradientUnderflow",
    find=_find_backward_under_autocast,
)


_OLD = re.compile(
    r"^torch\.(cuda|cpu)\.amp(?:\.\w+)?\.(autocast|GradScaler|custom_fwd|custom_bwd)$"
)
_VERSION = re.compile(r"version|hasattr|is_torch|except at|_available|TORCH_", re.IGNORECASE)


def _find_deprecated_amp(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        match = _OLD.match(operation.target)
        if match is None or any(_VERSION.search(condition) for condition, _ in operation.path):
            continue
        device, name = match.groups()
        replacement = (
            f'torch.amp.{name}("{device}", …)'
            if name in ("autocast", "GradScaler")
            else f'torch.amp.{name}(device_type="{device}")'
        )
        yield Problem(
            operation.place,
            f"`torch.{device}.amp.{name}` is deprecated: use `{replacement}`",
            _edits(operation, device, name),
        )


def _edits(operation: Operation, device: str, name: str) -> tuple[Edit, ...]:
    """Replace a full dotted name; names that were imported need their import changed as well."""
    node, source = operation.place.node, operation.place.module.source
    if not isinstance(node, ast.Call) or name.startswith("custom"):
        return ()
    if ast.unparse(node.func) != f"torch.{device}.amp.{name}":
        return ()
    if name == "autocast" and len(node.args) > 1:
        return ()  # `enabled, dtype, cache_enabled` have another order
    function = source.span(node.func)
    opened = _after_bracket(source.excerpt(source.span(node)), source.excerpt(function))
    if opened is None or (name == "GradScaler" and device != "cuda"):
        return ()
    start = Span(
        function.end_line, function.end_column, function.end_line, function.end_column + opened
    )
    keyword = "enabled=" if name == "autocast" and node.args else ""
    if name == "GradScaler" and node.args:
        keyword = ""
    separator = ", " if node.args or node.keywords else ""
    return (
        Edit(function, f"torch.amp.{name}"),
        Edit(start, f'("{device}"{separator}{keyword}'),
    )


def _after_bracket(call: str, function: str) -> int | None:
    """Return the length up to the first argument, if it follows on the same line."""
    rest = call[len(function) :]
    return 1 if rest.startswith("(") and not rest[1:].startswith(("\n", "\r", "*")) else None


DEPRECATED_AMP = Rule(
    code="MP112",
    name="deprecated-amp",
    severity=FindingSeverity.NOTE,
    summary="`torch.cuda.amp` or `torch.cpu.amp` is used.",
    explanation="PyTorch 2.4 deprecated both modules in favour of `torch.amp`, which takes the "
    "kind of device as its first argument; each use warns. Uses that a check of PyTorch's version "
    "guards are not reported.",
    bad="""\
import torch

scaler = torch.cuda.amp.GradScaler()


def forward(model, x):
    with torch.cuda.amp.autocast():
        return model(x)
""",
    good="""\
import torch

scaler = torch.amp.GradScaler("cuda")


def forward(model, x):
    with torch.amp.autocast("cuda"):
        return model(x)
""",
    remedy="Use `torch.amp` with the device type. `--fix` rewrites calls by their full name.",
    alert="MpAgentRunFailed",
    find=_find_deprecated_amp,
    fixable=True,
)
