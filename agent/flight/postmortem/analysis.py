"""What a flight record shows: its causes, before their consequences, and the steps around."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.remedies import Lookup, fitting
from mp_agent.catalog.metrics import gradients, run
from mp_agent.flight.postmortem.case import Case, headroom_bits
from mp_agent.flight.postmortem.causes import DETECTORS
from mp_agent.flight.postmortem.diagnosis import (
    LIKELY,
    POSSIBLE,
    Cause,
    Causes,
    Diagnosis,
    LayerSample,
    RunHistory,
    not_measured,
)
from mp_agent.flight.record.evidence import Evidence
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import EndReason

_ORIGINS = (Causes.NONFINITE_ON_ONE_RANK, Causes.NONFINITE_FORWARD, Causes.NONFINITE_BACKWARD)
_GPU = Causes.GPU_ERROR
_FOLLOWS_FROM: Mapping[Causes, tuple[Causes, ...]] = {
    Causes.NONFINITE_ON_ONE_RANK: (_GPU, Causes.ZERO_EPSILON),
    Causes.NONFINITE_FORWARD: (Causes.ZERO_EPSILON, Causes.ONE_RANK_OFF),
    Causes.NONFINITE_BACKWARD: (Causes.ZERO_EPSILON,),
    Causes.ONE_RANK_OFF: (_GPU,),
    Causes.OWN_NAN: (_GPU,),
    Causes.NONFINITE_UPDATE: (_GPU, *_ORIGINS, Causes.ONE_RANK_OFF),
    Causes.REPLICA_DIVERGENCE: (_GPU,),
    Causes.UNUSUAL_BATCH: (Causes.ONE_RANK_OFF, Causes.LEARNING_RATE_JUMP),
    Causes.GRADIENT_EXPLOSION: (Causes.ONE_RANK_OFF, Causes.UNUSUAL_BATCH),
    Causes.CONTAINED_EXPLOSION: (
        Causes.ONE_RANK_OFF,
        Causes.LEARNING_RATE_JUMP,
        Causes.UNUSUAL_BATCH,
    ),
    Causes.LOSS_DIVERGING: (
        *_ORIGINS,
        Causes.ONE_RANK_OFF,
        Causes.NEVER_REDUCED,
        Causes.LOSS_SCALE_COLLAPSE,
    ),
    Causes.LOSS_SCALE_COLLAPSE: (Causes.NONFINITE_ON_ONE_RANK, Causes.OWN_NAN),
    Causes.LOSS_SCALE_FALLING: (
        Causes.LOSS_SCALE_COLLAPSE,
        Causes.NONFINITE_ON_ONE_RANK,
        Causes.OWN_NAN,
    ),
    Causes.GRADIENT_UNDERFLOW: (Causes.ONE_RANK_OFF, Causes.GRADIENT_EXPLOSION),
    Causes.CONSTANT_LOSS: (
        Causes.LEARNING_RATE_ZERO,
        Causes.LEARNING_RATE_JUMP,
        Causes.GRADIENT_EXPLOSION,
        Causes.GRADIENT_VANISHING,
    ),
    Causes.RANK_KILLED: (_GPU,),
    Causes.RANK_FAILED: (_GPU, Causes.RANK_KILLED, *_ORIGINS),
    Causes.RANK_STALLED: (_GPU,),
}
"""Causes that a cause can follow from besides those of its alerts: what no alert is about."""
_WITHOUT_ALERTS = {
    own.value.name: [cause.value.name for cause in causes] for own, causes in _FOLLOWS_FROM.items()
}
_ENDS = (Causes.RANK_KILLED.value, Causes.RANK_FAILED.value, Causes.RANK_STALLED.value)
_BY_NAME = {condition.name: condition for condition in CONDITIONS}


def diagnose(case: Case) -> tuple[Diagnosis, ...]:
    """Return the diagnoses, most likely first, consequences last; none for a clean run.

    How ranks ended comes after whatever else is likely: it shows last, and explains no numbers.
    """
    found: dict[str, Diagnosis] = {}
    for finding in (one for look in DETECTORS for one in look(case)):
        if finding.score > 0 or finding.alerts:
            found[finding.cause.name] = _stronger(finding, found.get(finding.cause.name))
    explained = [replace(one, follows=_origin(one, found.values())) for one in found.values()]
    return tuple(sorted(explained, key=_place))


def _stronger(finding: Diagnosis, known: Diagnosis | None) -> Diagnosis:
    """Return the one with more evidence, with the alerts of both."""
    if known is None:
        return finding
    stronger = finding if finding.score > known.score else known
    return replace(stronger, alerts=tuple(dict.fromkeys((*known.alerts, *finding.alerts))))


def _place(finding: Diagnosis) -> tuple[bool, int, bool, int, int]:
    ends = finding.cause in _ENDS
    within = min(finding.score, LIKELY)
    return bool(finding.follows), -within, ends, -finding.score, finding.sequence


def _origin(finding: Diagnosis, found: Iterable[Diagnosis]) -> str:
    """Return the name of the first cause in the chain that led to a finding; "" for that itself."""
    chain = [finding]
    while cause := next(_causes_of(chain[-1], found, chain), None):
        chain.append(cause)
    return chain[-1].cause.name if len(chain) > 1 else ""


def _causes_of(
    finding: Diagnosis, found: Iterable[Diagnosis], chain: Sequence[Diagnosis]
) -> Iterator[Diagnosis]:
    """Yield what a finding can follow from, if it appeared no later; the likeliest first."""
    alerts = (name for own in finding.cause.signs for name in _BY_NAME[own].follows_from)
    names = [*_WITHOUT_ALERTS.get(finding.cause.name, ()), *alerts]
    for name in names:
        for other in found:
            fits = name == other.cause.name or name in other.cause.signs
            earlier = other.sequence <= finding.sequence and other.score >= POSSIBLE
            if fits and earlier and other not in chain:
                yield other


_STEPS_BEFORE, _STEPS_AFTER = 8, 5
_LONG_BEFORE, _JUST_BEFORE = 50, 5
_MOVED = 1.5
_MOVED_TIME = 3.0
"""Step times vary more."""
_LAYERS_SHOWN = 10

_WORST_FIRST = (EndReason.FAILED, EndReason.KILLED, EndReason.UNKNOWN, EndReason.COMPLETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The values of a quantity long before the first bad step, just before it, and at it.

    Medians over steps 6 to 50 and 1 to 5 before; None where nothing was observed.
    """

    name: str
    long_before: float | None
    just_before: float | None
    at: float | None

    @property
    def moved(self) -> bool:
        """Whether it changed by half or more, a step time threefold, headroom by a bit."""
        values = [v for v in (self.long_before, self.just_before, self.at) if v is not None]
        if len(values) < 2:
            return False
        low, high = min(values), max(values)
        if self.name == "headroom_bits":
            return high - low >= 1.0
        factor = _MOVED_TIME if self.name == "step_seconds" else _MOVED
        return high > factor * low if low > 0 else high != low


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyAdvice:
    """What to do about a cause, from the conditions catalog."""

    condition: str
    confirm: str
    remedies: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSummary:
    """A layer at the step that the analysis shows."""

    name: str
    norm: float
    abs_max: float
    nonfinite_elements: float
    elements: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """The result of a post-mortem. `first_bad` is the first of `findings`, if any."""

    evidence: Evidence
    history: RunHistory
    end: EndReason
    """RUNNING if the run continued when the record was made."""
    findings: tuple[Diagnosis, ...]
    remedies: tuple[RemedyAdvice, ...]
    """Remedies of the first finding."""
    moves: tuple[Move, ...]
    around: tuple[MergedStep, ...]
    """Steps before and after the first bad one; the last ones when there is none."""
    layers: tuple[LayerSummary, ...]
    """The worst layers, at `layers_step`."""
    layers_step: int
    """First bad step in the trainer's count, or the last sampled one before it."""
    limits: tuple[tuple[str, float], ...]
    """Thresholds of the gradient norm, by name."""
    not_measured: tuple[tuple[str, str], ...]
    """What the record neither shows nor rules out: name and text."""

    @property
    def first_bad(self) -> Diagnosis | None:
        """Return the diagnosis of the first bad step."""
        return self.findings[0] if self.findings else None

    @property
    def ended_unix_seconds(self) -> float | None:
        """When the last step was complete."""
        return self.history.steps[-1].time_unix_seconds if self.history.steps else None


