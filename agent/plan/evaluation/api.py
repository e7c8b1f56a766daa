"""Trains copies of a model in several precisions by turns, and measures time and memory."""

import weakref
from collections.abc import Callable, Iterable
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.errors import AdviceError
from mp_agent.plan.evaluation.model import (
    PlanEvaluation,
    PlanTarget,
    SideMeasurement,
    loss_target,
    memory_target,
    paired_ratio,
    speed_target,
    tail_difference,
    tensor_core_target,
)
from mp_agent.plan.execution.calls import in_plain_thread
from mp_agent.plan.execution.errors import tensors_of
from mp_agent.plan.execution.lockstep import Randomness
from mp_agent.plan.execution.session import uncompiled
from mp_agent.plan.execution.training import (
    PlannedTraining,
    Workload,
    required_count,
    required_positive,
    workload_of,
)
from mp_agent.plan.precision_plan import PrecisionPlan
from mp_agent.plan.recommendation.choose import eligible_ratio
from mp_agent.plan.recommendation.products import measure_products, read_environment


class _Side:
    """One training, with random numbers of its own that begin as the others' do."""

    def __init__(self, workload: Workload, plan: PrecisionPlan, learning_rate: float) -> None:
        self.training = PlannedTraining(workload, plan, learning_rate)
        self._workload = workload
        self._randomness = Randomness.now()
        self._losses: list[float] = []
        self._seconds: list[float] = []
        scaler = self.training.scaler
        self._scales = [] if scaler is None else [scaler.get_scale()]

    def step(self, step: int) -> None:
        """Train one step and time it."""
        training = self.training
        self._randomness.restore()
        batch = training.inputs(self._workload.batch(step))
        with training.products():
            _synchronize(self._workload.device)
            start = perf_counter()
            loss = training.forward(batch)
            training.update(loss)
            _synchronize(self._workload.device)
            self._seconds.append(perf_counter() - start)
        self._losses.append(float(loss.detach()))
        if training.scaler is not None:
            self._scales.append(training.scaler.get_scale())
        self._randomness = Randomness.now()

    def measured(self) -> SideMeasurement:
        """Return what the steps showed."""
        return SideMeasurement(
            losses=tuple(self._losses),
            seconds=tuple(self._seconds),
            loss_scales=tuple(self._scales),
        )


def train_by_turns(
    workload: Workload,
    fp32: PrecisionPlan,
    plan: PrecisionPlan,
    learning_rate: float,
    steps: int,
    on_step: Callable[[int], None],
) -> tuple[SideMeasurement, SideMeasurement, SideMeasurement]:
    """Return the measurements in FP32, by the plan, and in FP32 from perturbed weights.

    The order of the first two alternates from step to step, so that a machine that becomes slower
    or faster favors neither. The third is trained after both.
    """
    sides = [_Side(workload, one, learning_rate) for one in (fp32, plan, fp32)]
    _perturb(sides[2].training)

    def body() -> None:
        for step in range(steps):
            for side in (0, 1, 2) if step % 2 == 0 else (1, 0, 2):
                sides[side].step(step)
            on_step(step + 1)

    try:
        with uncompiled():
            in_plain_thread(workload.device, body)
    finally:
        for side in sides:
            side.training.close()
    first, second, third = (side.measured() for side in sides)
    return first, second, third


def _perturb(training: PlannedTraining) -> None:
    """Replace each weight by the next larger number."""
    for parameter in training.model.parameters():
        if parameter.is_floating_point():
            infinity = torch.full_like(parameter, float("inf"))
            parameter.data = torch.nextafter(parameter.detach(), infinity)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


ALLOCATOR = "CUDA's allocator"
LIVE_TENSORS = "live tensors, without what operations need while they run"
_STEPS = 2
"""The optimizer's state is there from the end of the first on."""


