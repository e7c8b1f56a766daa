"""What the guard does to each update, and the columns in which it records it."""

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread, current_thread
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.catalog.guard import DRY_RUN, POLICIES_BY_NAME, Action, Values
from mp_agent.probe import accelerator
from mp_agent.probe.guard.loss_scales import LossScales, follow_skip
from mp_agent.probe.guard.outcome import ActionLog, Agreement, UpdateOutcome
from mp_agent.probe.guard.slow_policies import Requests, SlowPolicies
from mp_agent.probe.guard.update import GuardedOptimizer
from mp_agent.probe.guard.verdict import (
    LOSS_SCALES,
    GradientReader,
    UpdateVerdict,
    failed,
    skipped_by_scaler,
)
from mp_agent.probe.meeting import NotMet, cause_of
from mp_agent.probe.optimizers.roles import Role
from mp_agent.probe.scalars import Scalar, reciprocal, scalar_of
from mp_agent.probe.step.thread_progress import running_step
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.ring.interruptions import pass_on


class ActionColumns:
    """The columns of the actions that `policies` may take; those of others stay absent."""

    def __init__(self, policies: Iterable[str], context: TrackerContext, *, dry_run: bool) -> None:
        own = {POLICIES_BY_NAME[name].action for name in policies}
        self._columns = tuple(action.column for action in {*own, Action.NONE_LEFT})
        self._context = context
        self._weight = DRY_RUN if dry_run else 1.0

    def of(self, optimizer: Optimizer) -> dict[str, Scalar]:
        """Return the scalars of the step that the update is a part of, with 0 for each action."""
        scalars = self._scalars_of(optimizer)
        for column in self._columns:
            scalars.setdefault(column, 0.0)
        return scalars

    def note(
        self, scalars: dict[str, Scalar], action: Action, is_done: torch.Tensor | bool
    ) -> None:
        """Record whether something is done, for any optimizer; on a device it is not known here."""
        if action.column not in self._columns:
            return
        done = float(is_done) if isinstance(is_done, bool) else scalar_of(is_done)
        before = scalars.get(action.column, 0.0)
        if isinstance(done, torch.Tensor):
            value = done.to(torch.float64) * self._weight
            if isinstance(before, torch.Tensor):
                value = torch.maximum(value, before)
            if isinstance(before, torch.Tensor) or not before:
                scalars[action.column] = value
        elif done:
            scalars[action.column] = self._weight

    def _scalars_of(self, optimizer: Optimizer) -> dict[str, Scalar]:
        watched = self._context.registry.of(optimizer)
        if watched is None or watched.role is Role.SEPARATE:
            return {} if watched is None else watched.scalars
        return self._context.boundaries.of(watched).scalars


log = logging.getLogger("mp_agent")

_APART = "the guard where ranks cannot agree"


