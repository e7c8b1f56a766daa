"""Decides when attention and output logits are measured, and adds them to the step under way."""

import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from mp_agent.probe import accelerator
from mp_agent.probe.activations.modules import is_compiled
from mp_agent.probe.attention.calls import has_compiled
from mp_agent.probe.attention.sampling import AttentionSampling, Rows
from mp_agent.probe.optimizers.lookup.parameter_names import strip_wrappers
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import ATTENTION, LOGITS

COMPILED = "attention and output logits where torch.compile is used"
NO_ATTENTION = "attention: no call of scaled_dot_product_attention or nn.MultiheadAttention"
NO_LOSS = "output logits: no call of cross_entropy"

_NONE: Mapping[str, tuple[str, ...]] = {}
_OUTPUT = ("output",)


class StepAttention:
    """Attention of the run's model, and its loss, in the first forward pass of sampled steps.

    Which modules compute attention is learned from their calls: they become layers when they are
    first seen.
    """

    def __init__(
        self, sampling: AttentionSampling, note_unsupported: Callable[[str], None]
    ) -> None:
        self._sampling = sampling
        self._note_unsupported = note_unsupported
        self._model: weakref.ref[nn.Module] | None = None
        self._names: tuple[str, ...] = ()
        self._seen: tuple[str, ...] = ()
        """The modules that compute attention, in the order of the tree."""
        self._layers = _NONE

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the layers, by family; the same object while they are the same."""
        if model is not None and (self._model is None or self._model() is not model):
            self._model = weakref.ref(model)
            self._look_at(model, seen=())
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Watch the calls of the next forward pass."""
        self._sampling.end()
        self.layers(model)
        if model is not None:
            self._look_at(model, self._seen)  # scripts add, wrap and replace modules
        if model is None:
            return
        if has_compiled() or any(map(is_compiled, model.modules())):
            self._note_unsupported(COMPILED)
            return
        self._sampling.begin(model)

    def end(self, step: OpenStep) -> None:
        """Restore the functions, and add what was measured to the step."""
        if not self._sampling.begun:
            return
        rows, row_of_loss = self._sampling.take()
        if not rows:
            self._note_unsupported(NO_ATTENTION)
        if row_of_loss is None:
            self._note_unsupported(NO_LOSS)
            row_of_loss = _no_rows(rows)
        found = accelerator.on_one_device(list(rows.values())) if rows else []
        by_name = {self._names[place]: row for place, row in zip(rows, found, strict=True)}
        if not by_name.keys() <= set(self._seen):
            self._see((*self._seen, *by_name))
        if rows:
            absent = torch.full_like(found[0], torch.nan)
            table = [by_name.get(name, absent) for name in self._seen]
            step.own_rows[ATTENTION.name] = torch.stack(table)
        step.own_rows[LOGITS.name] = row_of_loss.unsqueeze(0)
        step.streams.update(self._sampling.streams)

    def backward_ended(self, step: OpenStep) -> None:
        """Do nothing: all is known at the end of the forward pass."""

    def close(self) -> None:
        """Restore the functions."""
        self._sampling.end()

    def _look_at(self, model: nn.Module, seen: tuple[str, ...]) -> None:
        names = tuple(_names(model))
        if names != self._names or seen != self._seen or not self._layers:
            self._names = names
            self._see(seen)

    def _see(self, seen: tuple[str, ...]) -> None:
        """Make layers of those of the modules that exist."""
        known = set(seen)
        self._seen = tuple(name for name in self._names if name in known)
        layers = {**({ATTENTION.name: self._seen} if self._seen else {}), LOGITS.name: _OUTPUT}
        self._layers = self._layers if layers == self._layers else layers


def _no_rows(others: Rows) -> torch.Tensor:
    """Return a row of logits that says that this rank has none, where the other rows are."""
    device = next((row.device for row in others.values()), accelerator.computing_device())
    row = torch.full((len(LOGITS.names),), torch.nan, dtype=torch.float64, device=device)
    row[0] = 0.0
    return row


def _names(model: nn.Module) -> Iterator[str]:
    """Yield a name of each module, without wrappers' prefixes, unique."""
    taken: set[str] = set()
    for full, module in model.named_modules():
        name = strip_wrappers(full) or type(module).__name__
        while name in taken:
            name = f"{name}'"
        taken.add(name)
        yield name
