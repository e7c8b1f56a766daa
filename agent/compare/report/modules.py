"""The calls of each module, taken together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mp_agent.compare.report.model import CallComparison, ErrorRole
from mp_agent.compare.report.tensor_error import TensorError


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
    worst = max(calls, key=lambda call: _badness(call.output))
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
    return max((one for one in errors if one is not None), key=_badness, default=None)


def _badness(error: TensorError) -> tuple[float, float]:
    return (error.nonfinite_ratio, error.relative_l2)
