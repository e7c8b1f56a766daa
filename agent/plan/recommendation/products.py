"""What hardware and software there are, and how fast and exact products are on them."""

import os
import platform
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.errors import AdviceError
from mp_agent.plan.execution.precision import LOSS
from mp_agent.plan.execution.training import PlannedTraining, Workload
from mp_agent.plan.precision_plan import (
    FORMATS,
    Capability,
    Environment,
    Hardware,
    PrecisionPlan,
    formats_of_cpu,
    formats_of_gpu,
    gpu_of_capability,
    has_tensor_cores,
)
from mp_agent.plan.recommendation.model import MatrixProduct

_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_INFO = Path("/proc/meminfo")
_DRIVER = Path("/proc/driver/nvidia/version")


def read_environment(capability: Capability | None = None) -> Environment:
    """Return the environment: the first CUDA device, else the processor.

    capability: plan for a GPU of this compute capability instead, which is not here.
    """
    notes = []
    if capability is not None:
        hardware = gpu_of_capability(capability)
        notes.append(f"planned for a GPU of {hardware.name}, as given: it was not detected")
    elif torch.cuda.is_available():
        hardware = _gpu()
    else:
        hardware = _processor()
        notes.append(
            "no CUDA GPU was found: the plan is for this processor; --capability plans for a GPU "
            "that is not here"
        )
    return Environment(
        hardware=hardware, versions=_versions(), products=_products(), notes=tuple(notes)
    )


def capability_of(text: str) -> Capability:
    """Return the compute capability that a text such as `8.0` names.

    Raises AdviceError, naming the value, for anything else.
    """
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None or int(match[1]) < 3:
        raise AdviceError(f"capability: {text!r} is not a compute capability such as 8.0")
    return int(match[1]), int(match[2])


def _gpu() -> Hardware:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    # On ROCm the numbers are AMD's; what NVIDIA's mean does not apply.
    amd = torch.version.hip is not None
    capability = None if amd else torch.cuda.get_device_capability(0)
    formats: dict[str, bool | None] = dict.fromkeys(FORMATS, None)
    if capability is None:
        formats["bf16"] = torch.cuda.is_bf16_supported()
    else:
        formats = formats_of_gpu(capability, properties.name)
    return Hardware(
        kind="cuda",
        name=properties.name,
        devices=torch.cuda.device_count(),
        compute_capability=capability,
        tensor_cores=None if capability is None else has_tensor_cores(capability, properties.name),
        formats=formats,
        memory_bytes=total,
        memory_free_bytes=free,
    )


def _processor() -> Hardware:
    name, flags = _cpu_info()
    page = os.sysconf("SC_PAGE_SIZE")
    return Hardware(
        kind="cpu",
        name=name,
        devices=1,
        formats=formats_of_cpu(flags),
        memory_bytes=page * os.sysconf("SC_PHYS_PAGES"),
        memory_free_bytes=_available_bytes(),
    )


def _available_bytes() -> int | None:
    """Return what programs may take, what the system caches of files among it."""
    try:
        text = _MEMORY_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _cpu_info() -> tuple[str, frozenset[str] | None]:
    """Return the processor's name and its flags, None where they cannot be read."""
    try:
        text = _CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine(), None
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return (
        name[1].strip() if name else platform.machine(),
        frozenset(flags[1].split()) if flags else None,
    )


def _versions() -> dict[str, str | None]:
    cudnn = (
        torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if torch.cuda.is_available()
        else None
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": _nccl(),
        "driver": _driver(),
    }


def _nccl() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _driver() -> str | None:
    try:
        match = re.search(r"\s(\d+\.\d[\d.]*)\s", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[1] if match else None


def _products() -> dict[str, str | bool]:
    matmul = torch.backends.cuda.matmul
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_allow_tf32": matmul.allow_tf32,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
    }


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

    training.run(body)
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