def analyse(evidence: Evidence, history: RunHistory) -> Analysis:
    """Return the analysis of an attempt."""
    case = Case(evidence, history)
    findings = diagnose(case)
    first = findings[0] if findings else None
    table = _table_for(case, first)
    return Analysis(
        evidence=evidence,
        history=history,
        end=run_end([log.end for log in evidence.ranks]),
        findings=findings,
        remedies=remedies_for(first.cause, _facts_of(case), since_step=first.step) if first else (),
        moves=tuple(_moves(case, first.sequence)) if first else (),
        around=_around(case, first),
        layers=_worst_layers(table) if table else (),
        layers_step=case.number_of(table.sequence) if table else 0,
        limits=tuple(
            (name, case.limit(name))
            for name in ("grad_norm_extreme", "grad_norm_high", "grad_norm_low")
        ),
        not_measured=not_measured(history.families),
    )


def run_end(ranks: Sequence[EndReason]) -> EndReason:
    """Return how a run ended: the worst of its ranks' ends; RUNNING while one is running."""
    if not ranks or EndReason.RUNNING in ranks:
        return EndReason.RUNNING
    return next(reason for reason in _WORST_FIRST if reason in ranks)


def _facts_of(case: Case) -> Lookup:
    """Return a lookup of the series that remedies depend on, as the run would have exposed them."""
    limits = any(step.get("clip_max_norm") is not None for step in case.steps)
    found: dict[str, list[Mapping[str, str]]] = {
        run.RUN_INFO.prometheus_name: [case.evidence.facts],
        gradients.CLIP_MAX_NORM.prometheus_name: [{}] if limits else [],
    }
    return lambda name: found.get(name, [])


