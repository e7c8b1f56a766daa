"""An update under the guard, and what is restored when it is refused.

Carries a verdict out: skips an optimizer's update, or scales its gradients down.
On the host the verdict is read: a skipped update is one without gradients, which every optimizer
of torch leaves alone, state included. Others, which may not look for absent gradients, step on
zeros, and what that has changed is put back (`rollback`). On a device it is not read. A fused
optimizer takes the verdict as `found_inf` and skips as it does for a GradScaler; for others the
gradients become 0, upon which momentum and weight decay still move the weights by what earlier
steps left.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from math import inf, isfinite, isnan
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mp_agent.catalog.guard import Values
from mp_agent.probe import accelerator
from mp_agent.probe.guard.outcome import Outcomes, UpdateOutcome
from mp_agent.probe.guard.verdict import RATES_HELD, RATES_LET, Judge, UpdateVerdict


class Rollback:
    """Copies of an optimizer's parameters and of their state: as much memory as these, until then.

    Also of those of optimizers that it wraps, and of what the groups hold but learning rates.
    Tensors are put back in place, as other objects may hold them. Other attributes of an optimizer
    are not put back.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        wrapped = list(_wrapped_by(optimizer))
        optimizers = [optimizer, *wrapped]
        own = {p for p in _parameters_of(optimizer) if p.grad is not None}
        # Those of another optimizer, such as copies in FP32, may get gradients only in the step.
        others = {parameter for each in wrapped for parameter in _parameters_of(each)}
        others.difference_update(_parameters_of(optimizer))
        self._parameters = {each: each.detach().clone() for each in own | others}
        states = [each.state for each in optimizers]
        self._entries = [(state, dict(state)) for state in states]
        groups = [group for each in optimizers for group in each.param_groups]
        tables = [table for state in states for table in map(state.get, list(state))]
        self._tables = [_Table(table) for table in (*tables, *groups) if isinstance(table, dict)]

    def restore(self) -> None:
        """Put everything back."""
        for parameter, values in self._parameters.items():
            parameter.detach().copy_(values)
        for state, before in self._entries:
            state.clear()
            state.update(before)
        for table in self._tables:
            table.restore()


def _wrapped_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that it holds, itself or in a collection, and what they hold."""
    seen = {id(optimizer)}
    waiting: list[object] = [optimizer]
    while waiting:
        holder = waiting.pop()
        for value in vars(holder).values():
            parts: Iterable[object] = (value,)
            if isinstance(value, list | tuple):
                parts = value
            elif isinstance(value, dict):
                parts = value.values()
            for part in parts:
                if isinstance(part, Optimizer) and id(part) not in seen:
                    seen.add(id(part))
                    waiting.append(part)
                    yield part


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class _Table:
    """The state of one parameter, or a group, and copies of its values."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table
        self._values = {
            name: (value, _copied(value))
            for name, value in table.items()
            if name not in ("params", "lr")
        }

    def restore(self) -> None:
        for name in set(self._table) - set(self._values) - {"params", "lr"}:
            del self._table[name]
        for name, (value, copied) in self._values.items():
            if isinstance(value, torch.Tensor):
                value.detach().copy_(copied)
            self._table[name] = value if isinstance(value, torch.Tensor) else copied


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)


