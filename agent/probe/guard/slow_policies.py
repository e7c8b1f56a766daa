"""Policies that act over many steps: a lower learning rate, wider precision, a checkpoint."""

import copyreg
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_map

from mp_agent.catalog.guard import Action, Values
from mp_agent.probe.guard.outcome import UpdateOutcome
from mp_agent.probe.optimizers.plan import fsdp_dtype


class ObservedUpdate(NamedTuple):
    """What the slower policies see of an update. Of several in a step the first begins it."""

    is_trouble: bool
    begins_step: bool = True
    is_urgent: bool = False
    """Trouble that sets a policy off at once."""


class TroubleTrigger:
    """Sets a policy off: enough troubled steps within some steps, and not too often."""

    def __init__(self, values: Values) -> None:
        self._troubles = int(values["troubles"])
        self._trouble_steps = int(values["trouble_steps"])
        self._actions_max = int(values["actions_max"])
        self._window_steps = int(values["window_steps"])
        self._step = 0
        self._troubled: deque[int] = deque()
        self._last_troubled = 0
        self._acted: deque[int] = deque()
        self.is_none_left = False
        """The last update would have set the policy off, which had acted too often."""

    def observe(self, update: ObservedUpdate) -> bool:
        """Add an update; return whether the policy is to act."""
        self._step += update.begins_step
        self.is_none_left = False
        _drop_before(self._troubled, self._step - self._trouble_steps + 1)
        _drop_before(self._acted, self._step - self._window_steps + 1)
        is_known = self._last_troubled == self._step and not update.is_urgent
        if not update.is_trouble or is_known:
            return False
        self._last_troubled = self._step
        self._troubled.append(self._step)
        if len(self._troubled) < self._troubles and not update.is_urgent:
            return False
        self._troubled.clear()
        self.is_none_left = len(self._acted) >= self._actions_max
        if not self.is_none_left:
            self._acted.append(self._step)
        return not self.is_none_left


def _drop_before(steps: deque[int], first: int) -> None:
    while steps and steps[0] < first:
        steps.popleft()


