"""Modules whose outputs are measured, and statistics of what they return."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from math import isfinite, nan
from sys import float_info
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mp_agent.probe.optimizers.parameter_names import strip_wrappers
from mp_agent.probe.statistics.pieces import bounded, folded, pieces, stored_values
from mp_agent.records.columns import ACTIVATIONS


def tensors_in(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output, or in the inputs, of a module; sharded ones as they are."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        parts: Sequence[object] = ()
        if isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, list | tuple):
            parts = value
        for part in parts:
            yield from tensors_in(part, depth - 1)


def local_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors; of sharded ones the local part."""
    for tensor in tensors:
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


Run = Callable[..., None]
"""`Shield.run`: a kind of failure, a function, and its arguments."""


class ForwardHook:
    """A forward hook; a copy of the module, pickled or deep, has one that does nothing instead."""

    __slots__ = ("_add", "_place", "_run", "_what")

    def __init__(
        self, run: Run, what: str, add: Callable[[int, object, object], None], place: int
    ) -> None:
        """add: gets the place, the positional inputs and the output. what: a kind of failure."""
        self._run, self._what, self._add, self._place = run, what, add, place

    def __call__(self, module: object, inputs: object, output: object) -> None:
        """Report a call, unless it is traced."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return
        self._run(self._what, self._add, self._place, inputs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library alone: what is saved must load where mp_agent is not installed.
        return getattr, (nullcontext(), "__exit__")


K = TypeVar("K")


class GradientHook(Generic[K]):
    """Reports the gradient of a tensor under a key, unless compiled autograd traces it."""

    __slots__ = ("_add", "_key", "_run", "_what")
    __torch_unserializable__ = True
    """Torch leaves it out, without a warning, where the tensor is saved."""

    def __init__(self, run: Run, what: str, add: Callable[[K, object], None], key: K) -> None:
        """add: gets the key and the gradient. what: a kind of failure."""
        self._run, self._what, self._add, self._key = run, what, add, key

    def __call__(self, gradient: object) -> None:
        """Report the gradient."""
        if not torch.compiler.is_compiling():
            self._run(self._what, self._add, self._key, gradient)


COMPILED = "activations of compiled modules"
SCRIPTED = "activations of scripted modules"

_WHOLE = (nn.MultiheadAttention,)
"""Modules that use the weights of their children without calling them."""


class OutputModules:
    """The leaf modules of a tree, under unique names without wrapper prefixes. Keeps none alive.

    names: [M], in the order of the tree. not_covered: what the tree contains besides.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        found = _Leaves()
        found.visit(root, "")
        self.names = tuple(_unique(found.names))
        self.not_covered = tuple(sorted(found.not_covered))
        self._modules = tuple(map(weakref.ref, found.modules))

    def is_of(self, root: nn.Module) -> bool:
        """Return whether they were found in the tree of `root`."""
        return self._root() is root

    @property
    def alive(self) -> Iterator[tuple[int, nn.Module]]:
        """The modules that still exist, with their places among the names."""
        for place, reference in enumerate(self._modules):
            if (module := reference()) is not None:
                yield place, module