def remedies_for(
    cause: Cause, lookup: Lookup | None = None, *, since_step: int = 0
) -> tuple[RemedyAdvice, ...]:
    """Return the catalog's remedies for a cause, each once.

    lookup: finds the series of the run; remedies that do not fit it are omitted. since_step: the
    first bad step; 0 if it is not known.
    """
    known = {condition.name: condition for condition in CONDITIONS}
    given: set[str] = set()
    found = []
    for name in cause.conditions:
        condition = known[name]
        fits = (
            condition.remedies
            if lookup is None
            else fitting(condition.remedies, lookup, since_step=since_step)
        )
        new = tuple(remedy for remedy in fits if remedy not in given)
        given.update(new)
        if new:
            found.append(
                RemedyAdvice(
                    condition=name, confirm=condition.confirm, remedies=new, why=condition.why
                )
            )
    return tuple(found)


QUANTITIES: tuple[tuple[str, Callable[[MergedStep], float | None]], ...] = (
    ("loss", lambda step: step.get("loss")),
    ("grad_norm", lambda step: step.grad_norm if step.gradients_judged else None),
    ("grad_abs_max", lambda step: step.get("abs_max") if step.gradients_judged else None),
    ("loss_scale", lambda step: step.loss_scale),
    ("headroom_bits", headroom_bits),
    ("clip_coefficient", lambda step: step.clip_coefficient),
    ("learning_rate", lambda step: step.get("learning_rate")),
    ("step_seconds", lambda step: step.get("step_seconds")),
)
"""The quantities that are compared before and at the first bad step."""


def _moves(case: Case, sequence: int) -> list[Move]:
    long_before = case.before(sequence - _JUST_BEFORE, _LONG_BEFORE - _JUST_BEFORE)
    just_before = case.before(sequence, _JUST_BEFORE)
    at = case.step_at(sequence)
    moves = []
    for name, read in QUANTITIES:
        move = Move(
            name=name,
            long_before=_median(map(read, long_before)),
            just_before=_median(map(read, just_before)),
            at=read(at) if at else None,
        )
        if any(value is not None for value in (move.long_before, move.just_before, move.at)):
            moves.append(move)
    return moves


def _median(values: "map[float | None]") -> float | None:
    observed = [value for value in values if value is not None]
    return median(observed) if observed else None


def _around(case: Case, first: Diagnosis | None) -> tuple[MergedStep, ...]:
    shown = _STEPS_BEFORE + _STEPS_AFTER
    if first is None:
        return case.steps[-shown:]
    begin, end = first.sequence - _STEPS_BEFORE, first.sequence + _STEPS_AFTER
    found = tuple(step for step in case.steps if begin <= step.sequence <= end)
    return found or case.steps[-shown:]


def _table_for(case: Case, first: Diagnosis | None) -> LayerSample | None:
    """Return the layers at the first bad step, else the last sample before it."""
    tables = case.history.tables
    if not tables:
        return None
    if first is None:
        return tables[-1]
    earlier = [table for table in tables if table.sequence <= first.sequence]
    return case.layers_at(first.sequence) or (earlier[-1] if earlier else tables[0])


def _worst_layers(table: LayerSample) -> tuple[LayerSummary, ...]:
    """Return the layers with the most NaN and Inf, then those with the largest norm."""
    standing = [
        LayerSummary(
            name=name, norm=squares**0.5, abs_max=largest, nonfinite_elements=bad, elements=elements
        )
        for name, squares, largest, bad, elements in zip(
            table.names,
            table.column("sum_squares").tolist(),
            table.column("abs_max").tolist(),
            table.nonfinite.tolist(),
            table.column("elements").tolist(),
            strict=True,
        )
    ]
    standing.sort(key=lambda layer: (-layer.nonfinite_elements, -layer.norm))
    return tuple(standing[:_LAYERS_SHOWN])