class Requests:
    """The same on every rank at the same step, since all ranks decide alike."""

    def __init__(self) -> None:
        self.stop = False
        """Whether a stop was requested; never reset."""
        self._checkpoint = False
        self._unreported: int | None = None

    def ask_for_checkpoint(self, step: int) -> None:
        """Have `take_checkpoint` return True, and `take_unreported` the step, once each."""
        self._checkpoint = True
        self._unreported = step

    def take_unreported(self) -> int | None:
        """Return the step of a request that callbacks are to be called with; None without one."""
        step, self._unreported = self._unreported, None
        return step

    def take_checkpoint(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        asked, self._checkpoint = self._checkpoint, False
        return asked


class RateReduction:
    """The factor of the learning rate: `rate_factor` for `hold_steps`, then up to 1 in as many."""

    def __init__(self, values: Values) -> None:
        self.trigger = TroubleTrigger(values)
        self._factor = float(values["rate_factor"])
        self._hold_steps = int(values["hold_steps"])
        self._steps_left = 0

    def observe(self, update: ObservedUpdate) -> bool:
        """Add an update; return whether the rate is lowered from now on."""
        if update.begins_step:
            self._steps_left = max(self._steps_left - 1, 0)
        begins = self.trigger.observe(update)
        if begins:
            self._steps_left = 2 * self._hold_steps
        return begins

    @property
    def factor(self) -> float:
        """What the rate of the next update is multiplied by; comes back in equal parts."""
        if self._steps_left >= self._hold_steps:
            return self._factor
        back = 1.0 - self._steps_left / self._hold_steps
        return self._factor + (1.0 - self._factor) * back


Compute: TypeAlias = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the module, how it computes by itself, and its arguments."""


def switched(module: nn.Module, compute: Compute) -> Callable[[], None]:
    """Have calls of `module` made by `compute`; return what undoes it.

    The module gets its own class, as in FSDP2. Copies and pickled ones, such as an
    average of the weights or a checkpoint, are of the plain class: a function in place of `forward`
    would be copied with them, and compute with the weights of the module that it was made for.
    """
    plain = type(module)

    class Switched(plain):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            def by_itself(*own_args: Any, **own_kwargs: Any) -> Any:
                return plain.__call__(self, *own_args, **own_kwargs)

            return compute(self, by_itself, args, kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            object.__setattr__(self, "__class__", plain)
            try:
                reduced = self.__reduce_ex__(protocol)
            finally:
                object.__setattr__(self, "__class__", Switched)
            # Pickle lets this function make an object of the present class alone.
            if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
                return plain.__new__, *reduced[1:]
            return reduced

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Switched, name, getattr(plain, name))

    def undo() -> None:
        if type(module) is Switched:
            object.__setattr__(module, "__class__", plain)

    object.__setattr__(module, "__class__", Switched)
    return undo


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which wrappers hold the module, which names of modules leave out."""


class PrecisionSwitch:
    """Switches modules when trouble repeats, and back after `hold_steps` without any."""

    def __init__(self, values: Values, *, dry_run: bool) -> None:
        self.trigger = TroubleTrigger(values)
        self._patterns = str(values["modules"]).split()
        self._wide = _in_bf16 if values["dtype"] == "bf16" else _in_fp32
        self._hold_steps = int(values["hold_steps"])
        self._dry_run = dry_run
        self._quiet_steps = 0
        self._is_switched = False
        self._restore: list[Callable[[], None]] = []

    def observe(self, update: ObservedUpdate, model: nn.Module | None) -> bool:
        """Add an update; return whether modules are switched from now on."""
        if self._is_switched:
            self._quiet_steps = 0 if update.is_trouble else self._quiet_steps + update.begins_step
            if self._quiet_steps >= self._hold_steps:
                self.switch_back()
            return False
        if model is None or not self.trigger.observe(update):
            return False
        if not (found := list(self._found_in(model))):
            return False
        self._is_switched, self._quiet_steps = True, 0
        if not self._dry_run:
            for module in found:
                self._restore.append(switched(module, self._wide))
        return True

    def switch_back(self) -> None:
        """Let all modules compute as before."""
        self._is_switched = False
        while self._restore:
            self._restore.pop()()

    def _found_in(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the outermost modules of which the name matches; none where FSDP sets the dtype.

        Nor scripted ones, which torch does not let compute in another way.
        """
        if _is_mixed_by_fsdp(model) or isinstance(model, torch.jit.ScriptModule):
            return
        if "*" in self._patterns:
            yield model
            return
        found: list[str] = []
        for name, module in model.named_modules():
            plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            is_within = any(name.startswith(outer + ".") for outer in found)
            if plain and not is_within and any(fnmatchcase(plain, p) for p in self._patterns):
                found.append(name)
                yield module


def _is_mixed_by_fsdp(model: nn.Module) -> bool:
    """Return whether weights are narrower while modules compute than they are in between."""
    modules = list(model.modules())
    if fsdp_dtype(modules) not in (None, torch.float32):
        return True
    wrapped = [module for module in modules if isinstance(module, FullyShardedDataParallel)]
    return any(module.mixed_precision.param_dtype is not None for module in wrapped)


def _in_fp32(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute without autocast on inputs in FP32; as before where the weights are narrower."""
    weights = [each for each in module.parameters() if each.is_floating_point()]
    if any(each.dtype != torch.float32 for each in weights):
        return forward(*args, **kwargs)
    device = weights[0].device.type if weights else "cpu"
    with torch.autocast(device, enabled=False):
        return forward(*tree_map(_widened, args), **tree_map(_widened, kwargs))


def _in_bf16(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute with autocast to BF16 in place of the one that is on; as before where none is."""
    weights = [each for each in module.parameters() if each.is_floating_point()]
    device = weights[0].device.type if weights else "cpu"
    if not torch.is_autocast_enabled(device):
        return forward(*args, **kwargs)
    with torch.autocast(device, dtype=torch.bfloat16):
        return forward(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


class SlowPolicies:
    """Those of one process. Outcomes are the same on all ranks, and so is what is done."""

    def __init__(
        self, policies: Mapping[str, Values], requests: Requests, *, dry_run: bool
    ) -> None:
        self._requests = requests
        self._dry_run = dry_run
        rate, precision = policies.get("lower_learning_rate"), policies.get("widen_precision")
        self._rate = None if rate is None else RateReduction(rate)
        self._precision = None if precision is None else PrecisionSwitch(precision, dry_run=dry_run)
        checkpoint, stop = policies.get("request_checkpoint"), policies.get("request_stop")
        self._checkpoint = None if checkpoint is None else TroubleTrigger(checkpoint)
        self._stop = None if stop is None else TroubleTrigger(stop)

    @property
    def rate_factor(self) -> float:
        """What the learning rate of the next update is multiplied by."""
        return 1.0 if self._rate is None else self._rate.factor

    def observe(
        self, outcome: UpdateOutcome, model: nn.Module | None, step: int, *, begins_step: bool
    ) -> list[Action]:
        """Add an update, and act; return what is done.

        step: the trainer's, under way. begins_step: whether the update is the first of its step.
        """
        actions: list[Action] = []
        seen = ObservedUpdate(is_trouble=outcome.is_trouble, begins_step=begins_step)
        if self._rate is not None and self._rate.observe(seen):
            actions.append(Action.LOWER_LEARNING_RATE)
        if self._precision is not None and self._precision.observe(seen, model):
            actions.append(Action.WIDEN_PRECISION)
        if self._checkpoint is not None and self._checkpoint.observe(seen):
            actions.append(Action.REQUEST_CHECKPOINT)
            if not self._dry_run:
                self._requests.ask_for_checkpoint(step)
        # The next update would write NaN or Inf into the weights.
        urgent = seen._replace(is_urgent=outcome.is_last_skip)
        if self._stop is not None and self._stop.observe(urgent):
            actions.append(Action.REQUEST_STOP)
            self._requests.stop = self._requests.stop or not self._dry_run
        if any(trigger.is_none_left for trigger in self._triggers):
            actions.append(Action.NONE_LEFT)
        return actions

    def close(self) -> None:
        """Restore what is switched."""
        if self._precision is not None:
            self._precision.switch_back()

    @property
    def _triggers(self) -> list[TroubleTrigger]:
        found = [] if self._rate is None else [self._rate.trigger]
        found += [] if self._precision is None else [self._precision.trigger]
        return found + [each for each in (self._checkpoint, self._stop) if each is not None]
