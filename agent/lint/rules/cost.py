"""Rules on what makes training slow."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import Edit, FindingSeverity, Problem, Rule
from mp_agent.lint.interpret.values import Operation, Trace, ValueKind
from mp_agent.lint.rules.events import backwards, loop_of, text_of

_SYNCS = ("<tensor>.item", "<tensor>.cpu", "<tensor>.tolist", "<host>float", "<host>int")
_TRAINING = frozenset({"optim", "step", "engine", "accelerat"})
"""Parts of names; a module that trains has one of them."""
_ON_DEVICE = frozenset({"loss", "losses", "acc", "grad_norm", "norm"})


def _find_sync_each_step(trace: Trace) -> Iterator[Problem]:
    if not trace.mentions(_TRAINING):
        return  # gradients for their own sake, such as those of a saliency map
    passes = [operation for operation in backwards(trace) if operation.loops]
    trained = {operation.receiver.key for operation in passes}
    for operation in trace.of(*_SYNCS):
        if not operation.loops or not _is_on_device(operation, trained):
            continue
        if any(_at_every_step(trace, operation, backward) for backward in passes):
            yield Problem(
                operation.place,
                f"`{text_of(operation)}` waits for the device at every step of the loop",
            )


def _is_on_device(operation: Operation, trained: set[str]) -> bool:
    value = operation.receiver
    if value.kind is ValueKind.TENSOR or value.key in trained:
        return value.kind is not ValueKind.ARRAY
    last = value.key.rpartition(":")[2].rpartition(".")[2]
    return operation.target == "<tensor>.item" and last in _ON_DEVICE


def _at_every_step(trace: Trace, operation: Operation, backward: Operation) -> bool:
    if operation.target == "<tensor>.cpu" and operation.index < backward.index:
        return False  # a part of the model
    outer, inner = operation.loops[: len(backward.loops)], operation.loops[len(backward.loops) :]
    if outer != backward.loops or not all(_is_over_parameters(trace, loop) for loop in inner):
        return False
    own = {(text, arm) for text, arm in operation.path if not text.endswith(".grad")}
    return own <= set(backward.path)


def _is_over_parameters(trace: Trace, loop: int) -> bool:
    begin = loop_of(trace, loop)
    return begin is not None and begin.receiver.kind is ValueKind.PARAMETERS


SYNC_EACH_STEP = Rule(
    code="MP117",
    name="sync-each-step",
    severity=FindingSeverity.NOTE,
    summary="`.item()`, `.cpu()` or `float(tensor)` runs at every training step.",
    explanation="Each call waits until the device has finished what was queued, so the host "
    "cannot prepare the next step meanwhile. Calls under a condition (every hundredth step), "
    "after the loop, or in evaluation are not reported.",
    bad="""\
def train(model, loader, optimizer):
    total = 0.0
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total
""",
    good="""\
