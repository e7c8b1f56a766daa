"""Reads the hardware and software from torch and from the system; nothing is guessed."""

import os
import platform
import re
from pathlib import Path

import torch

from mp_agent.advice.environment import (
    FORMATS,
    Capability,
    Environment,
    Hardware,
    formats_of_cpu,
    formats_of_gpu,
    gpu_of_capability,
    has_tensor_cores,
)
from mp_agent.errors import AdviceError

_CPU_INFO = Path("/proc/cpuinfo")
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
        memory_free_bytes=page * os.sysconf("SC_AVPHYS_PAGES"),
    )


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
