"""The hardware and software that a plan is for, and which number formats the hardware computes."""

from collections.abc import Mapping
from dataclasses import dataclass

Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU: (8, 0) is an A100."""

TENSOR_CORES = (7, 0)
FORMATS: Mapping[str, Capability] = {
    "fp16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
}
"""The first compute capability whose tensor cores multiply a format (CUDA C++ Programming Guide,
"Arithmetic Instructions" and "Tensor Core" of each capability)."""

_WITHOUT_TENSOR_CORES = ("GTX 16", "MX450", "T500", "T600")
"""Turing GPUs that have none in spite of compute capability 7.5."""

_CPU_FLAGS: Mapping[str, frozenset[str]] = {
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
}
"""Flags in /proc/cpuinfo of processors that compute in a format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What computes. None stands for what is not known, and is never guessed."""

    kind: str
    """`cuda` or `cpu`: the device that the plan is for."""
    name: str
    detected: bool = True
    """False for a GPU that is not here: a compute capability was given."""
    devices: int = 1
    compute_capability: Capability | None = None
    tensor_cores: bool | None = None
    formats: Mapping[str, bool | None]
    """Whether it multiplies `fp16`, `bf16`, `tf32` and `fp8` in hardware."""
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Hardware, versions, and the settings of matrix products in force."""

    hardware: Hardware
    versions: Mapping[str, str | None]
    """Of torch, Python, CUDA, cuDNN, NCCL and the driver; None for what is not there."""
    products: Mapping[str, str | bool]
    """Settings of torch for matrix products and convolutions."""
    notes: tuple[str, ...] = ()


def formats_of_gpu(capability: Capability, name: str) -> dict[str, bool | None]:
    """Return which formats the tensor cores of an NVIDIA GPU multiply."""
    if not has_tensor_cores(capability, name):
        return dict.fromkeys(FORMATS, False)
    return {one: capability >= first for one, first in FORMATS.items()}


def has_tensor_cores(capability: Capability, name: str) -> bool:
    """Return whether an NVIDIA GPU has tensor cores."""
    return capability >= TENSOR_CORES and not any(one in name for one in _WITHOUT_TENSOR_CORES)


def formats_of_cpu(flags: frozenset[str] | None) -> dict[str, bool | None]:
    """Return which formats a processor computes in; flags: None where they cannot be read."""
    sixteen = {
        name: None if flags is None else bool(flags & known) for name, known in _CPU_FLAGS.items()
    }
    return {**sixteen, "tf32": False, "fp8": False}


def gpu_of_capability(capability: Capability) -> Hardware:
    """Return a GPU that is known by its compute capability alone."""
    text = f"compute capability {capability[0]}.{capability[1]}"
    return Hardware(
        kind="cuda",
        name=text,
        detected=False,
        compute_capability=capability,
        tensor_cores=has_tensor_cores(capability, text),
        formats=formats_of_gpu(capability, text),
    )
