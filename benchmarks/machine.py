"""What a table of measurements has to say about the machine it comes from."""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


def describe(device: torch.device) -> str:
    """Return one line: processor, cores, threads, memory, GPU if used, and versions."""
    parts = [
        f"{_processor()}, {os.cpu_count()} cores",
        f"{torch.get_num_threads()} torch threads",
        f"{_memory_gib():.0f} GiB memory",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
    ]
    if device.type == "cuda":
        parts.insert(0, torch.cuda.get_device_name(device))
    return ", ".join(parts)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
