"""Collects a row of statistics of each attention and each loss of one forward pass."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from mp_agent.probe import accelerator
from mp_agent.probe.attention.attention_logits import attention_row, weights_row
from mp_agent.probe.attention.calls import FunctionCalls, caller_among
from mp_agent.probe.attention.output_logits import logits_row
from mp_agent.probe.statistics.folding import folded
from mp_agent.records.columns import ATTENTION, LOGITS, ColumnFamily

CALLS_AT_MOST = 8
"""Calls of one module, and of the loss, that are measured in one forward pass."""

_EAGER_ATTENTION = "eager_attention_forward"
"""The function in which models of transformers compute the weights of attention themselves."""

Run = Callable[..., None]
"""`Guard.run`: a kind of failure, a function, and its arguments."""

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
        self._of_attention: dict[int, list[torch.Tensor]] = {}
        self._of_loss: list[torch.Tensor] = []
        self._samples = 0

    def begin(self, model: nn.Module) -> None:
        """Watch the calls of one forward pass; what was measured before is forgotten."""
        self.end()
        self._samples += 1
        self.streams, self._of_attention, self._of_loss = set(), {}, []
        self._model = model  # while its modules are known by their ids
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
        over = not self.begun or not self._is_training() or len(self._of_loss) >= CALLS_AT_MOST
        if logits.requires_grad and not split and not over and _usable(logits):
            ignore_index = int(named.get("ignore_index", -100))
            self._keep(logits_row(logits, target, ignore_index, self._samples), self._of_loss)

    def _place(self, frame: FrameType) -> int | None:
        """Return the place of the module that called, if it is to be measured."""
        if not self._is_training():
            return None
        place = caller_among(frame, self._places)
        if place is None or len(self._of_attention.get(place, ())) >= CALLS_AT_MOST:
            return None
        return place

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
