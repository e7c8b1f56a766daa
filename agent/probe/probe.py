"""The probe of one process: hooks, shield, tracker and recorder, wired together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mp_agent.catalog.thresholds import resolve
from mp_agent.probe import accelerator, hooks, placement
from mp_agent.probe.guard.outcome import Agreement
from mp_agent.probe.guard.slow_policies import Requests
from mp_agent.probe.guard.training_guard import TrainingGuard
from mp_agent.probe.hooks import updates
from mp_agent.probe.hooks.phases import install_teardown
from mp_agent.probe.instruments.activations import ActivationSampling, StepActivations
from mp_agent.probe.instruments.attention import AttentionSampling, StepAttention
from mp_agent.probe.instruments.batches import Batches, Repetitions, TokenTargets
from mp_agent.probe.instruments.fp8 import Fp8Sampling, StepFp8
from mp_agent.probe.instruments.instrument import Evaluations, ForwardStart, Instrument, Instruments
from mp_agent.probe.instruments.local_gradients import LocalGradients
from mp_agent.probe.instruments.logprobs import StepLogprobs
from mp_agent.probe.instruments.routers import RouterSampling, StepRouters
from mp_agent.probe.instruments.tensors import WatchedTensors
from mp_agent.probe.isolation import Shield
from mp_agent.probe.meeting import Meeting
from mp_agent.probe.optimizers.model_mode import ModelMode
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.recording.recorder import StepRecorder
from mp_agent.probe.recording.replica_evidence import ReplicaEvidence
from mp_agent.probe.recording.run_facts import ObservedTraits, main_script
from mp_agent.probe.recording.weight_updates import WeightUpdates
from mp_agent.probe.reduction import GroupReduction
from mp_agent.probe.ring_connection import ProbeReports, RingConnection
from mp_agent.probe.step.data import Loaders, Seeds
from mp_agent.probe.step.layer_schedule import LayerSchedule, OverheadBudget
from mp_agent.probe.step.measurement import Measurement
from mp_agent.probe.step.phases import PhaseMarks, StepParts
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.step_tracker import StepTracker
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.reduction import reduced_values
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings
from mp_agent.version import __version__


class Probe:
    """Watches one process. Nothing that it is asked to do raises.

    create_ring: called once the rank is known, see `RingConnection`. on_step: called at the end of
    each step of the run. ranks_in_run: the number of ranks that train together. group: returns the
    process group of these; None for the job's own. awaits_optimizer: see `TrackerContext`.
    """

    def __init__(
        self,
        create_ring: Callable[[], RingWriter | None],
        settings: Settings,
        *,
        on_step: Callable[[], None] = lambda: None,
        ranks_in_run: Callable[[], int] = placement.world_size,
        group: Callable[[], dist.ProcessGroup | None] = lambda: None,
        awaits_optimizer: bool = False,
    ) -> None:
        reports = self._reports = ProbeReports()
        self._shield = Shield(
            on_failure=reports.count_failure,
            on_capture=self._note_captured,
            on_rest=reports.note_rest,
            on_device_error=reports.note_device_error,
        )
        parts = StepParts(on=settings.measure_step_parts)
        self._phases = PhaseMarks(parts.not_training if settings.measure_step_parts else None)
        self._registry = OptimizerRegistry(reports.note_unsupported, ranks_in_run)
        traits = ObservedTraits(script=main_script() if settings.check_script else "")
        schedule = LayerSchedule(
            settings.layer_interval,
            resolve(settings.thresholds),
            OverheadBudget(settings.overhead_budget, settings.layer_interval),
        )
        measures = Measurement(
            self._registry.note_unsupported,
            fused_kernels=settings.fused_kernels,
            distribution=settings.measure_distribution,
        )
        self._tensors = WatchedTensors(self._in_training, self._registry.note_unsupported)
        self._logprobs = StepLogprobs(self._registry.note_unsupported)
        loaders = Loaders(self._repeats, lambda: self._context.step.sequence, self._first_optimizer)
        seeds = Seeds(self._repeats)
        targets = TokenTargets()
        evaluations = Evaluations(
            self._shield.run,
            model=lambda: self._registry.root,
            mode=self._mode,
            sequence=lambda: self._context.step.sequence,
        )
        self._repetitions = Repetitions(loaders, seeds)
        chosen = [
            Batches(
                self._shield.run,
                self._in_training,
                loaders,
                targets,
                model=lambda: self._registry.root,
                sequence=lambda: self._context.step.sequence,
            ),
            evaluations,
            *self._of_forward_passes(settings),
            self._tensors,
            self._logprobs,
            *self._of_updates(settings, schedule, measures),
            self._repetitions,
        ]
        if settings.measure_step_parts:
            chosen.append(ForwardStart(self._shield.run, parts))
        self._instruments = Instruments(self._shield.contain, lambda: self._registry.root, chosen)
        recorder = self._recorder = StepRecorder(
            self._shield, self._registry, traits, settings, schedule, measures, self._instruments
        )
        self._measures_tensors = settings.measure_tensors
        self._create_ring = create_ring
        self._connection = RingConnection(
            self._make_ring, self._shield, reports, recorder, self._phases
        )
        self._reduction = _reduction_of(settings, group, reports.list_unsupported)
        context = TrackerContext(
            registry=self._registry,
            recorder=recorder,
            instruments=self._instruments,
            phases=self._phases,
            traits=traits,
            connection=self._connection,
            parts=parts,
            loaders=loaders,
            seeds=seeds,
            targets=targets,
            evaluations=evaluations,
            awaits_optimizer=awaits_optimizer,
            guarded=bool(settings.guard),
        )
        ends = on_step if self._reduction is None else self._step_ended
        self._tracker = StepTracker(context, self._shield, ends)
        self._on_step = on_step
        self._context = context
        self._updates = _guard_of_updates(settings, context, group)
        self._updates_shield = Shield(on_failure=reports.count_failure)
        """A separate guard: ranks wait for each other in it, so it goes on where the probe gives
        up."""
        self._patches: hooks.Patches | None = None

    def attach(self, model: nn.Module | None = None, optimizer: Optimizer | None = None) -> None:
        """Install the hooks. `model` and `optimizer` settle which ones are the run's, if given."""
        self._registry.settle(model, optimizer)
        patches = self._patches = hooks.Patches()
        if self._updates is not None:
            updates.install_on_scalers(patches, self._updates, self._updates_shield)
        hooks.install(patches, self._tracker, self._shield)
        if self._updates is not None:
            updates.install_on_optimizers(patches, self._updates, self._updates_shield)
        for ranks, shield in (
            (self._reduction, self._shield),
            (self._updates, self._updates_shield),
        ):
            if ranks is not None:
                install_teardown(patches, ranks, shield)

    def detach(self) -> None:
        """Remove all hooks. Not to be called from within an optimizer's step."""
        if self._updates is not None:
            self._updates_shield.run("the guard's end", self._updates.close)
        if self._reduction is not None:
            self._shield.run("the reduction's end", self._reduction.close)
        self._shield.closed = self._updates_shield.closed = True
        self._recorder.close()
        if self._patches is not None:
            self._patches.restore()

    def connect(self) -> None:
        """Create the ring now instead of at the first hook that needs it."""
        self._shield.run("connect", self._connection.connect)

    def observe(
        self,
        *,
        loss: torch.Tensor | float | None = None,
        step: int | None = None,
        lr: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """Use what the trainer reports of the step under way."""
        self._shield.run("observe", self._tracker.observe, loss, step, lr, tokens)

    def observe_logprobs(self, trainer: object, sampler: object, mask: object = None) -> None:
        """Use the log-probabilities that trainer and sampler have of the same tokens."""
        self._shield.run("observe_logprobs", self._add_logprobs, trainer, sampler, mask)

    def watch_tensor(self, name: object, tensor: object, dim: object, reduction: object) -> None:
        """Measure a tensor, if the step under way is a sampled one."""
        if self._measures_tensors and self._recorder.forward_is_due:
            self._shield.run("watch_tensor", self._watch_tensor, name, tensor, dim, reduction)

    @property
    def global_statistics(self) -> GlobalStatistics | None:
        """The newest statistics that the ranks have reduced; None without any."""
        return None if self._reduction is None else self._reduction.latest

    @property
    def requests(self) -> Requests | None:
        """What the guard asks of the training loop; None without a guard."""
        return None if self._updates is None else self._updates.requests

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a stretch that is not training."""
        self._shield.run("phase", self._enter_phase, name)
        try:
            yield
        finally:
            self._shield.run("phase", self._phases.leave)

    def later(self, function: Callable[[], None]) -> None:
        """Call `function`, unshielded, as soon as the hook that is running has returned."""
        self._shield.later(function)

    def flush(self) -> None:
        """Publish what was observed of the step under way, waiting for a device at most 1 s."""
        self._shield.run("flush", self._tracker.flush)

    def _of_forward_passes(self, settings: Settings) -> Iterator[Instrument]:
        """Yield what measures in the first passes of sampled steps, as far as it is on."""
        note = self._registry.note_unsupported
        if settings.measure_attention:
            attention = AttentionSampling(self._shield.run, self._in_training)
            yield StepAttention(attention, note)
        if settings.measure_activations:
            near_overflow = resolve(settings.thresholds)["fp16_near_overflow"]
            outputs = ActivationSampling(self._shield.run, self._in_training, near_overflow)
            yield StepActivations(outputs, note)
        if settings.measure_routers or settings.routers:
            routers = RouterSampling(self._shield.run, self._in_training)
            yield StepRouters(routers, settings.routers, note)
        if settings.measure_fp8:
            operands = Fp8Sampling(self._shield.run, self._in_training)
            yield StepFp8(operands, note)

    def _of_updates(
        self, settings: Settings, schedule: LayerSchedule, measures: Measurement
    ) -> Iterator[Instrument]:
        """Yield what measures around the update of the weights, as far as it is on."""
        yield ReplicaEvidence(measures, self._registry, schedule)
        if settings.measure_updates:
            yield WeightUpdates(measures, self._registry, schedule, settings.update_copy_mib)
        if settings.measure_local_gradients:
            yield LocalGradients(
                self._shield.run,
                self._registry,
                schedule,
                only_after_trouble=settings.measure_local_gradients == "after_trouble",
                fused_kernels=settings.fused_kernels,
            )

    def _add_logprobs(self, trainer: object, sampler: object, mask: object) -> None:
        self._tracker.collect()
        self._instruments.use(self._logprobs)
        self._logprobs.add(self._context.step, trainer, sampler, mask)

    def _watch_tensor(self, name: object, tensor: object, dim: object, reduction: object) -> None:
        self._instruments.use(self._tensors)
        self._tensors.watch(name, tensor, dim, reduction)

    def _first_optimizer(self) -> Optimizer | None:
        first = self._registry.first
        return None if first is None else first.stepped_last()

    def _repeats(self) -> None:
        self._instruments.use(self._repetitions)

    def _in_training(self) -> bool:
        return self._phases.in_training

    def _mode(self) -> ModelMode | None:
        first = self._registry.first
        return None if first is None else first.mode

    def _note_captured(self, event: Callable[..., None], arguments: Sequence[object]) -> None:
        self._reports.note_capture()
        self._tracker.captured(event, arguments)

    def _make_ring(self) -> RingWriter | None:
        writer = self._create_ring()
        if writer is not None and self._reduction is not None:
            writer.on_complete = self._reduction.record_written
        return writer

    def _step_ended(self) -> None:
        """Look after the run, then reduce: what the one raises does not keep the other away."""
        try:
            self._on_step()
        finally:
            if self._reduction is not None:
                self._reduce(self._reduction)

    def _reduce(self, reduction: GroupReduction) -> None:
        """Reduce what is due; rank 0's next record has what was taken up."""
        step, before = self._context.step, reduction.latest
        on_host = accelerator.computing_device() is None
        reduction.step_ended(step.sequence - 1, on_host=on_host)
        latest = reduction.latest
        if latest is not None and latest is not before and reduction.is_first_rank:
            step.scalars.update(reduced_values(latest))

    def _enter_phase(self, name: object) -> None:
        self._tracker.collect()
        self._phases.enter(str(name))


def _reduction_of(
    settings: Settings,
    group: Callable[[], dist.ProcessGroup | None],
    note_off: Callable[[str], None],
) -> GroupReduction | None:
    """Return the reduction that the settings ask for; None where the agents alone merge."""
    if settings.reduction == "agents":
        return None
    interval = settings.reduction_interval
    return GroupReduction(lambda: Meeting.of("the reduction", group()), interval, note_off)


def _guard_of_updates(
    settings: Settings, context: TrackerContext, group: Callable[[], dist.ProcessGroup | None]
) -> TrainingGuard | None:
    """Return the guard that the settings ask for; None without policies."""
    if not settings.guard:
        return None
    deciding: dict[str, object] = {
        "mp_agent": __version__,
        "guard": ", ".join(settings.guard),
        "guard_dry_run": settings.guard_dry_run,
    }
    for policy, values in settings.guard.items():
        for name, value in values.items():
            deciding[f"{policy}.{name}"] = value if isinstance(value, str) else float(value)
    return TrainingGuard(
        settings.guard,
        context,
        Agreement(deciding, group),
        dry_run=settings.guard_dry_run,
        fused_kernels=settings.fused_kernels,
    )
