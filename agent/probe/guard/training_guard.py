"""The guard of one process: called around every update, it decides and acts."""

import logging
import weakref
from collections.abc import Mapping
from threading import get_ident

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.catalog.guard import DRY_RUN, POLICIES_BY_NAME, Action, Values
from mp_agent.probe.guard.action_log import ActionLog
from mp_agent.probe.guard.agreement import Agreement
from mp_agent.probe.guard.guarded_optimizer import GuardedOptimizer
from mp_agent.probe.guard.loss_scale import ScaleFloor
from mp_agent.probe.guard.outcome import UpdateOutcome
from mp_agent.probe.guard.reading import GradientReader, failed, skipped_by_scaler
from mp_agent.probe.guard.requests import Requests
from mp_agent.probe.guard.slow_policies import SlowPolicies
from mp_agent.probe.guard.verdict import UpdateVerdict
from mp_agent.probe.optimizers.watched import Role
from mp_agent.probe.scalars import Scalar, reciprocal, scalar_of
from mp_agent.probe.step.running_step import running_step
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.ring.interruptions import pass_on

log = logging.getLogger("mp_agent")


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
        own = {POLICIES_BY_NAME[name].action for name in policies}
        self._columns = tuple(action.column for action in {*own, Action.NONE_LEFT})
        self._context = context
        self._agreement = agreement
        self._dry_run = dry_run
        self._reader = GradientReader(context.note_unsupported, fused_kernels=fused_kernels)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, GuardedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._slow = SlowPolicies(policies, self.requests, dry_run=dry_run)
        floor = policies.get("raise_loss_scale")
        self._floor = None if floor is None else ScaleFloor(floor, dry_run=dry_run)
        self._log = ActionLog(dry_run=dry_run)
        self._thread: int | None = None
        self._running: int | None = None
        """`id` of the outermost optimizer whose update is under way, or has raised."""
        self._scaler_asks: Optimizer | None = None
        """Its scaler was asked for an update that no collective belongs to yet."""
        self._is_off = False

    def update_begins(self, optimizer: Optimizer) -> None:
        """Decide on the update that `optimizer` is about to make, and act on it."""
        if self._is_off or not self._is_of_training(optimizer):
            return
        if self._is_within_another(optimizer):
            return
        self._running, self._scaler_asks = id(optimizer), None
        guarded = self._guarded(optimizer)
        guarded.finish()
        verdict = self._verdict(optimizer, guarded, self._own_numbers(optimizer))
        if not (self._dry_run or self._is_off):
            guarded.carry_out(optimizer, verdict, self._slow.rate_factor)

    def update_ended(self, optimizer: Optimizer) -> None:
        """Restore what was changed for the update."""
        if (guarded := self._optimizers.get(optimizer)) is not None:
            guarded.finish()
        if self._running == id(optimizer):
            self._running = None

    def scaler_step_begins(self, optimizer: Optimizer) -> None:
        """Expect `optimizer` to be stepped by its scaler, or not to be."""
        if not self._is_off and self._is_of_training(optimizer):
            self._scaler_asks = optimizer

    def scaler_step_ended(self, optimizer: Optimizer) -> None:
        """Report to the other ranks that the scaler has skipped the update, if it has."""
        asked, self._scaler_asks = self._scaler_asks, None
        if asked is optimizer and not self._is_off:
            guarded = self._guarded(optimizer)
            numbers = skipped_by_scaler(guarded.device)
            self._verdict(optimizer, guarded, numbers)

    def scaler_updated(self, scaler: GradScaler) -> None:
        """Keep the loss scale above its floor."""
        if self._floor is None or (found := self._floor.updated(scaler)) is None:
            return
        raised, none_left = found
        scalars = self._context.step.scalars
        self._note(scalars, Action.RAISE_LOSS_SCALE, raised)
        self._note(scalars, Action.NONE_LEFT, none_left)

    def close(self) -> None:
        """Restore everything that still is as the guard has made it."""
        self._is_off = True
        self._slow.close()
        for guarded in list(self._optimizers.values()):
            guarded.finish()

    def _is_of_training(self, optimizer: Optimizer) -> bool:
        """Return whether this is an update of the training, by the thread that trains."""
        context = self._context
        if context.thread.engine_steps:
            context.note_unsupported("the guard of an engine that steps by itself")
            return False
        if self._thread is None:
            self._thread = get_ident()
        return self._thread == get_ident()

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

    def _own_numbers(self, optimizer: Optimizer) -> torch.Tensor:
        """Return this rank's part; a failure is reported to the other ranks, which wait."""
        try:
            return self._measured(optimizer)
        except Exception as error:
            pass_on(error)
            log.warning("the guard cannot measure gradients", exc_info=True)
            return failed(_device_of(optimizer))

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
        self, optimizer: Optimizer, guarded: GuardedOptimizer, numbers: torch.Tensor
    ) -> UpdateVerdict:
        """Agree on the update, record what is done, and let the slower policies follow."""
        try:
            agreed, ranks = self._agreement.sums(numbers), self._agreement.ranks
        except Exception:
            self._is_off = True
            log.warning("the ranks could not agree on an update: the guard is off from now on")
            raise
        verdict, outcomes = guarded.judge(agreed, ranks)
        scalars = self._scalars_of(optimizer)
        for column in self._columns:
            scalars.setdefault(column, 0.0)
        self._note(scalars, Action.SKIP_UPDATE, verdict.is_skipped)
        self._note(scalars, Action.CLIP_GRADIENTS, verdict.coefficient != 1.0)
        self._note(scalars, Action.NONE_LEFT, verdict.is_none_left)
        for outcome in outcomes:
            self._follow(outcome, scalars)
        return verdict

    def _follow(self, outcome: UpdateOutcome, scalars: dict[str, Scalar]) -> None:
        """Let the slower policies act on what has become of an update."""
        sequence = self._context.step.sequence
        if outcome.is_failed:
            self._is_off = True
            log.warning("gradients cannot be measured on every rank: the guard is off from now on")
            return
        self._log.updated(outcome, sequence)
        step = sequence + self._context.trainer_step.lead
        for action in self._slow.observe(outcome, self._context.registry.root, step):
            self._note(scalars, action, True)
            self._log.acted(action, sequence)

    def _scalars_of(self, optimizer: Optimizer) -> dict[str, Scalar]:
        """Return the scalars of the step that the update is a part of."""
        watched = self._context.registry.of(optimizer)
        if watched is None or watched.role is Role.SEPARATE:
            return {} if watched is None else watched.scalars
        return self._context.boundaries.of(watched).scalars

    def _note(
        self, scalars: dict[str, Scalar], action: Action, is_done: torch.Tensor | bool
    ) -> None:
        """Record whether something is done, for any optimizer; on a device it is not known here."""
        if action.column not in self._columns:
            return
        done = float(is_done) if isinstance(is_done, bool) else scalar_of(is_done)
        before = scalars.get(action.column, 0.0)
        weight = DRY_RUN if self._dry_run else 1.0
        if isinstance(done, torch.Tensor):
            value = done.to(torch.float64) * weight
            if isinstance(before, torch.Tensor):
                value = torch.maximum(value, before)
            if isinstance(before, torch.Tensor) or not before:
                scalars[action.column] = value
        elif done:
            scalars[action.column] = weight


def _device_of(optimizer: Optimizer) -> torch.device:
    """Return where the first parameter lies."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    return torch.device("cpu")
