"""What an optimizer's steps show of the loop: which gradients they used, and in which mode.

Which tensors the gradients are, and torch's count of in-place changes, show whether they were
cleared or added to; no number of theirs is read. Only what is done to `grad.data` is not counted.
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from mp_agent.probe.optimizers.plan import LayerSlot, MeasurementPlan, local_of
from mp_agent.probe.scalars import Scalar

_State = tuple[int, int]
"""Which tensor a gradient is, and how often it was changed in place."""


class GradientUse:
    """Follows the first, a middle and the last of the gradients that an optimizer has used.

    adds_up: whether its last step used, besides new gradients, those of the step before: 1 or 0,
    on a device where that depends on their numbers; None where it is not known.
    repeats: whether its last step, or the one before, used the gradients of the step before that
    again, unchanged, with no backward in between.
    """

    def __init__(self) -> None:
        self.adds_up: Scalar | None = None
        self.repeats = False
        self.steps_adding_up = 0
        """Consecutive ones, by all that is known without reading numbers."""
        self.remains: Scalar | None = None
        """Whether numbers of the kept gradients that were looked at are not 0."""
        self._parameters: tuple[weakref.ref[torch.Tensor], ...] = ()
        self._seen: list[_State | None] = []
        """The gradients as the last event has left them."""
        self._kept = False
        """The gradients that the last step has used are there; backwards may have added to them."""
        self._added = False
        self._again = False
        """The last step used what the one before had used."""
        self._used: list[weakref.ref[torch.Tensor]] = []
        """The gradients of backwards that the last step has used, if nothing can have made others.

        Whether they are the same tensors `id` does not show: a new one may get that of one gone.
        """
        self._clearing = False
        self._addresses: list[int] = []

    @property
    def kept(self) -> bool:
        """Whether gradients that the last step has used were there as the last backward began."""
        return self._kept

    @property
    def is_as_used(self) -> bool:
        """Whether the gradients are still those that the last step has used, and nothing else."""
        return self._kept and not self._added and self._states() == self._seen

    @property
    def is_replaced(self) -> bool:
        """Whether others have taken the place of the gradients as `note_addresses` found them."""
        return self._addresses != self._addresses_now()

    def note_addresses(self) -> None:
        """Remember where the gradients lie; some scripts give `grad.data` others."""
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> list[int]:
        found = [ref() for ref in self._parameters]
        gradients = [each.grad for each in found if each is not None and each.grad is not None]
        return [local_of(each).data_ptr() for each in gradients if each.layout is torch.strided]

    def clearing(self) -> None:
        """Expect `zero_grad` to clear them."""
        self._clearing = True

    def may_change(self) -> None:
        """Expect gradients to be changed by what torch does not count, as replayed graphs do."""
        self._used = []

    def backward_begins(self) -> bool:
        """Return whether the gradients that the last event has left were cleared since."""
        now, before = self._states(), self._seen
        changed = now != before
        cleared = changed and all(
            old is None or new is None or (self._clearing and new != old)
            for old, new in zip(before, now, strict=True)
        )
        self._kept &= not changed
        self._seen, self._clearing, self.remains, self._used = now, False, None, []
        return cleared

    def backward_ended(self) -> bool:
        """Return whether the backward has made, or added to, any of them."""
        now = self._states()
        touched = now != self._seen
        self._added |= touched
        self._seen = now
        return touched

    def used(self, plan: Callable[[], MeasurementPlan | None]) -> None:
        """Note that the optimizer, which has this plan, has stepped with them."""
        if self._kept and self._added:
            self.adds_up = 1.0 if self.remains is None else self.remains
            self.steps_adding_up += 1
        else:
            self.adds_up, self.steps_adding_up = 0.0, 0
        if (not self._seen or None in self._seen) and (found := plan()) is not None:
            self._parameters = tuple(map(weakref.ref, _inspected(found.slots)))
        before, self._seen = self._seen, self._states()
        same = bool(self._used) and self._seen == before
        again = same and all(ref() is not None for ref in self._used)
        self.repeats, self._again = again or self._again, again
        if not again:
            held = [each for ref in self._parameters if (each := ref()) is not None]
            used = [each.grad for each in held if self._added and each.grad is not None]
            self._used = list(map(weakref.ref, used))
        self._added = False
        self._kept = any(state is not None for state in self._seen)

    def _states(self) -> list[_State | None]:
        found: list[_State | None] = []
        for reference in self._parameters:
            gradient = None if (parameter := reference()) is None else parameter.grad
            found.append(None if gradient is None else (id(gradient), gradient._version))
        return found


def _inspected(slots: Sequence[LayerSlot]) -> list[torch.Tensor]:
    """Return the first, a middle and the last of the parameters that have gradients."""
    found = [slot.parameter for slot in slots if slot.parameter.grad is not None]
    return [found[at] for at in sorted({0, len(found) // 2, len(found) - 1})] if found else []


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
