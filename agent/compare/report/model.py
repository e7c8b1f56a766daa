"""The result of a comparison of precisions, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mp_agent.compare.report.tensor_error import TensorError


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
    """In which calls begin."""
    module: str
    kind: str
    """Name of its class."""
    depth: int
    """Of the call: 0 for the loss function."""
    input_error: float
    """Relative L2 error of what it read."""
    input_nonfinite: bool
    """Whether it read NaN or Inf where the reference did not."""
    output: TensorError
    own: TensorError | None
    """Of its own operations, run from the reference's inputs; modules within it left out."""
    own_missing: str
    """Why there is no `own`; empty where there is."""
    own_nonfinite_finite_inputs: bool
    """Whether its own operations turn finite inputs into NaN or Inf."""
    operand_underflow_ratio: float | None
    """Operands of its products that rounding made zero; None where none are rounded."""
    role: ErrorRole
    gradient: TensorError | None
    """Of the gradient that reaches its outputs."""
    gradient_own: TensorError | None
    """Of the gradients that its own backward computes from the reference's inputs and gradient."""


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
    """Of a further comparison, with them kept."""
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
        from mp_agent.compare.report.document import as_json

        return as_json(self)

    def as_html(self) -> str:
        """Return the report as one HTML page that loads nothing."""
        from mp_agent.compare.report.html.page import as_html

        return as_html(self)
