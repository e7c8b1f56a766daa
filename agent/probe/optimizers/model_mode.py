"""Whether the model that an optimizer steps was left in evaluation mode."""

import weakref
from itertools import islice

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

_INSPECTED_AT_MOST = 8


class ModelMode:
    """Follows the mode of the last module with all of an optimizer's parameters that was given one.

    Only `train()` and `eval()` of the whole count: a part that is put into evaluation mode, such as
    batch normalization whose statistics are to stay, is so on purpose.
    """

    def __init__(self) -> None:
        self.was_left = False
        """The last step was made in evaluation mode, though earlier ones were not."""
        self.is_known = False
        """Some module was given a mode."""
        self._model: weakref.ref[nn.Module] | None = None
        self._trained = False
        """There was a step in training mode."""
        self._behaving: tuple[weakref.ref[nn.Module], ...] = ()
        """Some of the modules that compute otherwise in evaluation mode."""

    def given(self, model: nn.Module, *, trained_before: bool) -> None:
        """Follow `model`, which was given a mode; trained_before: it has been stepped in training.

        Its modules are gone through when it is not the one that is followed.
        """
        self.is_known = True
        self._trained |= trained_before
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)
            behaving = filter(_depends_on_mode, nn.Module.modules(model))
            self._behaving = tuple(map(weakref.ref, islice(behaving, _INSPECTED_AT_MOST)))

    def stepped(self) -> None:
        """Note the mode in which the optimizer has stepped.

        It is read of the modules: some frameworks set the attribute, and call nothing.
        """
        if self._model is None or (model := self._model()) is None:
            self.was_left = False
        elif model.training:
            self._trained, self.was_left = True, False
        else:
            modes = [each.training for ref in self._behaving if (each := ref()) is not None]
            self.was_left = self._trained and bool(modes) and not any(modes)


def _depends_on_mode(module: nn.Module) -> bool:
    """Return whether a module computes otherwise in evaluation mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0.0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0.0
    return isinstance(module, _NormBase) and module.track_running_stats
