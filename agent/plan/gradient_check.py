"""Compares gradients with central finite differences of the loss, module by module, in FP64.

A module disagrees only if no direction agrees, of several at the weights and next to them, each at
the step sizes with the least error: a kink of the loss is met by some of them alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import factorial, inf, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mp_agent.errors import CompareError
from mp_agent.plan.execution.calls import Loss, in_plain_thread, loss_of, scalar
from mp_agent.plan.execution.errors import as_real
from mp_agent.plan.execution.lockstep import Randomness
from mp_agent.plan.execution.precision import cast
from mp_agent.plan.execution.session import copy_of, devices_of, first_batch, uncompiled, unwrapped
from mp_agent.plan.gradient_report import GradientMismatch, GradientReport

Progress = Callable[[str, str, int], None]

_STEPS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Of a direction whose entries are as large as the weights."""
_STEP_ERROR = 10.0
"""Error of a difference, in units of its step: what the curvature and kinks of the loss leave."""
_NOISES = 8.0
_MEASURED_TO = 0.05
"""A limit above which a step says nothing."""
_ABOUT_AS_GOOD = 10.0
"""Steps with limits within this factor of the smallest one count alike."""
_AGREEING = 2
"""Directions of which a module agrees; in one alone an error may cancel."""
_NEARBY = 1e-2
"""Distance of the second point from the weights, of the direction's entries."""
_SAME = 1e-9
"""Relative difference of two passes that sums in another order may make."""
_NOISE_SPACING = 1e-6
_NOISE_POINTS = 8
_UNKNOWN_SIZE = 0.1
_SEED = 20


def check_gradients(
    model: nn.Module,
    batch: Any,
    loss: Any,
    *,
    progress: Progress = lambda candidate, stage, count: None,
) -> GradientReport:
    """Check the gradients of a model, which is itself not run.

    Raises CompareError, naming the argument, for what cannot run in FP64.
    """
    if not isinstance(model, nn.Module):
        raise CompareError(f"model: {type(model).__name__} is not a torch.nn.Module")
    inner, notes = unwrapped(model)
    batch = first_batch(batch)
    devices = devices_of(inner, batch)
    found: list[GradientReport] = []
    with torch.inference_mode(False), uncompiled():
        objective = _Objective(_own_copy(inner), batch, loss_of(loss))
        check = _Check(objective, type(inner).__name__, notes, progress)
        device = devices[0] if devices else torch.device("cpu")
        in_plain_thread(device, lambda: found.append(check.run()))
    return found[0]


def _own_copy(model: nn.Module) -> nn.Module:
    """Return a copy in FP64 that shares no weight, so that it can be changed."""
    copied = copy_of(model, lambda name: torch.float64)
    for parameter in copied.parameters():
        parameter.data = parameter.data.clone()
    return copied


