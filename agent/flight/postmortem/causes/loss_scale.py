"""The loss scale: overflows that make GradScaler halve it again and again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.diagnosis import MEDIUM, STRONG, WEAK, Argument, Causes, Diagnosis
from mp_agent.records.merged import MergedStep

_GAP_STEPS = 50


@dataclass(frozen=True, slots=True)
class _Storm:
    """Skipped steps between which the scale did not grow."""

    skipped: tuple[MergedStep, ...]

    @property
    def first(self) -> MergedStep:
        return self.skipped[0]

    @property
    def last(self) -> MergedStep:
        return self.skipped[-1]

    @property
    def scales(self) -> list[float]:
        return [_scale(step) for step in self.skipped]


def loss_scale(case: Case) -> Iterator[Diagnosis]:
    """Yield the collapse of the loss scale, or that it keeps falling."""
    storms = [storm for storm in _storms(case) if not _calibrating(case, storm)]
    if not storms:
        return
    worst = min(storms, key=lambda storm: (min(storm.scales), storm.first.sequence))
    floor_skips = _at_floor(case, worst)
    fallen = case.limit("loss_scale_share_of_initial") * worst.scales[0]
    collapsed = floor_skips > 0 or worst.scales[-1] <= fallen
    arguments_for = [*_fall(case, worst, floor_skips), *_forward(worst), *_share(case)]
    if (
        not collapsed
        and len(worst.skipped) < case.limit("loss_scale_decreases_in_row")
        and not _share(case)
    ):
        return
    cause = Causes.LOSS_SCALE_COLLAPSE if collapsed else Causes.LOSS_SCALE_FALLING
    forward = worst.first.flag("loss_nonfinite")
    yield Diagnosis(
        cause=cause.value,
        sequence=worst.first.sequence,
        step=worst.first.step,
        rank=_blamed(worst.first),
        layer="" if forward else _overflowing_layer(case, worst.first.sequence),
        phase="forward" if forward else "backward",
        arguments_for=tuple(arguments_for),
    )


def _storms(case: Case) -> Iterator[_Storm]:
    current: list[MergedStep] = []
    for step in case.steps:
        if not step.skipped or step.loss_scale is None:
            continue
        near = current and step.sequence - current[-1].sequence <= _GAP_STEPS
        if current and (not near or _scale(step) > _scale(current[-1])):
            yield _Storm(tuple(current))
            current = []
        current.append(step)
    if current:
        yield _Storm(tuple(current))


def _calibrating(case: Case, storm: _Storm) -> bool:
    """Return whether GradScaler was only calibrating, or skipped a step occasionally.

    Calibration never ends at the floor.
    """
    if _at_floor(case, storm):
        return False
    early = storm.last.sequence <= case.limit("calibration_steps")
    return early or len(storm.skipped) < case.limit("loss_scale_net_decreases")


def _at_floor(case: Case, storm: _Storm) -> int:
    """Return the steps skipped at the floor; 0 unless there are enough, or the scale went below."""
    floor = case.limit("loss_scale_floor")
    skips = sum(scale <= floor for scale in storm.scales)
    below = min(storm.scales) < floor
    return skips if below or skips >= case.limit("floor_skips") else 0


def _fall(case: Case, storm: _Storm, floor_skips: int) -> Iterator[Argument]:
    if floor_skips:
        text = (
            f"{floor_skips} step(s) were skipped at a scale of "
            f"{case.limit('loss_scale_floor'):g} or below: no lower one helps."
        )
        yield Argument(text, STRONG)
    halvings = len(set(storm.scales))
    if halvings > 1:
        scales = storm.scales
        yield Argument(
            f"The loss scale fell from {scales[0]:g} to {scales[-1]:g} between steps "
            f"{storm.first.step} and {storm.last.step}, and never grew in between.",
            STRONG if halvings >= case.limit("loss_scale_decreases_in_row") else MEDIUM,
        )


def _forward(storm: _Storm) -> Iterator[Argument]:
    in_forward = sum(step.flag("loss_nonfinite") for step in storm.skipped)
    if in_forward:
        yield Argument(
            f"On {in_forward} of the {len(storm.skipped)} skipped steps the loss itself was NaN "
            "or Inf: the overflow is in the forward pass, which the loss scale does not reach.",
            WEAK,
        )
    elif len(storm.skipped) > 1:
        text = "The loss stayed finite: it is the scaled gradients that overflow."
        yield Argument(text, WEAK)


def _share(case: Case) -> list[Argument]:
    """Return the share of skipped steps after calibration, if it is above the limit."""
    settled = [s for s in case.steps if s.sequence > case.limit("calibration_steps")]
    skipped = sum(step.skipped for step in settled)
    if len(settled) < case.limit("overflow_steps") or skipped < case.limit("overflow_skips"):
        return []
    share = skipped / len(settled)
    if share <= case.limit("overflow_warning"):
        return []
    text = f"{skipped} of the last {len(settled)} steps were skipped ({share:.1%})."
    return [Argument(text, MEDIUM if share > case.limit("overflow_critical") else WEAK)]


def _overflowing_layer(case: Case, sequence: int) -> str:
    """Return the layer nearest to the output whose gradients overflowed, if it was sampled."""
    tables = (table for table in case.history.tables if table.sequence == sequence)
    table = next(tables, None)
    if table is None:
        return ""
    return _last_named(table.names, table.nonfinite.tolist())


def _last_named(names: Sequence[str], counts: Sequence[float]) -> str:
    found = [name for name, count in zip(names, counts, strict=True) if count > 0]
    return found[-1] if found else ""


def _blamed(step: MergedStep) -> str:
    blamed = step.nonfinite_loss_ranks
    everyone = len(blamed) == len(step.present_ranks)
    return "" if everyone else ",".join(map(str, blamed))


def _scale(step: MergedStep) -> float:
    return step.loss_scale or 0.0
