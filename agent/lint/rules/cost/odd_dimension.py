"""MP119: layers whose dimensions are no multiple of 8."""

import re
from collections.abc import Iterator

from mp_agent.lint.finding import FindingSeverity
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.interpret.values import ValueKind
from mp_agent.lint.rule import Problem, Rule

_LAYER = re.compile(
    r"^torch\.nn\.(?:modules\.(?:\w+\.)?)?(Linear|Bilinear|Conv[123]d|ConvTranspose[123]d|LSTM|GRU)$"
)
_MULTIPLE = 8
_SMALLEST = 64
"""Below it the padding hardly costs time: classes, colours, coordinates."""


def _find(trace: Trace) -> Iterator[Problem]:
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
    find=_find,
    needs_sixteen_bits=True,
)