class HeldRates:
    """Follows the learning rates of an optimizer's groups, and says which of them have jumped.

    What the script sets is known on the host before the update, on the rank where it is set: no
    weight is moved by such a rate, and no other rank has to be asked. A rate that a schedule of
    torch's may reach by itself is no jump, nor is a rate that the group had before, as after a
    warm restart. A rate on a device is not read, which would wait for it.
    """

    def __init__(self, values: Values) -> None:
        self._factor = float(values["factor"])
        self._warmup_steps = int(values["warmup_steps"])
        self._actions_max = int(values["actions_max"])
        self._window_steps = int(values["window_steps"])
        self._step = 0
        self._held: deque[int] = deque()
        """Updates on which rates were held lately."""
        self._known: dict[tuple[int, int], tuple[float, int]] = {}
        """Highest rate, and number of updates, by place and identity of the group."""
        self.limits: dict[int, float] = {}
        """What the rates of groups are held at in the update under way, by place."""
        self.is_none_left = False

    def look(self, optimizer: Optimizer) -> None:
        """Look at the rates with which the next update is about to be made."""
        self._step += 1
        while self._held and self._held[0] <= self._step - self._window_steps:
            self._held.popleft()
        self.limits = {}
        rates = {place: _rate_of(group) for place, group in enumerate(optimizer.param_groups)}
        for place, group in enumerate(optimizer.param_groups):
            highest, steps = self._known.get((place, id(group)), (0.0, 0))
            if steps >= self._warmup_steps and rates[place] > max(
                self._factor * highest, _highest_of_schedule(group)
            ):
                self.limits[place] = highest
        self.is_none_left = bool(self.limits) and len(self._held) >= self._actions_max
        if self.is_none_left:
            self.limits = {}
        elif self.limits:
            self._held.append(self._step)
        self._known = {
            (place, id(group)): self._with(place, group, rates[place])
            for place, group in enumerate(optimizer.param_groups)
        }

    def _with(self, place: int, group: dict[str, Any], rate: float) -> tuple[float, int]:
        highest, steps = self._known.get((place, id(group)), (0.0, 0))
        if place in self.limits:
            return highest, steps
        return max(highest, rate) if isfinite(rate) else highest, steps + (0.0 < rate < inf)


