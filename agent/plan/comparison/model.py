"""A comparison as data: errors of tensors, modules and roles, and what follows from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite, sqrt

from mp_agent.report.content import plain, written
from mp_agent.report.numbers import percent, scientific

MODEL = "(model)"
"""The model itself, whose name among its modules is empty."""


def named(module: str) -> str:
    """Return the name of a module as it is shown."""
    return module or MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """Differences between a candidate and its reference, over one or several tensors.

    Sums and the cosine are over the elements that are finite on both sides; what is finite in the
    reference alone is counted in `overflow_ratio` and `nan_ratio`.
    """

    elements: int
    relative_l2: float
    """‖candidate − reference‖₂ / ‖reference‖₂; 0 where both are zero, Inf where only the latter."""
    mean_abs: float
    reference_rms: float
    """Root mean square of the reference, over the same elements."""
    max_abs: float
    ulps_mean: float
    """Mean error in units in the last place of the candidate's format, at the reference's
    magnitude."""
    ulps_max: float
    cosine: float
    overflow_ratio: float
    """±Inf in the candidate where the reference is finite, 0 to 1 of all elements."""
    nan_ratio: float
    """NaN in the candidate where the reference is finite."""
    underflow_ratio: float
    """Zero in the candidate where the reference is not."""
    subnormal_ratio: float
    """Share of values that are not zero, but below the candidate format's smallest normal
    number."""
    reference_nonfinite_ratio: float
    """NaN and ±Inf in the reference."""

    @property
    def nonfinite_ratio(self) -> float:
        """±Inf and NaN that the reference does not have."""
        return self.overflow_ratio + self.nan_ratio

    @property
    def is_compared(self) -> bool:
        """Whether any element is finite on both sides, so that its differences say something."""
        return self.elements > 0 and self.nonfinite_ratio + self.reference_nonfinite_ratio < 1


class ErrorRole(Enum):
    """What a call does to the error that it reads."""

    BEGINS = "begins"
    """Its own operations add at least half of what it read."""
    AMPLIFIED = "amplified"
    """It more than doubles what it read, beyond what its own operations add."""
    HANDED_ON = "handed on"
    REDUCED = "reduced"
    """It more than halves what it read."""
    UNKNOWN = "unknown"
    """Nothing to judge by: no floating-point output, or own operations that cannot be replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallComparison:
    """One call of a module, in the order in which calls end. Errors are the candidate's."""

    order: int
    """Position in the order in which calls begin."""
    module: str
    kind: str
    """Name of its class."""
    depth: int
    """Depth of the call: 0 for the loss function."""
    input_error: float
    """Relative L2 error of what it read."""
    input_nonfinite: bool
    """Whether it read NaN or Inf where the reference did not."""
    output: TensorError
    own: TensorError | None
    """Error of its own operations, run from the reference's inputs, without the modules within
    it."""
    own_missing: str
    """Why there is no `own`; empty where there is."""
    own_nonfinite_finite_inputs: bool
    """Whether its own operations turn finite inputs into NaN or Inf."""
    operand_underflow_ratio: float | None
    """Operands of its products that rounding made zero; None where none are rounded."""
    role: ErrorRole
    gradient: TensorError | None
    """Error of the gradient that reaches its outputs."""
    gradient_own: TensorError | None
    """Error of the gradients that its own backward computes from the reference's inputs and
    gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterComparison:
    """The gradient of one parameter."""

    name: str
    gradient: TensorError


class OriginKind(Enum):
    """What is wrong where an error begins."""

    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    ROUNDING = "rounding"
    AMPLIFICATION = "amplification"
    GRADIENT_OVERFLOW = "gradient overflow"
    GRADIENT_UNDERFLOW = "gradient underflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A place where error begins, worst first."""

    module: str
    kind: OriginKind
    severity: float
    """Relative error, or share of elements that are lost."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a candidate passes, and each reason why not."""

    passed: bool
    reasons: tuple[str, ...]
    mean_abs: float
    """The largest mean absolute difference among the model's outputs."""
    relative: float
    """The same as a share of the RMS of all of them in the reference: what is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepResult:
    """Modules that have to stay in FP32, as found by search, and the proof."""

    kept: tuple[str, ...]
    found: bool
    """Whether the candidate passes with them; else nothing that was tried does."""
    minimal: bool
    """Whether it fails as soon as any one of them is not kept; False when trials ran out."""
    trials: int
    verdict: Verdict | None
    """Verdict of a further comparison, with them kept."""
    calls: tuple[CallComparison, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateComparison:
    """All that was measured of one candidate."""

    name: str
    meaning: str
    unit_roundoff: float
    verdict: Verdict
    output: TensorError | None
    reference_loss: float | None
    candidate_loss: float | None
    calls: tuple[CallComparison, ...]
    parameters: tuple[ParameterComparison, ...]
    origins: tuple[Origin, ...]
    keep: KeepResult | None
    """None where it passes as it is, or the search was not asked for."""
    notes: tuple[str, ...]
    failure: str = ""
    """What ended the candidate's run before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionReport:
    """The result of `mp_agent.compare_precision`."""

    model: str
    """Name of its class."""
    parameters: int
    reference: str
    tolerance: float
    loss_scale: float
    environment: Mapping[str, str]
    candidates: tuple[CandidateComparison, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> tuple[str, ...]:
        """Return the names of the candidates that pass as they are."""
        return tuple(one.name for one in self.candidates if one.verdict.passed)

    def candidate(self, name: str) -> CandidateComparison:
        """Return the comparison of a candidate. Raises KeyError for one that was not compared."""
        for one in self.candidates:
            if one.name == name:
                return one
        raise KeyError(name)

    def as_json(self) -> str:
        """Return the report as JSON; docs/compare.md describes it."""
        return written(
            {
                "format": "mp_agent precision comparison",
                "version": 1,
                "passed": self.passed,
                **plain(self),
            }
        )

    def as_html(self) -> str:
        """Return the report as one HTML page that loads nothing."""
        from mp_agent.plan.comparison.report import as_html

        return as_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSummary:
    """All calls of a module; errors are those of its worst call."""

    module: str
    kind: str
    calls: int
    worst: CallComparison
    """The call whose output errs most."""
    own: TensorError | None
    own_missing: str
    gradient: TensorError | None
    gradient_own: TensorError | None

    @property
    def role(self) -> ErrorRole:
        """Of the worst call."""
        return self.worst.role


def module_summaries(calls: Sequence[CallComparison]) -> tuple[ModuleSummary, ...]:
    """Return a summary of each module, in the order of their first calls' ends."""
    grouped: dict[str, list[CallComparison]] = {}
    for call in calls:
        grouped.setdefault(call.module, []).append(call)
    return tuple(_summary(group) for group in grouped.values())


def _summary(calls: Sequence[CallComparison]) -> ModuleSummary:
    worst = max(calls, key=lambda call: badness(call.output))
    return ModuleSummary(
        module=worst.module,
        kind=worst.kind,
        calls=len(calls),
        worst=worst,
        own=_worst(call.own for call in calls),
        own_missing=next((call.own_missing for call in calls if call.own_missing), ""),
        gradient=_worst(call.gradient for call in calls),
        gradient_own=_worst(call.gradient_own for call in calls),
    )


def _worst(errors: Iterable[TensorError | None]) -> TensorError | None:
    return max((one for one in errors if one is not None), key=badness, default=None)


def badness(error: TensorError) -> tuple[float, float]:
    """Return how much is lost, then by how much the rest errs: for the worst of several."""
    return (error.nonfinite_ratio, error.relative_l2)


_FACTOR = 2.0
_NEGLIGIBLE = 1e-3
"""Share of the format's own rounding error."""


def role_of(
    input_error: float,
    input_nonfinite: bool,
    output: TensorError,
    own: TensorError | None,
    unit_roundoff: float,
) -> ErrorRole:
    """Return the role of a call: errors are relative, L2.

    Where the output is not finite, the error begins at the call only if what it read was finite.
    Without its own error, an output error that is new is taken for one that begins.
    """
    if not output.elements:
        return ErrorRole.UNKNOWN
    if output.nonfinite_ratio > 0:
        if own is not None and own.nonfinite_ratio > 0:
            return ErrorRole.BEGINS
        return ErrorRole.HANDED_ON if input_nonfinite else ErrorRole.BEGINS
    made, total = own.relative_l2 if own else 0.0, output.relative_l2
    if total <= unit_roundoff * _NEGLIGIBLE and input_error <= unit_roundoff * _NEGLIGIBLE:
        return ErrorRole.HANDED_ON
    if made >= input_error / _FACTOR and made > 0:
        return ErrorRole.BEGINS
    if total > _FACTOR * input_error:
        return ErrorRole.AMPLIFIED if own is not None and input_error > 0 else ErrorRole.BEGINS
    return ErrorRole.REDUCED if total < input_error / _FACTOR else ErrorRole.HANDED_ON


TOLERANCE = 0.05
"""Mean absolute difference of the model's outputs, as a share of their RMS in the reference, from
which on a precision fails: for `compare` as for `recommend`. Far above what rounding to 16 bits
does to a sound model, and far below what an overflow or a cancellation does."""


def verdict_of(
    outputs: Sequence[TensorError],
    losses: tuple[float | None, float | None],
    gradients_finite: bool,
    tolerance: float,
    failure: str = "",
) -> Verdict:
    """Return the verdict on what the model returned.

    losses: the reference's and the candidate's. It passes if the mean absolute difference of what
    the model returns is below the tolerance, a share of its RMS, and if outputs, loss and gradients
    of the parameters are finite wherever those of the reference are.
    """
    mean_abs = max((one.mean_abs for one in outputs), default=0.0)
    relative = _share(mean_abs, outputs)
    lost = max((one.nonfinite_ratio for one in outputs), default=0.0)
    reasons = []
    if failure:
        reasons.append(failure)
    if any(one.elements for one in outputs) and not any(one.is_compared for one in outputs):
        whose = "the model's outputs" if lost > 0 else "the outputs of the reference"
        reasons.append(f"all of {whose} are NaN or Inf: there is nothing to compare")
    elif lost > 0:
        reasons.append(f"{percent(lost)} of the model's outputs are NaN or Inf")
    if relative >= tolerance:
        reasons.append(f"{difference_text(mean_abs, relative)} ≥ {percent(tolerance)}")
    reference, candidate = losses
    if reference is not None and not isfinite(reference):
        reasons.append("the loss of the reference is NaN or Inf")
    elif candidate is not None and not isfinite(candidate):
        reasons.append("the loss is NaN or Inf")
    if not gradients_finite:
        reasons.append("gradients of parameters are NaN or Inf")
    if not failure and not any(one.elements for one in outputs):
        reasons += _judged_by_loss(reference, candidate, tolerance)
    return Verdict(passed=not reasons, reasons=tuple(reasons), mean_abs=mean_abs, relative=relative)


def _judged_by_loss(
    reference: float | None, candidate: float | None, tolerance: float
) -> list[str]:
    """Return why a candidate fails whose model returned nothing to compare but a loss."""
    nothing = "the model returned nothing to compare"
    if reference is None or candidate is None:
        return [nothing]
    difference = abs(candidate - reference)
    if not isfinite(difference) or difference == 0.0 or difference < tolerance * abs(reference):
        return []
    return [f"{nothing}, and the loss is {candidate:.4g} instead of {reference:.4g}"]


def difference_text(mean_abs: float, relative: float) -> str:
    """Return a mean absolute difference, and what share of the outputs' RMS it is."""
    share = percent(relative) if isfinite(relative) else "beyond any share"
    return f"mean absolute difference {scientific(mean_abs)}, {share} of the outputs' RMS"


def _share(mean_abs: float, outputs: Sequence[TensorError]) -> float:
    """Return a difference as a share of the RMS of all outputs; Inf where only those are zero."""
    elements = sum(one.elements for one in outputs)
    largest = max((one.reference_rms for one in outputs), default=0.0)
    if mean_abs == 0.0 or largest == 0.0:
        return inf if mean_abs else 0.0
    # Squares of huge outputs would overflow.
    squares = sum(one.elements * (one.reference_rms / largest) ** 2 for one in outputs)
    return mean_abs / largest / sqrt(squares / elements)


FINE_RATIO, BAD_RATIO = 0.01, 0.05
"""Relative differences of the loss up to which quality is as good, and above which it is lost."""


def quality_grade(difference: float) -> str:
    """Return `fine`, `noticeable` or `bad` for a relative difference of the loss."""
    if difference <= FINE_RATIO:
        return "fine"
    return "noticeable" if difference <= BAD_RATIO else "bad"


def graded_loss(reference: float | None, loss: float | None) -> str:
    """Return in brackets by how much a loss differs, and what that means; "" if not known."""
    if reference is None or loss is None or not isfinite(reference) or not isfinite(loss):
        return ""
    if reference == 0.0:
        return "" if loss else f" ({percent(0.0)}: fine)"
    difference = abs(loss - reference) / abs(reference)
    return f" ({percent(difference)}: {quality_grade(difference)})"
