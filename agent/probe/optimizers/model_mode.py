"""The mode of the model that an optimizer steps: training or evaluation, and running statistics."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

_INSPECTED_AT_MOST = 8
_STEPS_BETWEEN_EVALUATIONS = 8
"""Passes without gradients before each step, as of a gradient cache, are a part of training."""
_CLASSES_AT_MOST = 256


class ModelMode:
    """Follows the mode of the last module with all of an optimizer's parameters that was given one.

    Of a module that wraps another with all of its parameters, as a LightningModule does, what
    counts is the inner one's mode: `from_pretrained` sets it, and Lightning leaves it as it is.
    Only `train()` and `eval()` of the whole count: a part that is put into evaluation mode, such as
    batch normalization whose statistics are to stay, is so on purpose. One that was never in
    training mode, as what `from_pretrained` returns, counts if it has dropout and all of it is
    trained.
    """

    def __init__(self) -> None:
        self.was_left = False
        """The last step was made in evaluation mode, and is not meant to be."""
        self.is_known = False
        """There is a model whose mode matters."""
        self.forgets = False
        """Running statistics that the last step has updated are those of the last batch."""
        self.evaluated_in_training = False
        """The last evaluation was in training mode."""
        self._evaluated_before = 0
        """Number of the step before which there were passes without gradients."""
        self._model: weakref.ref[nn.Module] | None = None
        self._trained = False
        """There was a step in training mode."""
        self._behaving: tuple[weakref.ref[nn.Module], ...] = ()
        """Some of the modules that compute otherwise in evaluation mode."""
        self._forgetting: tuple[weakref.ref[nn.Module], ...] = ()
        """Some of the modules whose running statistics are those of the last batch."""
        self._drops = False
        """Some of the model is dropped in training mode, and all of it is trained."""

    def given(self, model: nn.Module, *, trained_before: bool, held: frozenset[int]) -> None:
        """Follow `model`, which has a mode; trained_before: it has been stepped in training.

        held: `id` of each parameter that is trained. The model's modules are gone through when it
        is not the one that is followed.
        """
        given, model = model, _unwrapped(model)
        self._trained |= trained_before and model is given
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)
            behaving = filter(_depends_on_mode, nn.Module.modules(model))
            self._behaving = tuple(map(weakref.ref, islice(behaving, _INSPECTED_AT_MOST)))
            forgetting = filter(_forgets, nn.Module.modules(model))
            self._forgetting = tuple(map(weakref.ref, islice(forgetting, _INSPECTED_AT_MOST)))
            self.is_known = bool(self._behaving)
            self.was_left &= self.is_known
            whole = all(id(each) in held for each in nn.Module.parameters(model))
            self._drops = whole and any(map(_drops, nn.Module.modules(model)))

    def stepped(self) -> None:
        """Note the mode in which the optimizer has stepped.

        It is read of the modules: some frameworks set the attribute, and call nothing.
        """
        forgetting = (each for ref in self._forgetting if (each := ref()) is not None)
        self.forgets = any(each.training and _forgets(each) for each in forgetting)
        if self._model is None or (model := self._model()) is None:
            self.was_left = False
        elif model.training:
            self._trained, self.was_left = True, False
        else:
            modes = [each.training for ref in self._behaving if (each := ref()) is not None]
            left = self._trained or self._drops
            self.was_left = left and bool(modes) and not any(modes)

    def evaluation_begins(self, sequence: int) -> bool:
        """Return whether passes without gradients before this step may be an evaluation's first."""
        steps, self._evaluated_before = sequence - self._evaluated_before, sequence
        return self.is_known and steps >= _STEPS_BETWEEN_EVALUATIONS

    def evaluated(self) -> None:
        """Note the mode in which the model passes through an evaluation."""
        model = None if self._model is None else self._model()
        behaving = [each for ref in self._behaving if (each := ref()) is not None]
        self.evaluated_in_training = (
            model is not None
            and model.training
            and any(each.training for each in behaving)
            and not any(map(_collects_statistics, behaving))
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the innermost module that has all of a model's parameters, and all that drops."""
    behaving = list(filter(_depends_on_mode, nn.Module.modules(model)))
    parts = {id(each) for each in (*nn.Module.parameters(model), *behaving)}
    for child in nn.Module.children(model) if parts else ():
        if parts <= {
            id(each) for each in (*nn.Module.parameters(child), *nn.Module.modules(child))
        }:
            return _unwrapped(child)
    return model


def _depends_on_mode(module: nn.Module) -> bool:
    """Return whether a module computes otherwise in evaluation mode."""
    return _drops(module) or (isinstance(module, _NormBase) and module.track_running_stats)


_MOMENTUM_OF_LAST_BATCH = 0.9
"""From which on running statistics are those of the last batch. TensorFlow's weight of the past is
0.99; torch's is that of the batch, and 0.1 as a rule."""


def _forgets(module: nn.Module) -> bool:
    if not isinstance(module, _NormBase) or not module.track_running_stats:
        return False
    momentum = module.momentum
    return isinstance(momentum, float) and _MOMENTUM_OF_LAST_BATCH <= momentum <= 1.0


def _collects_statistics(module: nn.Module) -> bool:
    """Return whether passes are to form new running statistics: their mean, or one at a time."""
    return isinstance(module, _NormBase) and module.momentum in (None, 1.0)


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0.0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0.0
    # A module of this name is looked at by itself, and a rate of 0 drops nothing. Not by getattr,
    # which would keep an AttributeError that a signal handler raises in the module's own method.
    rate, kind = vars(module).get("dropout", 1.0), cast(type, type(module))
    is_module = "dropout" in module._modules
    return not is_module and isinstance(rate, float) and rate > 0.0 and _calls_dropout(kind)


@lru_cache(_CLASSES_AT_MOST)
def _calls_dropout(kind: type) -> bool:
    """Return whether a method applies the function `dropout` in training mode alone.

    `F.dropout(x, p, training=self.training)`, as examples of PyTorch Geometric do.
    """
    written = (each for base in kind.__mro__ if base is not nn.Module for each in _code_of(base))
    return any({"dropout", "training"} <= {*code.co_names} for code in written)


def _code_of(kind: type) -> Iterator[CodeType]:
    for method in vars(kind).values():
        if isinstance(code := getattr(method, "__code__", None), CodeType):
            yield code
