"""A short run of a training script, with everything measured that can be, and what it showed.

`python -m mp_agent.plan.short_run SCRIPT …` is the script's own process: the script as Python runs
it, with the inputs and outputs of its models watched.
"""

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mp_agent.errors import FlightError, RingError
from mp_agent.flight.postmortem.case import Case
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.flight.job import evidence_of_rings
from mp_agent.node.flight.replay import judged_items, merged_items
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from mp_agent.settings import Settings

INPUT = "input"
"""What names of watched inputs hold between the class of the model and the argument."""
_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0
_NO_DATA = re.compile("label|target|mask|weight|bias")
"""Names of arguments that are no data to normalize."""


@dataclass(frozen=True, slots=True)
class ShortRun:
    """What a short run showed."""

    case: Case | None
    tables: tuple[MergedTable, ...]
    """The layers and watched tensors of its sampled steps, as far as the rings held them."""
    problem: str
    """Why there is no case; empty where there is one."""
    status: int
    """Exit status of the script; 0 where it was stopped."""


def run_shortly(script: Path, arguments: Sequence[str], steps: int, seconds: int) -> ShortRun:
    """Run the script until it has made so many steps, with everything that can be measured."""
    with tempfile.TemporaryDirectory(prefix="mp_agent-checklist-") as directory:
        base = Path(directory)
        settings = {
            "MP_AGENT_ATTACH": "1",
            "MP_AGENT_DIR": directory,
            "MP_AGENT_NODE_AGENT": "none",
            "MP_AGENT_LAYER_INTERVAL": "10",
            "MP_AGENT_MEASURE_ACTIVATIONS": "1",
            "MP_AGENT_MEASURE_UPDATES": "1",
            "MP_AGENT_OVERHEAD_BUDGET": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(script), *arguments],
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is for the list
            start_new_session=True,
        )
        try:
            status = _wait(process, base, steps, time.monotonic() + seconds)
        finally:
            _end(process)
        return _read(base, status)


def _wait(process: "subprocess.Popen[bytes]", base: Path, steps: int, deadline: float) -> int:
    """Return the exit status; 0 once the steps are made, or time is up."""
    while (status := process.poll()) is None:
        if _steps_of(base) >= steps or time.monotonic() >= deadline:
            return 0
        time.sleep(_POLL_SECONDS)
    return status


def _steps_of(base: Path) -> int:
    found = 0
    for path in (ring for run in locations.find_runs(base) for ring in locations.find_rings(run)):
        with suppress(RingError, OSError, ValueError), closing(RingReader.open(path)) as reader:
            found = max(found, reader.state.committed_sequence)
    return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the script and its children: asked first, then killed."""
    for ending, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _read(base: Path, status: int) -> ShortRun:
    runs = [run for run in locations.find_runs(base) if locations.find_rings(run)]
    if not runs or not _steps_of(base):
        return ShortRun(None, (), "no optimizer step was seen in the short run", status)
    try:
        evidence = evidence_of_rings(runs[0], Settings())
    except (FlightError, OSError) as error:
        return ShortRun(None, (), f"the short run cannot be read: {error}", status)
    items = tuple(merged_items(evidence.ranks))
    tables = tuple(item for item in items if isinstance(item, MergedTable))
    history = judged_items(items, evidence.values, evidence.identity.run)
    return ShortRun(Case(evidence, history), tables, "", status)


def _watch_models() -> None:
    """Have the inputs and outputs of the outermost modules with parameters watched in training."""
    import torch
    from torch import nn
    from torch.nn.modules import module as hooks

    from mp_agent.probe import api

    depth = 0

    def begins(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1

    def ends(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth or not (module.training and torch.is_grad_enabled()):
            return
        if next(module.parameters(), None) is None:
            return
        kind = type(module).__name__
        # What follows the first argument may be a mask.
        for name, value in {**dict(enumerate(args[:1])), **kwargs}.items():
            if not _NO_DATA.search(str(name)):
                watch(f"{kind} {INPUT} {name}", value)
        if isinstance(outputs, tuple | Mapping):  # such as the logits next to the loss
            several = outputs.values() if isinstance(outputs, Mapping) else outputs
            tensors = (each for each in several if isinstance(each, torch.Tensor))
            outputs = next((each for each in tensors if each.dim() > 1), None)
        watch(f"{kind} output", outputs)

    def watch(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            dim = None if value.dim() < 2 else 1 if value.dim() == 4 else -1
            api.watch_tensor(name, value, dim if value.is_floating_point() else None, False)

    hooks.register_module_forward_pre_hook(begins)
    hooks.register_module_forward_hook(ends, with_kwargs=True, always_call=True)


def _main(arguments: list[str]) -> None:
    """Run the script as Python does."""
    import mp_agent_attach  # noqa: F401 - it waits for torch

    _watch_models()
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
