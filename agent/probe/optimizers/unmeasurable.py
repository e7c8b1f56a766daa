"""Leaves out gradients that cannot be measured, so that all others still are."""

from collections.abc import Callable, Sequence

import torch

from mp_agent.probe import accelerator
from mp_agent.ring.interruptions import pass_on

Gradients = Sequence[torch.Tensor | None]
Kind = tuple[type, torch.layout, torch.dtype, bool]


class Unmeasurable:
    """Kinds of gradients that failed when measured alone; they are left out from then on.

    Only what is no plain tensor counts as a kind: a plain one fails for another reason, such as a
    device without memory, and may be measured at the next step.
    """

    def __init__(self, note_unsupported: Callable[[str], None]) -> None:
        self._note_unsupported = note_unsupported
        self._kinds: set[Kind] = set()

    def left_out(self, gradients: Gradients) -> Gradients:
        """Return `gradients` with None in place of those that cannot be measured."""
        if not self._kinds:
            return gradients
        return [
            None if gradient is None or _kind(gradient) in self._kinds else gradient
            for gradient in gradients
        ]

    def find(self, gradients: Gradients, measure: Callable[[torch.Tensor], object]) -> bool:
        """Try each kind of odd gradients alone; return whether any failed that had not before."""
        known = len(self._kinds)
        tried: set[Kind] = set(self._kinds)
        for gradient in gradients:
            if gradient is None or (kind := _kind(gradient)) in tried or not _is_odd(kind):
                continue
            tried.add(kind)
            try:
                measure(gradient)
            except Exception as error:
                pass_on(error)
                if accelerator.is_sticky_error(error) or isinstance(error, torch.OutOfMemoryError):
                    return False  # no fault of the gradient
                self._kinds.add(kind)
                self._note_unsupported(f"gradients of type {_name(kind)}")
        return len(self._kinds) > known


def _kind(gradient: torch.Tensor) -> Kind:
    """Return what decides whether a gradient can be measured; asks no subclass."""
    layout: torch.layout = torch.Tensor.layout.__get__(gradient)  # type: ignore[attr-defined]
    dtype: torch.dtype = torch.Tensor.dtype.__get__(gradient)  # type: ignore[attr-defined]
    return type(gradient), layout, dtype, gradient.is_nested


def _is_odd(kind: Kind) -> bool:
    cls, layout, dtype, nested = kind
    plain = cls in (torch.Tensor, torch.nn.Parameter) and layout is torch.strided and not nested
    return not (plain and dtype.is_floating_point)


def _name(kind: Kind) -> str:
    cls, layout, dtype, nested = kind
    words = [cls.__name__, str(dtype).removeprefix("torch.")]
    if layout is not torch.strided:
        words.append(str(layout).removeprefix("torch."))
    return " ".join([*words, *(["nested"] if nested else [])])