class _Leaves:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.modules: list[nn.Module] = []
        self.not_covered: set[str] = set()
        self._seen: set[int] = set()

    def visit(self, module: nn.Module, name: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if is_compiled(module):
            self.not_covered.add(COMPILED)
        elif isinstance(module, torch.jit.ScriptModule):
            self.not_covered.add(SCRIPTED)
        else:
            children = [(key, each) for key, each in module._modules.items() if each is not None]
            if not children or isinstance(module, _WHOLE):
                self.names.append(strip_wrappers(name) or type(module).__name__)
                self.modules.append(module)
                return
            for key, child in children:
                self.visit(child, f"{name}.{key}" if name else key)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` runs a module, so that hooks within it never run."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return type(module).__module__ == "torch._dynamo.eval_frame"


def _unique(names: list[str]) -> Iterator[str]:
    taken: set[str] = set()
    for name in names:
        while name in taken:
            name = f"{name}'"
        taken.add(name)
        yield name


_HOST_CHUNK_ELEMENTS = 64 * 1024
"""As float64 they fit the processor's cache."""
_DEVICE_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Bounds the scratch on a device: each chunk is widened to float64."""


def measurable(tensor: torch.Tensor) -> bool:
    """Return whether there is anything to measure in a tensor."""
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return numbers and tensor.layout is torch.strided and tensor.numel() > 0


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim bool, on the device of `values`: whether no element is NaN or Inf.

    values: as for `output_row`. On a device nothing waits.
    """
    extremes = [
        bound
        for piece in pieces(stored_values(values), _DEVICE_CHUNK_ELEMENTS)
        for bound in torch.aminmax(piece)  # in one pass, and NaN if there is any
    ]
    return torch.stack(extremes).isfinite().all()


def output_row(output: torch.Tensor, call: int, near_overflow: float) -> torch.Tensor:
    """Return float64 [C], the columns of `ACTIVATIONS`, on the device of `output`.

    The last two, which are of the backward pass, are absent.

    output: not empty, of any shape, strided, floating point or complex (real and imaginary parts
    count separately). call: which call of a module in this step returned it. near_overflow: the
    magnitude above which elements of FP16 outputs are counted. Sums are over float64.
    """
    values = stored_values(output)
    limit = near_overflow if output.dtype is torch.float16 else float("inf")
    if values.device.type == "cpu":
        tally = _Tally(limit)
        for piece in pieces(values, _HOST_CHUNK_ELEMENTS):
            tally.add(piece)
        return torch.tensor(tally.row(call), dtype=torch.float64, device="cpu")
    rows = [_row_on_device(piece, call, limit) for piece in pieces(values, _DEVICE_CHUNK_ELEMENTS)]
    return folded(ACTIVATIONS, rows)


class _Tally:
    """Running statistics of a tensor on the host."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._elements = 0
        self._sum = 0.0
        self._sum_squares = 0.0
        self._abs_max = nan
        self._zeros = 0
        self._nans = 0
        self._infinities = 0
        self._near_overflow = 0

    def add(self, piece: torch.Tensor) -> None:
        """Add a piece; where its sum is not finite, so may be elements of it."""
        self._elements += piece.numel()
        values = piece.double().reshape(-1)
        self._zeros += piece.numel() - int(values.count_nonzero())
        total = float(values.sum())
        if not isfinite(total):
            nans = int(values.isnan().sum())
            finite = values[values.isfinite()]
            self._nans += nans
            self._infinities += values.numel() - finite.numel() - nans
            values, total = finite, float(finite.sum())
        if values.numel():
            self._add_finite(values, total)

    def _add_finite(self, values: torch.Tensor, total: float) -> None:
        low, high = (float(bound) for bound in torch.aminmax(values))
        largest = max(-low, high)
        self._abs_max = largest if self._abs_max != self._abs_max else max(self._abs_max, largest)
        self._sum = bounded(self._sum + total)
        self._sum_squares = bounded(self._sum_squares + float(values.dot(values)))
        if largest > self._limit:
            self._near_overflow += int((values.abs() > self._limit).sum())

    def row(self, call: int) -> list[float]:
        """Return the columns of `ACTIVATIONS`."""
        return [
            float(self._elements),
            self._sum,
            self._sum_squares,
            self._abs_max,
            float(self._zeros),
            float(self._nans),
            float(self._infinities),
            float(self._near_overflow),
            float(call) if self._nans or self._infinities else nan,
            nan,  # known after backward
            nan,
        ]


def _row_on_device(piece: torch.Tensor, call: int, limit: float) -> torch.Tensor:
    values = piece.double().reshape(-1)
    finite = values.isfinite()
    nans, finites = values.isnan().sum(), finite.sum()
    zeros = (values == 0.0).sum()
    values = values.masked_fill(~finite, 0.0)
    magnitudes = values.abs()
    elements = torch.full_like(finites, values.numel())
    nonfinite = finites != elements
    bound = float_info.max
    return torch.stack(
        [
            elements.double(),
            values.sum().clamp(-bound, bound),
            (values * values).sum().clamp(max=bound),
            magnitudes.amax().masked_fill(finites == 0, nan),
            zeros.double(),
            nans.double(),
            (elements - finites - nans).double(),
            (magnitudes > limit).sum().double(),
            torch.full_like(values[0], float(call)).masked_fill(~nonfinite, nan),
            torch.full_like(values[0], nan),  # known after backward
            torch.full_like(values[0], nan),
        ]
    )