def measure_peak(workload: Workload, plan: PrecisionPlan, learning_rate: float) -> tuple[int, str]:
    """Return the peak in bytes of two training steps of a copy by a plan, and what measured it.

    Weights, gradients, optimizer state, activations and the batch; not the model itself.
    """
    on_cuda = workload.device.type == "cuda"
    before = torch.cuda.memory_allocated(workload.device) if on_cuda else 0
    training = PlannedTraining(workload, plan, learning_rate)
    live = LiveMemory([*training.model.parameters(), *training.model.buffers()])

    def body() -> None:
        for step in range(_STEPS):
            training.update(training.forward(training.inputs(workload.batch(step))))

    def watched() -> None:
        with live:
            body()

    if on_cuda:
        torch.cuda.reset_peak_memory_stats(workload.device)
    training.run(body if on_cuda else watched)
    if on_cuda:
        return torch.cuda.max_memory_allocated(workload.device) - before, ALLOCATOR
    return live.peak_bytes, LIVE_TENSORS


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of the tensors that operations of this thread make, until freed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._follow(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for _, tensor in tensors_of(result):
            self._follow(tensor)
        return result

    def _follow(self, tensor: Tensor) -> None:
        if tensor.is_sparse:
            for part in (tensor._values(), tensor._indices()):
                self._follow(part)
            return
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._storages:
            return

        def freed(reference: Any) -> None:
            self._storages.pop(key, None)
            self.live_bytes -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


STEPS = 50
WARMUP_STEPS = 5
LEARNING_RATE = 1e-4

Progress = Callable[[str, str, int], None]


def measure_plan(
    model: nn.Module,
    batch: Any,
    loss: Any,
    plan: Any,
    *,
    steps: int = STEPS,
    warmup_steps: int = WARMUP_STEPS,
    learning_rate: float = LEARNING_RATE,
    progress: Progress = lambda candidate, stage, count: None,
) -> PlanEvaluation:
    """Measure a plan against FP32; `mp_agent.evaluate_plan` describes it."""
    if not isinstance(plan, PrecisionPlan):
        raise AdviceError(f"plan: {type(plan).__name__} is not a PrecisionPlan")
    required_count(0, warmup_steps=warmup_steps)
    required_count(warmup_steps + 1, steps=steps)
    required_positive(learning_rate=learning_rate)
    workload = workload_of(model, batch, loss, steps)
    fp32 = PrecisionPlan(
        precision="fp32",
        device=plan.device,
        adam_epsilon=plan.adam_epsilon,
        clip_norm=plan.clip_norm,
    )
    with torch.inference_mode(False):
        peaks = [measure_peak(workload, one, learning_rate) for one in (fp32, plan)]
        sides = train_by_turns(
            workload,
            fp32,
            plan,
            learning_rate,
            steps,
            lambda done: progress(plan.precision, "training by turns", done),
        )
        eligible = eligible_ratio(measure_products(workload), plan.keep_fp32)
    return _evaluation(
        workload, plan, warmup_steps, learning_rate, sides, peaks, tensor_core_target(eligible)
    )


def _evaluation(
    workload: Workload,
    plan: PrecisionPlan,
    warmup_steps: int,
    learning_rate: float,
    sides: tuple[SideMeasurement, SideMeasurement, SideMeasurement],
    peaks: list[tuple[int, str]],
    tensor_cores: PlanTarget,
) -> PlanEvaluation:
    exact, planned, perturbed = sides
    ratio, interval = paired_ratio(exact.seconds[warmup_steps:], planned.seconds[warmup_steps:])
    difference = tail_difference(planned.losses, exact.losses)
    noise = tail_difference(perturbed.losses, exact.losses)
    environment = read_environment()
    targets = [
        speed_target(ratio, *interval),
        memory_target(1 - peaks[1][0] / peaks[0][0]),
        loss_target(difference, noise),
    ]
    if plan.precision != "fp32":
        targets.append(tensor_cores)
    return PlanEvaluation(
        plan=plan,
        model=type(workload.model).__name__,
        parameters=sum(one.numel() for one in workload.model.parameters()),
        steps=len(exact.losses),
        warmup_steps=warmup_steps,
        learning_rate=learning_rate,
        environment=environment,
        device=workload.device.type,
        fp32=exact,
        planned=planned,
        perturbed=perturbed,
        speed_ratio=ratio,
        speed_interval=interval,
        fp32_peak_bytes=peaks[0][0],
        planned_peak_bytes=peaks[1][0],
        memory_source=peaks[0][1],
        loss_difference_ratio=difference,
        perturbed_difference_ratio=noise,
        targets=tuple(targets),
        notes=(*workload.notes, *_notes(workload, plan, exact, planned)),
    )


def _notes(
    workload: Workload, plan: PrecisionPlan, exact: SideMeasurement, planned: SideMeasurement
) -> list[str]:
    notes = []
    device = workload.device.type
    if plan.device != device:
        notes.append(
            f"the plan is for {plan.device}, but was measured on {device}, where the model is: "
            f"speed and memory are those of {device}"
        )
    if len(workload.batches) == 1:
        notes.append("one batch in every step: losses are of a model that learns it by heart")
    for name, side in (("FP32", exact), ("the plan", planned)):
        lost = [step for step, loss in enumerate(side.losses, 1) if not isfinite(loss)]
        if lost:
            notes.append(f"the loss of {name} is not finite from step {lost[0]} on")
    if planned.skipped_steps:
        notes.append(
            f"{planned.skipped_steps} steps overflowed, were skipped, and lowered the scale"
        )
    return notes