class TrainingGuard:
    """Acts on updates by policies; what the ranks do not agree on, none of them does.

    One collective belongs to each update that an optimizer or its scaler is asked for, so all ranks
    have to be asked for the same updates. `is_training`: whether updates are training at present.
    """

    def __init__(
        self,
        policies: Mapping[str, Values],
        context: TrackerContext,
        agreement: Agreement,
        *,
        dry_run: bool,
        fused_kernels: bool = True,
    ) -> None:
        self.requests = Requests()
        self._policies = policies
        self._columns = ActionColumns(policies, context, dry_run=dry_run)
        self._context = context
        self._agreement = agreement
        self._dry_run = dry_run
        self._reader = GradientReader(context.note_unsupported, fused_kernels=fused_kernels)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, GuardedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._slow = SlowPolicies(policies, self.requests, dry_run=dry_run)
        self._scales = LossScales(policies, dry_run=dry_run)
        self._log = ActionLog(dry_run=dry_run)
        self._thread: Thread | None = None
        self._running: int | None = None
        """`id` of the outermost optimizer whose update is under way, or has raised."""
        self._scaler_asks: tuple[GradScaler, Optimizer] | None = None
        """The scaler was asked for an update that no collective belongs to yet."""
        self._has_failed = False
        """What this rank was to do has failed: the others learn of it at the next update."""
        self._updated: set[int] = set()
        """`id` of the optimizers that have been updated in the step under way."""
        self._is_paused = False
        self._is_uneven = False
        self._is_off = False

    def not_training(self, stepping: bool) -> None:
        """Ignore updates while `stepping`: maybe one rank alone makes them, to fill in state."""
        self._is_paused = stepping

    def uneven_inputs(self, begins: bool) -> None:
        """Leave updates alone from now on, or no longer: a rank without inputs makes none."""
        self._is_uneven = begins

    def update_begins(self, optimizer: Optimizer) -> None:
        """Decide on the update that `optimizer` is about to make, and act on it."""
        if self._is_off or not self._is_of_training(optimizer):
            return
        if self._is_within_another(optimizer):
            return
        scaler = self._scaler_that_asks(optimizer)
        self._running, self._scaler_asks = id(optimizer), None
        if not self._has_met(optimizer):
            return
        guarded = self._guarded(optimizer)
        numbers = self._own_numbers(optimizer, guarded)
        with self._failure_shared():
            verdict = self._verdict(optimizer, guarded, numbers, scaler)
            if verdict is not None and not (self._dry_run or self._is_off):
                guarded.carry_out(optimizer, verdict, self._slow.rate_factor)
                if scaler is not None:
                    follow_skip(scaler, optimizer, verdict.is_skipped & verdict.is_scaler_skip)

    def update_ended(self, optimizer: Optimizer) -> None:
        """Restore what was changed for the update."""
        if (guarded := self._optimizers.get(optimizer)) is not None:
            guarded.finish()
        if self._running == id(optimizer):
            self._running = None

    def rates_of_script(self, optimizer: Optimizer) -> Mapping[int, Any]:
        """Return the learning rates that are lowered at present as they were, by their groups."""
        guarded = self._optimizers.get(optimizer)
        return {} if guarded is None else guarded.rates_of_script

    def out_of_reach(self) -> None:
        """Report that updates of an optimizer cannot be acted on."""
        self._context.note_unguarded("the guard of an optimizer whose step is replaced")

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Expect `optimizer` to be stepped by its scaler, or not to be."""
        if not self._is_off and self._is_of_training(optimizer):
            self._scaler_asks = scaler, optimizer

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Report to the other ranks that the scaler has skipped the update, if it has."""
        asked, self._scaler_asks = self._scaler_that_asks(optimizer), None
        if asked is not None and not self._is_off:
            if not self._has_met(optimizer):
                return
            guarded = self._guarded(optimizer)
            part = failed if self._has_failed else skipped_by_scaler
            with self._failure_shared():
                self._verdict(optimizer, guarded, part(guarded.device), scaler)

    def scaler_updated(self, scaler: GradScaler) -> None:
        """Let the policies of the loss scale act on it."""
        if self._is_off:
            return
        step = self._context.step
        for change in self._scales.updated(scaler):
            self._columns.note(step.scalars, change.action, change.is_done)
            self._columns.note(step.scalars, Action.NONE_LEFT, change.is_none_left)
            self._log.scale_changed(change, step.sequence)

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Leave the other ranks before the job's process groups are destroyed."""
        if group is None:
            self._agreement.leave()

    def close(self) -> None:
        """Restore everything that still is as the guard has made it, and leave the other ranks."""
        self._is_off = True
        self._slow.close()
        for guarded in list(self._optimizers.values()):
            guarded.finish()
        self._agreement.release()

    def _has_met(self, optimizer: Optimizer) -> bool:
        """Meet the other ranks if that is due; return whether the guard is on afterwards."""
        try:
            if self._agreement.meet(_device_of(optimizer)):
                self._forget()
        except Exception as error:
            pass_on(error)
            if not isinstance(error, NotMet):
                error = NotMet(f"the ranks do not meet ({cause_of(error)})", _APART, speaks=True)
            self._turn_off(str(error) if error.speaks else "")
            self._context.connection.reports.list_unsupported(error.feature)
        return not self._is_off

    def _forget(self) -> None:
        """Begin as the other ranks do: what this one has seen alone would have it act alone."""
        self._slow.close()
        for guarded in list(self._optimizers.values()):
            guarded.finish()
        self._optimizers.clear()
        self._slow = SlowPolicies(self._policies, self.requests, dry_run=self._dry_run)
        self._scales = LossScales(self._policies, dry_run=self._dry_run)
        self._updated.clear()

    def _is_of_training(self, optimizer: Optimizer) -> bool:
        """Return whether this is an update of the training, by the thread that trains."""
        context = self._context
        if self._is_paused:
            return False
        if context.thread.engine_steps:
            context.note_unguarded("the guard of an engine that steps by itself")
            return False
        if self._is_uneven:
            context.note_unguarded("the guard where ranks may make uneven numbers of updates")
            return False
        if self._thread is None or not self._thread.is_alive():
            self._thread = current_thread()
        if self._thread is not current_thread():
            context.note_unguarded("the guard of updates by more than one thread")
            return False
        return True

    def _scaler_that_asks(self, optimizer: Optimizer) -> GradScaler | None:
        """Return the scaler that was asked for an update of `optimizer` just now."""
        asked = self._scaler_asks
        return asked[0] if asked is not None and asked[1] is optimizer else None

    def _is_within_another(self, optimizer: Optimizer) -> bool:
        """Return whether the update is a part of another optimizer's, which was decided on."""
        if self._running is None or self._running == id(optimizer):
            return False
        return running_step(self._running) is not None

    def _guarded(self, optimizer: Optimizer) -> GuardedOptimizer:
        found = self._optimizers.get(optimizer)
        if found is None:
            found = GuardedOptimizer(self._policies, _device_of(optimizer))
            self._optimizers[optimizer] = found
        return found

    def _own_numbers(self, optimizer: Optimizer, guarded: GuardedOptimizer) -> torch.Tensor:
        """Return this rank's part; a failure is reported to the other ranks, which wait."""
        if self._has_failed:
            return failed(guarded.device)
        try:
            guarded.finish()
            numbers = self._measured(optimizer)
            guarded.look_at_rates(optimizer, numbers)
            return numbers
        except Exception as error:
            pass_on(error)
            log.warning("the guard cannot measure gradients", exc_info=True)
            return failed(guarded.device)

    @contextmanager
    def _failure_shared(self) -> Iterator[None]:
        """Have all ranks end the guard at their next update where it fails on this one.

        A rank that was left out by itself would not enter the collectives that others wait in.
        """
        try:
            yield
        except Exception:
            self._has_failed = True
            raise

    def _measured(self, optimizer: Optimizer) -> torch.Tensor:
        watched = self._context.registry.of(optimizer)
        plan = None if watched is None else watched.plan()
        if plan is None:
            return failed(_device_of(optimizer))
        scale = scalar_of(getattr(optimizer, "grad_scale", None))
        inverse_scale: Scalar = 1.0 if scale is None else reciprocal(scale)
        numbers = self._reader.read(plan, inverse_scale, self._agreement.ranks)
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor):
            found = (found_inf.to(numbers.device) > 0).reshape(())
            numbers = torch.where(found, skipped_by_scaler(numbers.device), numbers)
        return numbers.to(_device_of(optimizer))

    def _verdict(
        self,
        optimizer: Optimizer,
        guarded: GuardedOptimizer,
        numbers: torch.Tensor,
        scaler: GradScaler | None,
    ) -> UpdateVerdict | None:
        """Agree on the update, record what is done, and let the slower policies follow.

        None where the ranks do not agree, and the guard is off.
        """
        scale = None if scaler is None else scaler._get_scale_async()
        if scale is not None:
            numbers[LOSS_SCALES] = scale
        try:
            agreed, ranks = self._agreement.sums(numbers), self._agreement.ranks
            verdict, outcomes = guarded.judge(agreed, ranks)
            is_agreed = not self._matters(verdict) or self._agreement.all_agree()
        except Exception as error:
            pass_on(error)
            self._disagree(error)
            return None
        if not is_agreed:
            self._disagree(RuntimeError("another rank does not have the sums"))
            return None
        if scaler is not None:
            self._scales.observe(scaler, agreed[LOSS_SCALES] / ranks, verdict.is_trouble)
        scalars = self._columns.of(optimizer)
        self._columns.note(scalars, Action.SKIP_UPDATE, verdict.is_skipped)
        self._columns.note(scalars, Action.CLIP_GRADIENTS, verdict.coefficient != 1.0)
        self._columns.note(scalars, Action.HOLD_LEARNING_RATE, verdict.is_rate_held)
        self._columns.note(scalars, Action.NONE_LEFT, verdict.is_none_left)
        begins_step = self._begins_step(optimizer)
        for outcome in outcomes:
            self._follow(outcome, scalars, begins_step=begins_step)
        return verdict

    def _matters(self, verdict: UpdateVerdict) -> bool:
        """Return whether anything is done on the host that the other ranks have to do as well."""
        if not accelerator.is_on_host(verdict.norm.device):
            return False  # where sums fail on a device, the job fails
        return bool(verdict.is_trouble) or self._slow.rate_factor != 1.0

    def _disagree(self, error: Exception) -> None:
        """Have no rank act any more: some of them do not have the sums of this update."""
        self._turn_off(f"the ranks could not agree on an update ({cause_of(error)})")
        self._context.connection.reports.list_unsupported(_APART)
        self._agreement.decline()

    def _begins_step(self, optimizer: Optimizer) -> bool:
        """Return whether this is the first update of a step, of which several make each its own."""
        begins = not self._updated or id(optimizer) in self._updated
        if begins:
            self._updated.clear()
        self._updated.add(id(optimizer))
        return begins

    def _turn_off(self, reason: str) -> None:
        """Do nothing any more, and restore what is switched; another rank logs an empty reason."""
        self._is_off = True
        if reason:
            log.warning("%s: the guard is off from now on", reason)
        self._slow.close()

    def _follow(
        self, outcome: UpdateOutcome, scalars: dict[str, Scalar], *, begins_step: bool
    ) -> None:
        """Let the slower policies act on what has become of an update."""
        sequence = self._context.step.sequence
        if outcome.is_failed:
            self._turn_off("a rank cannot measure its gradients, or act on them")
            return
        self._log.updated(outcome, sequence)
        step = sequence + self._context.trainer_step.lead
        root = self._context.registry.root
        for action in self._slow.observe(outcome, root, step, begins_step=begins_step):
            self._columns.note(scalars, action, True)
            self._log.acted(action, sequence)


def _device_of(optimizer: Optimizer) -> torch.device:
    """Return where the first parameter lies."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    return torch.device("cpu")
