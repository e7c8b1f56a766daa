"""What happens to gradients between backward, which makes them, and the optimizer's step.

Clipping, or a division by a loss scale, that calls no hook changes them all by one factor. The
numbers of a step do not show whether its norm and its loss are those of before or after that; the
factor does.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.optimizers.layer_slots import local_of
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.backward_loss import constant_factor
from mp_agent.ring.interruptions import pass_on

T = TypeVar("T")

_EARLY_STEPS = 128
_EARLY_INTERVAL = 4
_INTERVAL = 32
_ELEMENTS = 256
"""Of each inspected gradient."""
_TENSORS = 3


class GradientTrace:
    """Compares a few gradients after the last backward of a step with what is then measured.

    Where the optimizer steps FP32 copies, whose gradients the script makes of those of the model's
    own parameters, all of both are compared.
    """

    def __init__(self) -> None:
        self.loss_factor: Scalar | None = None
        """By what the loss was multiplied last; only where backward makes no gradients of the
        optimizer's own tensors, of which the division by it would be seen."""
        self._before: list[torch.Tensor] | None = None
        """Parts of the gradients as the last backward left them; None: not looked at."""
        self._makes_none = False
        """The last backward has made none of the optimizer's gradients."""
        self._possible = True

    def backward_begins(self, roots: object, sequence: int) -> None:
        """Look at how the loss was made, if step `sequence` is looked at."""
        root = roots[0] if isinstance(roots, (list, tuple)) and roots else roots
        looked_at = _is_due(sequence) and self._makes_none
        self.loss_factor = constant_factor(root) if looked_at else None

    def backward_ended(self, plan: MeasurementPlan, sequence: int, *, made_any: bool) -> None:
        """Keep parts of the gradients that backward has left, if step `sequence` is looked at.

        made_any: whether it has made any of the gradients of `plan`, or added to them.
        """
        self._before, self._makes_none = None, not made_any
        if made_any and self._looks_at(plan, sequence):
            self._before = self._tried(lambda: [part.clone() for part in _parts(plan)])

    def changes(self, plan: MeasurementPlan, sequence: int) -> tuple[Scalar, Scalar] | None:
        """Return what has become of the gradients, as they stand, since backward.

        The first number is that by which they were multiplied, as the ratio of norms: 1 exactly, if
        nothing has changed them; NaN, if it is of 0 or of what is not finite. The second is 1 if
        NaN or Inf were replaced by finite numbers, else 0. None where that is not known, or the
        step is not looked at.
        """
        before, self._before = self._before, None
        if not self._looks_at(plan, sequence):
            return None
        return self._tried(lambda: _changes(plan, before))

    def _looks_at(self, plan: MeasurementPlan, sequence: int) -> bool:
        return self._possible and _is_due(sequence) and accelerator.is_supported(plan.device)

    def _tried(self, look: Callable[[], T]) -> T | None:
        """Return what `look` does; None from then on where gradients are of a kind that raises."""
        try:
            return look()
        except (RuntimeError, TypeError) as error:
            pass_on(error)
            self._possible = False
            return None


def _changes(
    plan: MeasurementPlan, before: list[torch.Tensor] | None
) -> tuple[Scalar, Scalar] | None:
    if copied := _gradients(plan.copies):
        before, now = _gradients(source() for source in plan.sources), copied
    else:
        now = _parts(plan)
        if before is not None and len(before) != len(now):
            return None
    if not before or not now:
        return None
    norm_before, norm = _norm(before), _norm(now)
    replaced = torch.isfinite(norm) & ~torch.isfinite(norm_before)
    factor, flag = scalar_of(norm / norm_before), scalar_of(replaced.to(norm.dtype))
    return None if factor is None or flag is None else (factor, flag)


def _is_due(sequence: int) -> bool:
    interval = _EARLY_INTERVAL if sequence <= _EARLY_STEPS else _INTERVAL
    return sequence % interval == 0


def _parts(plan: MeasurementPlan) -> list[torch.Tensor]:
    """Return the first elements of a few gradients as they are; of those there are."""
    slots = plan.slots
    places = sorted({len(slots) * part // _TENSORS for part in range(_TENSORS)} | {len(slots) - 1})
    found = (slots[place].parameter.grad for place in places if slots)
    local = [local_of(gradient.detach()) for gradient in found if gradient is not None]
    return [
        (each if each.is_contiguous() else each[:1]).flatten()[:_ELEMENTS]  # copies no whole one
        for each in local
        if each.layout is torch.strided and each.is_floating_point() and each.numel()
    ]


def _gradients(parameters: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    found = [each.grad for each in parameters if each is not None]
    return [local_of(gradient.detach()) for gradient in found if gradient is not None]


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