def _rate_of(group: Mapping[str, Any]) -> float:
    """Return the rate of a group, infinite for NaN; 0 for one on a device, or that is not there."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate = float(rate) if accelerator.is_on_host(rate.device) and rate.numel() == 1 else 0.0
    if not isinstance(rate, int | float):
        return 0.0
    return inf if isnan(rate) else float(rate)


def _highest_of_schedule(group: Mapping[str, Any]) -> float:
    known = [group.get(name) for name in ("initial_lr", "max_lr")]
    return max((float(one) for one in known if isinstance(one, int | float)), default=0.0)


_ABSENT = object()


class GuardedUpdate:
    """One update under way; `finish` restores what was changed for it."""

    def __init__(
        self,
        optimizer: Optimizer,
        verdict: UpdateVerdict,
        rate_factor: float = 1.0,
        limits: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """rate_factor: what the learning rates of all groups are multiplied by.

        limits: what the rates of single groups are set to before that, by their place.
        """
        self._optimizer = optimizer
        self._set_aside: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._rollback: Rollback | None = None
        self._attributes: dict[str, Any] = {}
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []
        """Groups, their rates, and what these are lowered to."""
        try:
            if rate_factor != 1.0 or limits:
                self._lower_rates(rate_factor, limits)
            if accelerator.is_on_host(verdict.norm.device):
                self._carry_out_on_host(verdict)
            else:
                self._carry_out_on_device(verdict)
        except BaseException:
            self.finish()
            raise

    def finish(self) -> None:
        """Restore the gradients, the learning rates and the optimizer's attributes.

        A signal handler may raise within: what is left is then restored when this is called again.
        """
        while self._rates:
            group, before, lowered = self._rates[-1]
            if group.get("lr") is lowered:  # else the script has set another one meanwhile
                group["lr"] = before
            self._rates.pop()
        if self._rollback is not None:
            self._rollback.restore()
            self._rollback = None
        while self._set_aside:
            parameter, gradient, substitute = self._set_aside[-1]
            if parameter.grad is substitute:  # else the script has set another one meanwhile
                parameter.grad = gradient
            self._set_aside.pop()
        for name, value in self._attributes.items():
            if value is _ABSENT:
                delattr(self._optimizer, name)
            else:
                setattr(self._optimizer, name, value)
        self._attributes.clear()

    @property
    def rates_of_script(self) -> dict[int, Any]:
        """Learning rates that are lowered at present as they were, by the number of the group."""
        groups = {id(group): number for number, group in enumerate(self._optimizer.param_groups)}
        return {
            groups[id(group)]: before
            for group, before, lowered in self._rates
            if id(group) in groups and group.get("lr") is lowered
        }

    def _carry_out_on_host(self, verdict: UpdateVerdict) -> None:
        if bool(verdict.is_skipped):
            is_of_torch = type(self._optimizer).step.__module__.partition(".")[0] == "torch"
            if not is_of_torch:
                self._rollback = Rollback(self._optimizer)
            for parameter, gradient in _gradients(self._optimizer):
                substitute = None if is_of_torch else torch.zeros_like(gradient)
                self._set_aside.append((parameter, gradient, substitute))
                parameter.grad = substitute
        elif (coefficient := float(verdict.coefficient)) != 1.0:
            for _, gradient in _gradients(self._optimizer):
                _local(gradient).mul_(coefficient)

    def _carry_out_on_device(self, verdict: UpdateVerdict) -> None:
        if _takes_found_inf(self._optimizer):
            found = verdict.is_skipped.to(torch.float32)
            known = getattr(self._optimizer, "found_inf", None)
            if isinstance(known, torch.Tensor):
                found = torch.maximum(found, known.to(torch.float32))
            self._put("found_inf", found)
            if not hasattr(self._optimizer, "grad_scale"):
                self._put("grad_scale", None)
        else:
            for _, gradient in _gradients(self._optimizer):
                _local(gradient).masked_fill_(verdict.is_skipped, 0.0)
        coefficients: dict[torch.dtype, torch.Tensor] = {}
        for _, gradient in _gradients(self._optimizer):
            local = _local(gradient)
            if local.dtype not in coefficients:
                real = torch.float32 if local.is_complex() else local.dtype
                coefficients[local.dtype] = verdict.coefficient.to(real)
            local.mul_(coefficients[local.dtype])

    def _lower_rates(self, factor: float, limits: Mapping[int, float]) -> None:
        """Lower what the update uses, not what schedulers and checkpoints read between updates.

        A group without a rate, whose optimizer finds one by itself (Adafactor), is left alone.
        """
        for place, group in enumerate(self._optimizer.param_groups):
            rate = group.get("lr")
            if isinstance(rate, int | float | torch.Tensor):
                limit = limits.get(place)
                # 0 times a rate that is not finite would be NaN.
                lowered = rate * factor if limit is None else _as(rate, limit * factor)
                self._rates.append((group, rate, lowered))
                group["lr"] = lowered

    def _put(self, name: str, value: object) -> None:
        self._attributes[name] = getattr(self._optimizer, name, _ABSENT)
        setattr(self._optimizer, name, value)


def _as(rate: float | torch.Tensor, value: float) -> float | torch.Tensor:
    return torch.full_like(rate, value) if isinstance(rate, torch.Tensor) else value


def _gradients(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, parameter.grad


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, in the same memory."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _takes_found_inf(optimizer: Optimizer) -> bool:
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and all(group.get("fused") for group in optimizer.param_groups)


class GuardedOptimizer:
    """The history of an optimizer's updates, and the one under way; keeps no parameter alive."""

    def __init__(self, policies: Mapping[str, Values], device: torch.device) -> None:
        self.device = device
        self._judge = Judge(policies, device)
        values = policies.get("hold_learning_rate")
        self._held = None if values is None else HeldRates(values)
        self._outcomes = Outcomes()
        self._update: GuardedUpdate | None = None

    def look_at_rates(self, optimizer: Optimizer, numbers: torch.Tensor) -> None:
        """Add to this rank's part whether a learning rate has jumped, and whether it is held."""
        if self._held is not None:
            self._held.look(optimizer)
            numbers[RATES_HELD] = float(bool(self._held.limits))
            numbers[RATES_LET] = float(self._held.is_none_left)

    def judge(self, agreed: torch.Tensor, ranks: int) -> tuple[UpdateVerdict, list[UpdateOutcome]]:
        """Return the verdict on the next update, and the outcomes that are due."""
        verdict = self._judge.judge(agreed, ranks)
        return verdict, self._outcomes.add(verdict)

    def carry_out(self, optimizer: Optimizer, verdict: UpdateVerdict, rate_factor: float) -> None:
        """Change the update under way; until `finish`."""
        limits = {} if self._held is None else self._held.limits
        self._update = GuardedUpdate(optimizer, verdict, rate_factor, limits)

    def finish(self) -> None:
        """Restore what was changed for the update."""
        if self._update is not None:
            self._update.finish()
        self._update = None

    @property
    def rates_of_script(self) -> Mapping[int, Any]:
        """Learning rates that are lowered for the update under way as they were, by group."""
        return {} if self._update is None else self._update.rates_of_script
