"""The loss that a backward starts from: unscaled, summed over all of its roots."""

import weakref
from collections.abc import Iterable

import torch

from mp_agent.probe.scalars import Scalar, add, scalar_of


class ScaledLosses:
    """Losses as they were before a GradScaler scaled them, until the next backward has begun."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], Scalar]] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def note(self, outputs: object, scaled: object) -> None:
        """Remember what each of the `scaled` tensors was, among `outputs`, before."""
        for before, after in zip(_listed(outputs), _listed(scaled), strict=False):
            loss = scalar_of(before)
            if loss is not None and isinstance(after, torch.Tensor):
                self._before[id(after)] = weakref.ref(after), loss

    def clear(self) -> None:
        """Forget all losses."""
        self._before.clear()

    def knows(self, roots: object) -> bool:
        """Return whether any of the roots of a backward is a scaler's result."""
        return any(self.before(root) is not None for root in _listed(roots))

    def before(self, root: object) -> Scalar | None:
        """Return what `root` was before it was scaled; None when it is no scaler's result."""
        found = self._before.get(id(root))
        return found[1] if found is not None and found[0]() is root else None


def loss_of(
    roots: object, seeds: object, scaled: ScaledLosses, inverse_scale: Scalar
) -> Scalar | None:
    """Return the sum of the roots that are single numbers, each times the gradient it is seeded by.

    inverse_scale: 1 / the scale of what was computed from several scaled losses. Returns None when
    there is no such root.
    """
    total: Scalar | None = None
    for root, seed in _seeded(roots, seeds):
        weight = 1.0 if seed is None else scalar_of(seed)
        loss = scaled.before(root)
        if loss is None and (loss := scalar_of(root)) is not None and scaled:
            loss = loss * inverse_scale
        if loss is not None and weight is not None:
            total = add(total, loss if seed is None else loss * weight)
    return total


def constant_factor(root: object) -> Scalar | None:
    """Return the constant that a product was multiplied by last; None where there is none.

    As in `(loss * 2 ** k).backward()`: of a hand-made loss scale nothing else is seen.
    """
    node = getattr(root, "grad_fn", None)
    if node is None or node.name() != "MulBackward0":
        return None
    operands = [each for each in (node._saved_self, node._saved_other) if each is not None]
    # Of two factors that both need gradients, both are saved.
    return scalar_of(operands[0]) if len(operands) == 1 else None


def _seeded(roots: object, seeds: object) -> Iterable[tuple[object, object]]:
    listed = _listed(roots)
    gradients = [None] * len(listed) if seeds is None else _listed(seeds)
    return zip(listed, gradients, strict=False)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