class _Objective:
    """The loss as a function of the weights: random numbers and buffers are the same each time."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss) -> None:
        self.model = model
        self._batch, self._loss = batch, loss
        self._randomness = Randomness.now()
        self._buffers = [
            (module, name, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def value(self) -> float:
        """Return the loss."""
        return float(self._forward().detach())

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter; those that get none are left out."""
        self.model.zero_grad(set_to_none=True)
        loss = self._forward()
        if loss.requires_grad:
            with _WithoutSinglePrecision():  # for what is computed again
                loss.backward()  # type: ignore[no-untyped-call]
        named = list(self.model.named_parameters())
        found = {name: as_real(one.grad) for name, one in named if one.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found

    def _forward(self) -> Tensor:
        self._randomness.restore()
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer.clone()
        with _WithoutSinglePrecision():
            return scalar(self._loss(self.model, cast(self._batch, torch.float64)))


class _WithoutSinglePrecision(TorchFunctionMode):
    """Leaves FP64 as it is where a model casts to FP32, which for 16 bits is the wider format."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        wide = any(isinstance(one, Tensor) and one.dtype is torch.float64 for one in args)
        if wide and func is Tensor.float:
            return args[0]
        if wide:
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(one) for name, one in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(slots=True, kw_only=True, eq=False)
class _Point:
    """Weights at which gradients are checked."""

    weights: dict[str, Tensor]
    sizes: dict[str, float]
    """Root mean squares of the weights; the usual one of those that are all zero."""
    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Slope:
    """Derivatives along one direction, the better or worse of several steps."""

    autograd: float
    differences: float
    error: float
    limit: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.limit


@dataclass(slots=True)
class _Check:
    objective: _Objective
    kind: str
    notes: tuple[str, ...]
    progress: Progress
    noise: float = 0.0
    _generator: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(_SEED)
    )
    _nearby: _Point | None = None

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        named = self.objective.model.named_parameters()
        return {name: one for name, one in named if one.requires_grad}

    def run(self) -> GradientReport:
        """Check all modules."""
        owned = self._owned()
        with self._running_in_fp64():
            with _order_of_calls(self.objective.model) as order:
                first = self.objective.value()
            second = self.objective.value()
        if not (isfinite(first) and isfinite(second)):
            raise CompareError(f"loss: is {first:g}; a finite one is needed to check gradients")
        if not _same(first, second):
            return self._report(owned, (first, second), unrepeatable="loss")
        with self._running_in_fp64():
            point = self._point()
            again = self.objective.gradients()
        if not _equal(point.gradients, again):
            return self._report(owned, (first, second), unrepeatable="gradients")
        self.noise = self._noise(point)
        modules = sorted(owned, key=lambda name: order.get(name, -1), reverse=True)
        mismatches, unmeasured, limits = [], [], [0.0]
        for number, module in enumerate(modules, 1):
            self.progress("gradients", "checking modules", number)
            found = self._module(point, module, owned[module])
            if isinstance(found, GradientMismatch):
                mismatches.append(found)
            elif found is None:
                unmeasured.append(module)
            else:
                limits.append(found)
        return self._report(
            owned,
            (first, second),
            mismatches=tuple(mismatches),
            following=_following(modules, mismatches, unmeasured),
            unmeasured=tuple(unmeasured),
            coarsest=max(limits),
        )

    def _report(
        self,
        owned: dict[str, list[str]],
        losses: tuple[float, float],
        *,
        unrepeatable: str = "",
        mismatches: tuple[GradientMismatch, ...] = (),
        following: str = "",
        unmeasured: tuple[str, ...] = (),
        coarsest: float = 0.0,
    ) -> GradientReport:
        return GradientReport(
            model=self.kind,
            parameters=sum(one.numel() for one in self.objective.model.parameters()),
            modules=len(owned),
            losses=losses,
            unrepeatable=unrepeatable,
            noise=self.noise,
            mismatches=mismatches,
            following=following,
            unmeasured=unmeasured,
            coarsest=coarsest,
            notes=self.notes,
        )

    def _owned(self) -> dict[str, list[str]]:
        """Return the parameters that are trained, by the module that has them itself."""
        owned: dict[str, list[str]] = {}
        for name in self._parameters:
            owned.setdefault(name.rpartition(".")[0], []).append(name)
        if not owned:
            raise CompareError("model: has no parameter that requires a gradient")
        return owned

    @contextmanager
    def _running_in_fp64(self) -> Iterator[None]:
        try:
            yield
        except CompareError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise CompareError(
                "model: does not run in FP64, in which gradients are checked: "
                f"{type(error).__name__}: {text}"
            ) from error

    def _point(self) -> _Point:
        weights = {name: as_real(one.detach()).clone() for name, one in self._parameters.items()}
        return _Point(
            weights=weights,
            sizes=_sizes(weights),
            loss=self.objective.value(),
            gradients=self.objective.gradients(),
        )

    def _module(
        self, point: _Point, module: str, names: Sequence[str]
    ) -> GradientMismatch | float | None:
        """Return how a module disagrees, else its limit; None where that cannot be measured."""
        if broken := [name for name in names if _broken(point, name)]:
            return _mismatch(module, self._slope(point, names), broken, finite=False)
        agreeing, apart = [], []
        for near in (False, False, True, True):
            with self._next_to(point) if near else nullcontext(point) as place:
                slope = self._slope(place, names)
            if not slope.agrees:
                apart.append(slope)
            elif slope.limit <= _MEASURED_TO:
                agreeing.append(slope.limit)
                if len(agreeing) == _AGREEING:
                    break
        if agreeing:
            return max(agreeing)
        if len(apart) < _AGREEING:
            return None
        wrong = [name for name in names if not self._slope(point, [name]).agrees]
        return _mismatch(module, min(apart, key=lambda one: one.error), wrong or names)

    @contextmanager
    def _next_to(self, point: _Point) -> Iterator[_Point]:
        """Let the weights be others at a small distance, where there is none of their own kinks."""
        direction = self._direction(point, list(point.weights))
        if self._nearby is None:
            with self._moved(point, direction, _NEARBY):
                self._nearby = self._point()
        self._set(self._nearby.weights)
        try:
            yield self._nearby
        finally:
            self._set(point.weights)

    def _set(self, weights: dict[str, Tensor]) -> None:
        parameters = self._parameters
        for name, value in weights.items():
            as_real(parameters[name].data).copy_(value)

    def _direction(self, point: _Point, names: Sequence[str]) -> dict[str, Tensor]:
        """Return random entries, of each parameter as large as its own."""
        return {
            name: point.sizes[name]
            * torch.randn(
                point.weights[name].shape, generator=self._generator, dtype=torch.float64
            ).to(point.weights[name])
            for name in names
        }

    @contextmanager
    def _moved(self, point: _Point, direction: dict[str, Tensor], step: float) -> Iterator[None]:
        self._set({n: point.weights[n].add(one, alpha=step) for n, one in direction.items()})
        try:
            yield
        finally:
            self._set({name: point.weights[name] for name in direction})

    def _slope(self, point: _Point, names: Sequence[str]) -> _Slope:
        """Return the derivatives at the step that agrees best, of those with the least error."""
        direction = self._direction(point, names)
        known = [name for name in names if name in point.gradients]
        products = [point.gradients[name] * direction[name] for name in known]
        autograd = sum(float(one.sum()) for one in products)
        # Of a direction in which they happen to cancel, a relative error says nothing.
        usual = sqrt(sum(float(one.square().sum()) for one in products))
        if not (usual and isfinite(usual)):
            seen = [abs(self._difference(point, direction, step)[0]) for step in _STEPS[2:]]
            usual = max(seen)
            if not usual:  # the loss does not depend on them
                return _Slope(autograd, 0.0, 0.0 if autograd == 0.0 else inf, 0.0)
        slopes: list[_Slope] = []
        limits = sorted((self._limit(step, usual), step) for step in _STEPS)
        for limit, step in limits:
            if slopes and limit > _ABOUT_AS_GOOD * limits[0][0]:
                break
            differences, bend = self._difference(point, direction, step)
            scale = max(usual, abs(differences))
            error = abs(autograd - differences) / scale
            slopes.append(_Slope(autograd, differences, error, limit + bend / scale))
            if slopes[-1].agrees:
                break
        return min(slopes, key=lambda one: (not one.agrees, one.error))

    def _limit(self, step: float, usual: float) -> float:
        """Return the relative error below which a difference agrees, but for kinks."""
        noise = _NOISES * self.noise / step
        return _STEP_ERROR * step + (noise / usual if usual else inf)

    def _difference(
        self, point: _Point, direction: dict[str, Tensor], step: float
    ) -> tuple[float, float]:
        """Return the derivative, and half of what it differs by from one side to the other.

        By as much may a derivative at a kink, or close to one, differ from the central difference.
        """
        with self._moved(point, direction, step):
            above = self.objective.value()
        with self._moved(point, direction, -step):
            below = self.objective.value()
        return (above - below) / (2 * step), abs(above - 2 * point.loss + below) / (2 * step)

    def _noise(self, point: _Point) -> float:
        """Return the noise of the loss, from its high differences (Moré and Wild, ECnoise)."""
        direction = self._direction(point, list(point.weights))
        row = []
        for index in range(_NOISE_POINTS):
            with self._moved(point, direction, index * _NOISE_SPACING):
                row.append(self.objective.value())
        found = []
        for order in range(1, 6):
            row = [after - before for before, after in pairwise(row)]
            weight = factorial(order) ** 2 / factorial(2 * order)
            found.append(sqrt(weight * sum(one * one for one in row) / len(row)))
        rounding = 4 * torch.finfo(torch.float64).eps * abs(point.loss)
        return max(min(found[2:]), rounding)


def _sizes(weights: dict[str, Tensor]) -> dict[str, float]:
    sizes = {name: _rms(one) for name, one in weights.items()}
    known = sorted(size for size in sizes.values() if size) or [_UNKNOWN_SIZE]
    return {name: size or known[len(known) // 2] for name, size in sizes.items()}


def _mismatch(
    module: str, slope: _Slope, names: Sequence[str], *, finite: bool = True
) -> GradientMismatch:
    return GradientMismatch(
        module=module,
        parameters=tuple(name.rpartition(".")[2] for name in names),
        autograd=slope.autograd if finite else None,
        differences=slope.differences,
        error=slope.error,
        limit=slope.limit,
    )


def _broken(point: _Point, name: str) -> bool:
    gradient = point.gradients.get(name)
    return gradient is not None and not bool(gradient.isfinite().all())


def _following(
    modules: Sequence[str], mismatches: Sequence[GradientMismatch], unmeasured: Sequence[str]
) -> str:
    """Return the module that runs next after the first mismatch, and agrees; "" for none."""
    if not mismatches:
        return ""
    before = modules[: modules.index(mismatches[0].module)]
    known = [name for name in before if name not in unmeasured]
    return known[-1] if known else ""


@contextmanager
def _order_of_calls(model: nn.Module) -> Iterator[dict[str, int]]:
    """Note, of each module, the place of its last call in the forward pass."""
    order: dict[str, int] = {}
    places = count()

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, arguments: Any) -> None:
            order[name] = next(places)

        return note

    handles = [
        module.register_forward_pre_hook(noting(name)) for name, module in model.named_modules()
    ]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


def _same(first: float, second: float) -> bool:
    return abs(first - second) <= _SAME * max(abs(first), abs(second))


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(
        torch.allclose(
            one, second[n], _SAME, _SAME * _rms(one.nan_to_num(0.0, 0.0, 0.0)), equal_nan=True
        )
        for n, one in first.items()
    )


def _rms(weights: Tensor) -> float:
    return float(weights.square().mean().sqrt()) if weights.numel() else 0.0
