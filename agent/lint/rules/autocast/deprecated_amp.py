"""MP112: torch.cuda.amp and torch.cpu.amp."""

import ast
import re
from collections.abc import Iterator

from mp_agent.lint.finding import Edit, FindingSeverity, Span
from mp_agent.lint.interpret.trace import Operation, Trace
from mp_agent.lint.rule import Problem, Rule

_OLD = re.compile(
    r"^torch\.(cuda|cpu)\.amp(?:\.\w+)?\.(autocast|GradScaler|custom_fwd|custom_bwd)$"
)
_VERSION = re.compile(r"version|hasattr|is_torch|except at|_available|TORCH_", re.IGNORECASE)


def _find(trace: Trace) -> Iterator[Problem]:
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
    find=_find,
    fixable=True,
)
