"""When logits are measured, and their part of a step."""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.activation_modules import is_compiled
from mp_agent.probe.instruments.attention_logits import (
    FunctionCalls,
    attention_row,
    caller_among,
    has_compiled,
    logits_row,
    weights_row,
)
from mp_agent.probe.instruments.instrument import Instrument
from mp_agent.probe.optimizers.parameter_names import strip_wrappers
from mp_agent.probe.statistics.pieces import folded
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import ATTENTION, LOGITS, ColumnFamily

CALLS_AT_MOST = 8
"""Calls of one module, and of the loss, that are measured in one forward pass."""

_EAGER_ATTENTION = "eager_attention_forward"
"""The function in which models of transformers compute the weights of attention themselves."""

Run = Callable[..., None]
"""`Shield.run`: a kind of failure, a function, and its arguments."""

Rows = Mapping[int, torch.Tensor]
"""A row [C] by the place of its module."""


class AttentionSampling:
    """Measures attention and the loss's logits between `begin` and `take`, in the forward pass.

    What runs while `is_training` says no, such as an evaluation, is left out, and so are losses of
    logits that need no gradient. Of each sample other heads and positions are looked at.
    """

    def __init__(self, run: Run, is_training: Callable[[], bool]) -> None:
        self.streams: set[Hashable] = set()
        """Streams of the device on which anything was measured."""
        self._run = run
        self._is_training = is_training
        self._calls = FunctionCalls()
        self._places: dict[int, int] = {}
        self._model: nn.Module | None = None
        self._mode = False
        """Whether the model was in training mode at `begin`."""
        self._of_attention: dict[int, list[torch.Tensor]] = {}
        self._of_loss: list[torch.Tensor] = []
        self._samples = 0

    def begin(self, model: nn.Module) -> None:
        """Watch the calls of one forward pass; what was measured before is forgotten."""
        self.end()
        self._samples += 1
        self.streams, self._of_attention, self._of_loss = set(), {}, []
        self._model = model  # while its modules are known by their ids
        self._mode = model.training
        self._places = {id(module): place for place, module in enumerate(model.modules())}
        self._calls.begin(
            {
                "scaled_dot_product_attention": self._attention_called,
                "softmax": self._softmax_called,
                "cross_entropy": self._loss_called,
            },
            model,
        )

    def end(self) -> None:
        """Restore the functions."""
        self._calls.end()
        self._model, self._places = None, {}

    @property
    def begun(self) -> bool:
        """Whether calls are watched."""
        return self._calls.begun

    @property
    def called(self) -> bool:
        """Whether any call was measured since `begin`."""
        return bool(self._of_attention or self._of_loss)

    def take(self) -> tuple[Rows, torch.Tensor | None]:
        """Restore the functions; return a row per module that was seen, and that of the loss.

        Modules go by their places among those of the model. Rows are float64 [C], on the device
        of what they are of.
        """
        self.end()
        found, of_loss = self._of_attention, self._of_loss
        self._of_attention, self._of_loss = {}, []
        rows = {place: _one_of(ATTENTION, each) for place, each in found.items() if each}
        return rows, _one_of(LOGITS, of_loss) if of_loss else None

    def _attention_called(
        self, frame: FrameType, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._run("attention", self._add_attention, frame, args, kwargs)

    def _softmax_called(
        self, frame: FrameType, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        code = frame.f_code
        if code is _MULTI_HEAD_ATTENTION or code.co_name == _EAGER_ATTENTION:
            self._run("attention", self._add_weights, frame, args, kwargs)

    def _loss_called(self, _: FrameType, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._run("output logits", self._add_loss, args, kwargs)

    def _add_attention(
        self, frame: FrameType, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        named = {**dict(zip(_OF_ATTENTION, args, strict=False)), **kwargs}
        query, key = _local(named.get("query")), _local(named.get("key"))
        if query is None or key is None or (place := self._place(frame)) is None:
            return
        given = named.get("attn_mask")
        causal = isinstance(given, CausalBias)
        mask = None if causal else _local(given)
        if mask is None and given is not None and not causal:
            return
        row = attention_row(
            query,
            key,
            mask=mask,
            is_causal=causal or bool(named.get("is_causal", False)),
            diagonal=_diagonal(given),
            scale=named.get("scale"),
            offset=self._samples,
        )
        self._keep(row, self._of_attention.setdefault(place, []))

    def _add_weights(
        self, frame: FrameType, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        logits = _local(args[0] if args else kwargs.get("input"))
        if logits is not None and (place := self._place(frame)) is not None:
            row = weights_row(logits, self._samples)
            self._keep(row, self._of_attention.setdefault(place, []))

    def _add_loss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = {**dict(zip(_OF_LOSS, args, strict=False)), **kwargs}
        logits, target = named.get("input"), named.get("target")
        if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor):
            return
        # Of logits that are split over their classes, no rank has a whole row.
        split = isinstance(logits, DTensor) or isinstance(target, DTensor)
        over = not self.begun or not self._counts() or len(self._of_loss) >= CALLS_AT_MOST
        if logits.requires_grad and not split and not over and _usable(logits):
            ignore_index = int(named.get("ignore_index", -100))
            self._keep(logits_row(logits, target, ignore_index, self._samples), self._of_loss)

    def _place(self, frame: FrameType) -> int | None:
        """Return the place of the module that called, if it is to be measured."""
        if not self._counts():
            return None
        place = caller_among(frame, self._places)
        if place is None or len(self._of_attention.get(place, ())) >= CALLS_AT_MOST:
            return None
        return place

    def _counts(self) -> bool:
        """Return whether the model trains, in the mode that it was in in the step before."""
        same_mode = self._model is None or self._model.training == self._mode
        return same_mode and self._is_training()

    def _keep(self, row: torch.Tensor | None, rows: list[torch.Tensor]) -> None:
        if type(row) is not torch.Tensor:  # without numbers, or a subclass that computes otherwise
            return
        rows.append(row)
        if not accelerator.is_on_host(row.device):
            self.streams.add(accelerator.current_stream(row.device))


def _one_of(family: ColumnFamily, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return folded(family, accelerator.on_one_device(rows))


_MULTI_HEAD_ATTENTION = F.multi_head_attention_forward.__code__
_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_OF_LOSS = ("input", "target", "weight", "size_average", "ignore_index")


def _diagonal(mask: object) -> int:
    """Return up to which diagonal keys are visible; a `CausalBias` is a tensor without numbers."""
    if isinstance(mask, CausalBias) and mask.variant is CausalVariant.LOWER_RIGHT:
        return int(mask.seq_len_kv) - int(mask.seq_len_q)
    return 0


def _local(value: object) -> torch.Tensor | None:
    """Return a tensor that can be measured, of a sharded one the local part; None without any."""
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            return None
        value = value.to_local()
    return value if isinstance(value, torch.Tensor) and _usable(value) else None


def _usable(tensor: torch.Tensor) -> bool:
    kinds = tensor.is_floating_point() or tensor.dtype is torch.bool
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return kinds and dense and accelerator.is_supported(tensor.device)


COMPILED = "attention and output logits where torch.compile is used"
NO_ATTENTION = "attention: no call of scaled_dot_product_attention or nn.MultiheadAttention"
NO_LOSS = "output logits: no call of cross_entropy"

_NONE: Mapping[str, tuple[str, ...]] = {}
_OUTPUT = ("output",)


class StepAttention(Instrument):
    """Attention of the run's model, and its loss, in the first forward pass of sampled steps.

    Which modules compute attention is learned from their calls: they become layers when they are
    first seen.
    """

    subject = "attention"

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
        self._backward_came = False
        """Since calls are watched."""

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the layers, by family; the same object while they are the same."""
        if model is not None and (self._model is None or self._model() is not model):
            self._model = weakref.ref(model)
            self._look_at(model, seen=())
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Watch the calls of the next forward pass."""
        self._sampling.end()
        self._backward_came = False
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
        """Restore the functions, and add what was measured to the step.

        Of a backward before any call, such as a discriminator's, both wait for the next one.
        """
        self._backward_came = True
        if self._sampling.begun and self._sampling.called:
            self._take(step)

    def finish(self, step: OpenStep) -> None:
        """Restore functions of which no call was seen in the step, and say so."""
        if self._sampling.begun and self._backward_came:
            self._take(step)

    def _take(self, step: OpenStep) -> None:
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