def train(model, loader, optimizer):
    total = 0.0
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total
""",
    remedy="Add up `loss.detach()` on the device, and read it every so many steps.",
    alert="MpAgentRankStraggler",
    find=_find_sync_each_step,
)


_SET = re.compile(r"^torch\.autograd\.(anomaly_mode\.)?set_detect_anomaly$")
_CONTEXT = re.compile(r"^torch\.autograd\.(anomaly_mode\.)?detect_anomaly$")
_TRAINER = re.compile(r"^(lightning|pytorch_lightning)(\.\w+)*\.Trainer$")


def _find_detect_anomaly(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        if _is_on(operation) and not operation.path:
            yield Problem(
                operation.place,
                "anomaly detection is always on: it ends the run at the first Inf or NaN in a "
                "backward pass, which loss scaling expects now and then, and slows every step",
                _edits(operation),
            )


def _is_on(operation: Operation) -> bool:
    check_nan = operation.keywords.get("check_nan")
    if check_nan is not None and check_nan.constant is False:
        return False  # records stack traces, ends nothing
    if _CONTEXT.match(operation.target):
        return True
    if _SET.match(operation.target):
        mode = operation.argument(0, "mode")
    elif _TRAINER.match(operation.target):
        mode = operation.keywords.get("detect_anomaly")
    else:
        return False
    return mode is not None and mode.kind is ValueKind.CONSTANT and mode.constant is True


def _edits(operation: Operation) -> tuple[Edit, ...]:
    """Turn a literal True into False."""
    node, source = operation.place.node, operation.place.module.source
    if not isinstance(node, ast.Call) or _CONTEXT.match(operation.target):
        return ()
    wanted = ("mode", "detect_anomaly")
    given = [keyword.value for keyword in node.keywords if keyword.arg in wanted]
    given += node.args[:1] if _SET.match(operation.target) else []
    literal = [one for one in given if isinstance(one, ast.Constant) and one.value is True]
    return tuple(Edit(source.span(one), "False") for one in literal)


DETECT_ANOMALY = Rule(
    code="MP118",
    name="detect-anomaly",
    severity=FindingSeverity.WARNING,
    summary="Anomaly detection of autograd is left on.",
    explanation="`detect_anomaly` records a stack trace per operation and checks every gradient, "
    "and raises RuntimeError at the first NaN of a backward pass. Under dynamic loss scaling an "
    "overflow now and then is normal: the scaler skips that step. Anomaly detection ends the run "
    "instead. Uses under a condition are not reported.",
    bad="""\
import torch

torch.autograd.set_detect_anomaly(True)
""",
    good="""\
import os

import torch

torch.autograd.set_detect_anomaly(os.environ.get("DEBUG") == "1")
""",
    remedy="Remove it, or switch it by an argument. `--fix` turns a literal True into False.",
    alert="MpAgentRunFailed",
    find=_find_detect_anomaly,
    fixable=True,
)


_LAYER = re.compile(
    r"^torch\.nn\.(?:modules\.(?:\w+\.)?)?(Linear|Bilinear|Conv[123]d|ConvTranspose[123]d|LSTM|GRU)$"
)
_MULTIPLE = 8
_SMALLEST = 64
"""Below it the padding hardly costs time: classes, colours, coordinates."""


def _find_odd_dimension(trace: Trace) -> Iterator[Problem]:
    for operation in trace.operations:
        match = _LAYER.match(operation.target)
        if match is None:
            continue
        odd = [size for size in _sizes(operation) if size >= _SMALLEST and size % _MULTIPLE]
        if odd:
            sizes = " and ".join(str(size) for size in dict.fromkeys(odd))
            yield Problem(
                operation.place,
                f"{match.group(1)} with a dimension of {sizes}, no multiple of 8: tensor cores "
                "need padding or are not used",
            )


def _sizes(operation: Operation) -> Iterator[int]:
    names = (
        ("in_features", "in_channels", "input_size"),
        (
            "out_features",
            "out_channels",
            "hidden_size",
        ),
    )
    for position, keywords in enumerate(names):
        value = operation.argument(position, *keywords)
        number = value.constant if value is not None and value.kind is ValueKind.CONSTANT else None
        if isinstance(number, int) and not isinstance(number, bool):
            yield number


ODD_DIMENSION = Rule(
    code="MP119",
    name="odd-dimension",
    severity=FindingSeverity.NOTE,
    summary="A layer has a large dimension that is no multiple of 8.",
    explanation="Tensor cores multiply 16-bit matrices in tiles of 8 elements and more. Other "
    "dimensions are padded at every call, or run without tensor cores. Dimensions below 64 and "
    "code without 16 bits are not reported.",
    bad="""\
import torch

head = torch.nn.Linear(768, 50257)


def forward(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return head(x)
""",
    good="""\
import torch

head = torch.nn.Linear(768, 50304)


def forward(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return head(x)
""",
    remedy="Round the dimension up to a multiple of 8, better of 64; pad the vocabulary.",
    alert="",
    no_alert="A layer that is slower on every rank stays below every threshold; compare "
    "`mp_agent_step_duration_seconds` before and after.",
    find=_find_odd_dimension,
    needs_sixteen_bits=True,
)
