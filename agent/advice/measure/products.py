"""Counts the matrix products and convolutions of a forward pass, by the module that runs them."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.report.model import MatrixProduct
from mp_agent.advice.training.planned import PlannedTraining
from mp_agent.advice.training.workload import Workload
from mp_agent.compare.execution.precision import LOSS
from mp_agent.compare.execution.session import uncompiled
from mp_agent.compare.execution.task import in_plain_thread

Shape = tuple[tuple[int, ...], int]
"""Dimensions that matter to tensor cores, and operations."""
_GATES: Mapping[str, int] = {"LSTM": 4, "GRU": 3}


def measure_products(workload: Workload) -> tuple[MatrixProduct, ...]:
    """Return the products of one forward pass of a copy on the first batch, in FP32.

    What a module inside of another one runs counts for the inner one. Those of RNNs, which run in
    one fused operation on most devices, are computed from their sizes.
    """
    plan = PrecisionPlan(precision="fp32", device="cpu")
    training = PlannedTraining(workload, plan, learning_rate=1.0)
    counter = _Counter(training.model)

    def body() -> None:
        batch = training.inputs(workload.batch(0))
        with counter:
            training.forward(batch)

    with uncompiled():
        in_plain_thread(workload.device, body)
    return tuple(counter.products)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd; hooks say within which module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[MatrixProduct] = []
        self._stack: list[tuple[str, nn.Module | None]] = [(LOSS, None)]
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entering(name))
            module.register_forward_hook(self._left, always_call=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        shape_of = _SHAPES.get(name) or (_attention if "scaled_dot_product" in name else None)
        if shape_of is not None and not isinstance(self._stack[-1][1], nn.RNNBase):
            self._add(name, *shape_of(args, result))
        return result

    def _add(self, operation: str, dimensions: tuple[int, ...], flops: int) -> None:
        if flops:
            module = self._stack[-1][0] or type(self._stack[-1][1]).__name__
            self.products.append(
                MatrixProduct(
                    module=module, operation=operation, dimensions=dimensions, flops=flops
                )
            )

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append((name, module))
            if isinstance(module, nn.RNNBase) and args:
                for dimensions, flops in _recurrent(module, args[0]):
                    self._add(module.mode.lower(), dimensions, flops)

        return enter

    def _left(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._stack.pop()


def _mm(args: tuple[Any, ...], result: Any) -> Shape:
    (m, k), n = args[0].shape, args[1].shape[1]
    return (m, n, k), 2 * m * n * k


def _addmm(args: tuple[Any, ...], result: Any) -> Shape:
    return _mm(args[1:], result)


def _bmm(args: tuple[Any, ...], result: Any) -> Shape:
    (b, m, k), n = args[0].shape, args[1].shape[2]
    return (m, n, k), 2 * b * m * n * k


def _baddbmm(args: tuple[Any, ...], result: Any) -> Shape:
    return _bmm(args[1:], result)


def _convolution(args: tuple[Any, ...], result: Tensor) -> Shape:
    inputs, weight, transposed, groups = args[0], args[1], args[6], args[8]
    # Weights are [out, in / groups, …], and [in, out / groups, …] where transposed.
    first, second = weight.shape[0] // groups, weight.shape[1]
    positions = inputs[0, :1].numel() if transposed else result[0, :1].numel()
    flops = 2 * inputs.shape[0] * positions * groups * first * second * prod(weight.shape[2:])
    return (second, first), flops


def _attention(args: tuple[Any, ...], result: Any) -> Shape:
    query, key, value = args[:3]
    (rows, size), columns, value_size = query.shape[-2:], key.shape[-2], value.shape[-1]
    flops = 2 * prod(query.shape[:-2]) * rows * columns * (size + value_size)
    return (rows, columns, size, value_size), flops


_SHAPES: Mapping[str, Callable[[tuple[Any, ...], Any], Shape]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "convolution": _convolution,
}


def _recurrent(module: nn.RNNBase, inputs: Tensor | PackedSequence) -> list[Shape]:
    """Return the products with inputs and with the state, per layer; both directions together."""
    if isinstance(inputs, PackedSequence):
        rows, batch = inputs.data.shape[0], int(inputs.batch_sizes[0])
    else:
        rows = inputs.numel() // module.input_size
        batch = inputs.shape[0 if module.batch_first else 1] if inputs.dim() == 3 else 1
    directions = 2 if module.bidirectional else 1
    gates = _GATES.get(module.mode, 1) * module.hidden_size
    state = module.proj_size or module.hidden_size
    shapes: list[Shape] = []
    for layer in range(module.num_layers):
        size = module.input_size if layer == 0 else state * directions
        shapes.append(((rows, gates, size), 2 * directions * rows * gates * size))
        shapes.append(((batch, gates, state), 2 * directions * rows * gates * state))
        if module.proj_size:
            project = 2 * directions * rows * module.proj_size * module.hidden_size
            shapes.append(((batch, module.proj_size, module.hidden_size), project))
    return shapes
