"""When routers are measured, what is counted, and their part of a step."""

from collections.abc import Callable, Hashable, Mapping
from math import log, nan

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.activation_modules import ForwardHook, Run
from mp_agent.probe.instruments.instrument import Instrument
from mp_agent.probe.instruments.router_gates import Gate, Gates, Routing
from mp_agent.probe.statistics.pieces import folded, keep_row
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import ROUTERS

_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Bounds the scratch: each chunk of logits is widened to 32 bits."""
_ROUNDING = 0.01
"""How much probabilities of 16 bits may miss a sum of 1."""


def router_row(routing: Routing) -> torch.Tensor | None:
    """Return float64 [C], the columns of `ROUTERS`, on the device of the load; None without tokens.

    Logits none of whose rows has a negative number, and each of whose rows adds up to 1, are taken
    for probabilities. Entropies are computed in at least 32 bits, and added in float64.
    """
    if not routing.tokens:
        return None
    load_E = routing.load_E.double()
    experts, total = len(load_E), load_E.sum()
    absent = torch.full_like(total, nan)
    return torch.stack(
        [
            torch.full_like(total, float(routing.tokens)),
            *_of_logits(routing.logits_TE, absent),
            # Without any choice there is no mean to compare with.
            (load_E.amax() * experts / total).masked_fill(total == 0, nan),
            torch.full_like(total, float(experts)),
            (load_E == 0).sum().double(),
            absent if routing.choices is None else routing.choices.double(),
            absent if routing.dropped is None else routing.dropped.double(),
        ]
    )


def _of_logits(logits_TE: torch.Tensor | None, absent: torch.Tensor) -> list[torch.Tensor]:
    """Return tokens that are not finite, those with an entropy, its sum, and the largest logit."""
    if logits_TE is None or not logits_TE.shape[-1]:
        return [absent] * 4
    experts = logits_TE.shape[-1]
    chunks = torch.split(logits_TE, max(1, _CHUNK_ELEMENTS // experts))
    likely = torch.stack([_are_probabilities(chunk_TE) for chunk_TE in chunks]).all()
    rows = torch.stack([_chunk(chunk_TE.to(absent.device), likely) for chunk_TE in chunks])
    nonfinite, entropy = rows[:, 0].sum(), rows[:, 1].sum()
    tokens = torch.full_like(absent, float(len(logits_TE))) - nonfinite
    largest = rows[:, 2].amax()
    largest = largest.masked_fill(likely | (largest < 0), nan)
    if experts == 1:  # whose logarithm is 0
        return [nonfinite, absent, absent, largest]
    return [nonfinite, tokens, entropy / log(experts), largest]


def _chunk(logits_TE: torch.Tensor, likely: torch.Tensor) -> torch.Tensor:
    """Return float64 [3]: tokens that are not finite, sum of entropies, largest magnitude."""
    values_TE = _widened(logits_TE)
    sound_T = values_TE.amax(dim=-1).isfinite()  # a NaN is the largest, -Inf alone masks an expert
    finite_TE = values_TE.isfinite()
    shares_TE = torch.where(likely, values_TE, values_TE.softmax(dim=-1))
    entropy_T = torch.special.entr(shares_TE).sum(dim=-1, dtype=torch.float64)
    return torch.stack(
        [
            (~sound_T).sum().double(),
            entropy_T.masked_fill(~sound_T, 0.0).sum(),
            values_TE.abs().masked_fill(~finite_TE, -1.0).amax().double(),
        ]
    )


def _are_probabilities(logits_TE: torch.Tensor) -> torch.Tensor:
    values_TE = _widened(logits_TE)
    near = (values_TE.sum(dim=-1) - 1.0).abs() <= _ROUNDING
    return (values_TE >= 0.0).all() & near.all()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


class RouterSampling:
    """Measures routers between `begin` and `take`, in the forward pass.

    What runs while `is_training` says no, such as an evaluation, is left out, and so are calls of a
    router in another mode than that of the step before. Hooks are on modules only in between.
    """

    def __init__(self, run: Run, is_training: Callable[[], bool]) -> None:
        self.called = False
        """Whether any call in training was seen since `begin`."""
        self.streams: set[Hashable] = set()
        """Streams of the device on which anything was measured."""
        self.unreadable: set[str] = set()
        """Patterns of the setting that fit a module whose output is not that of a router."""
        self._run = run
        self._is_training = is_training
        self._handles: list[RemovableHandle] = []
        self._gates: tuple[Gate, ...] = ()
        self._modes: dict[int, bool] = {}
        """By place, whether a router was in training mode at `begin`."""
        self._rows: dict[int, list[torch.Tensor]] = {}

    def begin(self, gates: Gates) -> None:
        """Put hooks on the routers; what was measured before is forgotten."""
        self.end()
        self._rows, self.streams, self.unreadable = {}, set(), set()
        self._gates, self._modes, self.called = gates.gates, {}, False
        for place, gate in enumerate(self._gates):
            if (module := gate.module()) is not None:
                self._modes[place] = module.training
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
        if module is None or not self._is_training() or module.training != self._modes[place]:
            return
        self.called = True
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


_NONE: Mapping[str, tuple[str, ...]] = {}


class StepRouters(Instrument):
    """The routers of the run's model, in the first forward pass of sampled steps."""

    subject = "routers"

    def __init__(
        self,
        sampling: RouterSampling,
        patterns: Mapping[str, int],
        note_unsupported: Callable[[str], None],
    ) -> None:
        """patterns: see `Gates`."""
        self._sampling = sampling
        self._patterns = patterns
        self._note_unsupported = note_unsupported
        self._gates: Gates | None = None
        self._layers = _NONE

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the routers, by family; the same object while they are the same."""
        if model is not None and (self._gates is None or not self._gates.is_of(model)):
            self._look_at(model)
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Put hooks on the routers for the next forward pass."""
        if model is not None:
            gates = self._look_at(model)  # scripts add, wrap and replace modules
            for feature in gates.not_covered:
                self._note_unsupported(feature)
            if gates.names:
                self._sampling.begin(gates)

    def end(self, step: OpenStep) -> None:
        """Remove the hooks, and add what was measured to the step.

        Of a backward before any call, such as a discriminator's, both wait for the next one.
        """
        if not self._sampling.begun or not self._sampling.called:
            return
        rows_MC = self._sampling.take()
        for pattern in sorted(self._sampling.unreadable):
            self._note_unsupported(f"routers={pattern}: its output has no logits of experts")
        if rows_MC is not None:
            step.own_rows[ROUTERS.name] = rows_MC
            step.streams.update(self._sampling.streams)

    def finish(self, step: OpenStep) -> None:
        """Remove hooks that no call has met in the step."""
        self._sampling.end()

    def close(self) -> None:
        """Remove the hooks."""
        self._sampling.end()

    def _look_at(self, model: nn.Module) -> Gates:
        gates = self._gates = Gates(model, self._patterns)
        names = {ROUTERS.name: gates.names} if gates.names else _NONE
        self._layers = self._layers if names == self._layers else names
        return gates
