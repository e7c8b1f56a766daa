"""Gets the kernels compiled before a step needs them: once per node, into a cache on that node.

Local rank 0 starts `compile` at attach, in a separate process. A rank that comes to its first
plan meanwhile waits for the lock, and finds the kernels in the cache; without that process it
compiles them itself. Nothing is compiled later: the kernels are made for no particular alignment
or size, and every variant has been launched once.

`python -m mp_agent.probe.statistics.fused.build`: compiles the kernels for this node's GPUs.
Started at attach, while the training starts. Makes no CUDA context, so it takes no memory of
a GPU; the ranks load what they find in the cache.
"""

import argparse
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from mp_agent.probe import accelerator
from mp_agent.records.columns import DISTRIBUTION, GRADIENT_COLUMN_NAMES
from mp_agent.ring.files import beyond_standard_streams
from mp_agent.ring.interruptions import pass_on

log = logging.getLogger("mp_agent")

LOCK_SECONDS_AT_MOST = 60.0
"""Seconds after which a rank compiles for itself: the process that holds the lock may hang."""

_CACHE_VARIABLE = "TRITON_CACHE_DIR"


class Kernels(NamedTuple):
    """Some kernels, by the module that launches them. columns: what they have to write."""

    module: str
    columns: tuple[str, ...]
    subject: str


GRADIENT_KERNELS = Kernels(
    "mp_agent.probe.statistics.fused.launches", GRADIENT_COLUMN_NAMES, "gradients are"
)
DISTRIBUTION_KERNELS = Kernels(
    "mp_agent.probe.statistics.fused.distribution_kernels",
    DISTRIBUTION.names,
    "the distribution of gradients is",
)


@cache
def launchable(device: torch.device, kernels: Kernels = GRADIENT_KERNELS) -> ModuleType | None:
    """Return the module that launches the kernels, each compiled and loaded on `device`.

    None where stock operations have to do: without Triton, its compiler, or the C compiler that
    builds its driver stub. The reason is logged once per process. Raises the error of a device that
    has failed. The first call for a device waits for a compilation, but never for the device; later
    ones, as for another stream, wait for nothing.
    """
    if device.type != "cuda":
        return None
    try:
        with node_cache():
            launches = _launches(kernels)
            with torch.cuda.device(device):
                launches.launch_once(device)
    except Exception as error:
        pass_on(error)
        if accelerator.is_sticky_error(error):
            raise  # no fault of the kernels, and stock operations would fail as well
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        _say_once(kernels.subject, reason)
        return None
    return launches


def _launches(kernels: Kernels) -> ModuleType:
    """Return the module; raises RuntimeError where its kernels would be wrong or interpreted."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set, and the interpreter cannot read a GPU")
    launches = import_module(kernels.module)
    if missing := set(kernels.columns) ^ set(launches.COLUMNS):
        raise RuntimeError(f"the kernels do not measure {', '.join(sorted(missing))}")
    return launches


@cache
def _say_once(subject: str, reason: str) -> None:
    log.warning(
        "%s measured with stock operations of torch, which read them several times: "
        "the Triton kernels cannot be used (%s)",
        subject,
        reason,
    )


@contextmanager
def node_cache() -> Iterator[Path]:
    """Have Triton keep what it compiles in a directory on this node; one process at a time.

    Its usual one is in the home directory, which ranks of many nodes may share. Raises OSError
    when there can be no directory of this user alone.
    """
    directory = Path(tempfile.gettempdir()) / f"mp_agent-kernels-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory} is no directory that this user alone can write to")
    before = os.environ.get(_CACHE_VARIABLE)
    with _locked(directory / "lock"):
        os.environ[_CACHE_VARIABLE] = str(directory)
        try:
            yield directory
        finally:
            if before is None:
                os.environ.pop(_CACHE_VARIABLE, None)
            else:
                os.environ[_CACHE_VARIABLE] = before


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, or go on without it when another process keeps it for very long."""
    with beyond_standard_streams():
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS_AT_MOST
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the kernels and return the exit code: 0 also where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--distribution", action="store_true")
    options = parser.parse_args(arguments)
    if options.ready_fd is not None:
        os.close(options.ready_fd)
    if not torch.cuda.is_available():
        return 0
    wanted = (
        [GRADIENT_KERNELS, DISTRIBUTION_KERNELS] if options.distribution else [GRADIENT_KERNELS]
    )
    with node_cache():
        for kernels in wanted:
            import_module(kernels.module).compile_all()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
