"""Hooks routers for one forward pass, and collects a row of statistics of each."""

from collections.abc import Callable, Hashable
from math import nan

import torch
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.activations.forward_hook import ForwardHook, Run
from mp_agent.probe.routers.gates import Gate, Gates
from mp_agent.probe.routers.statistics import router_row
from mp_agent.probe.statistics.folding import folded, keep_row
from mp_agent.records.columns import ROUTERS


class RouterSampling:
    """Measures routers between `begin` and `take`, in the forward pass.

    What runs while `is_training` says no, such as an evaluation, is left out. Hooks are on modules
    only in between.
    """

    def __init__(self, run: Run, is_training: Callable[[], bool]) -> None:
        self.streams: set[Hashable] = set()
        """Streams of the device on which anything was measured."""
        self.unreadable: set[str] = set()
        """Patterns of the setting that fit a module whose output is not that of a router."""
        self._run = run
        self._is_training = is_training
        self._handles: list[RemovableHandle] = []
        self._gates: tuple[Gate, ...] = ()
        self._rows: dict[int, list[torch.Tensor]] = {}

    def begin(self, gates: Gates) -> None:
        """Put hooks on the routers; what was measured before is forgotten."""
        self.end()
        self._rows, self.streams, self.unreadable = {}, set(), set()
        self._gates = gates.gates
        for place, gate in enumerate(self._gates):
            if (module := gate.module()) is not None:
                hook = ForwardHook(self._run, "routers", self._add, place)
                self._handles.append(module.register_forward_hook(hook))

    def end(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def begun(self) -> bool:
        """Whether routers are hooked."""
        return bool(self._handles)

    def take(self) -> torch.Tensor | None:
        """Remove the hooks; return float64 [M, C], NaN for routers that were not called.

        None when nothing was measured.
        """
        self.end()
        rows, self._rows = self._rows, {}
        if not rows:
            return None
        found = [folded(ROUTERS, accelerator.on_one_device(each)) for each in rows.values()]
        one_each = dict(zip(rows, accelerator.on_one_device(found), strict=True))
        device = next(iter(one_each.values())).device
        absent = torch.full((len(ROUTERS.names),), nan, dtype=torch.float64, device=device)
        return torch.stack([one_each.get(place, absent) for place in range(len(self._gates))])

    def _add(self, place: int, inputs: object, output: object) -> None:
        gate = self._gates[place]
        module = gate.module()
        if module is None or not self._is_training():
            return
        routing = gate.read(module, inputs, output)
        if routing is None:
            if gate.pattern:
                self.unreadable.add(gate.pattern)
            return
        row = router_row(routing)
        if row is None:
            return
        keep_row(ROUTERS, self._rows.setdefault(place, []), row)
        if not accelerator.is_on_host(row.device):
            self.streams.add(accelerator.current_stream(row.device))
