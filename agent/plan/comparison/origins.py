"""The places where error begins, worst first."""

from collections.abc import Iterable, Sequence
from math import inf

from mp_agent.plan.comparison.model import (
    CallComparison,
    Origin,
    OriginKind,
    ParameterComparison,
    named,
)
from mp_agent.report.numbers import percent, scientific

ORIGINS_MAX = 10
_UNDERFLOW_RATIO = 0.05
_NOTABLE_ROUNDOFFS = 2.0
_AMPLIFIED = 10.0
INPUTS = "(inputs)"
"""Stands for the batch, where it is beyond the range of the format."""


def origins_of(
    calls: Sequence[CallComparison],
    parameters: Sequence[ParameterComparison],
    unit_roundoff: float,
) -> tuple[Origin, ...]:
    """Return where NaN and Inf begin, in the order of execution, then what loses most.

    A call loses by rounding (the relative error of its own operations), by underflow (the share of
    its outputs that became zero), or by amplification. Calls of one module count once.
    """
    lost = [*_overflows(calls), *_gradient_overflows(calls, parameters)]
    losing = [origin for call in calls if (origin := _loss(call, unit_roundoff))]
    losing += [origin for call in calls if (origin := _amplification(call, unit_roundoff))]
    losing.sort(key=lambda origin: -origin.severity)
    return _each_once([*lost, *losing, *_gradient_underflows(calls)])[:ORIGINS_MAX]


def _overflows(calls: Sequence[CallComparison]) -> list[Origin]:
    begun = sorted(calls, key=lambda call: call.order)
    if begun and begun[0].input_nonfinite:
        text = "the batch holds values that the format cannot: they become Inf when it is cast"
        return [_origin(INPUTS, OriginKind.OVERFLOW, inf, text)]
    found = []
    for call in calls:
        if call.own_nonfinite_finite_inputs and call.own is not None:
            share = percent(call.own.nonfinite_ratio)
            what = "Inf" if call.own.overflow_ratio >= call.own.nan_ratio else "NaN"
            text = f"{share} of its outputs become {what}, from finite inputs"
            found.append(_origin(call.module, OriginKind.OVERFLOW, inf, text))
    if found:
        return found
    lost = [c for c in calls if c.output.nonfinite_ratio > 0 and not c.input_nonfinite]
    text = (
        "{} of its outputs are NaN or Inf, though what it read was finite; its own operations "
        "could not be distinguished"
    )
    return [
        _origin(
            call.module, OriginKind.OVERFLOW, inf, text.format(percent(call.output.nonfinite_ratio))
        )
        for call in lost
        if call.own is None
    ]


def _origin(module: str, kind: OriginKind, severity: float, text: str) -> Origin:
    return Origin(module=named(module), kind=kind, severity=severity, text=text)


def _gradient_overflows(
    calls: Sequence[CallComparison], parameters: Sequence[ParameterComparison]
) -> list[Origin]:
    """Return the first gradients with NaN or Inf, unless the forward pass has some already."""
    if any(call.output.nonfinite_ratio > 0 for call in calls):
        return []
    backward = sorted(calls, key=lambda call: -call.order)
    for call in backward:
        if call.gradient_own is not None and call.gradient_own.nonfinite_ratio > 0:
            share = percent(call.gradient_own.nonfinite_ratio)
            return [_gradient_origin(call.module, f"{share} of the gradients that it computes")]
        if call.gradient is not None and call.gradient.nonfinite_ratio > 0:
            share = percent(call.gradient.nonfinite_ratio)
            return [_gradient_origin(call.module, f"{share} of the gradient of its output")]
    lost = [one for one in parameters if one.gradient.nonfinite_ratio > 0]
    return [
        _gradient_origin(one.name, f"{percent(one.gradient.nonfinite_ratio)} of its gradient")
        for one in lost[:1]
    ]


def _gradient_origin(name: str, what: str) -> Origin:
    text = f"{what} become NaN or Inf; a smaller loss scale may avoid it"
    return _origin(name, OriginKind.GRADIENT_OVERFLOW, inf, text)


def _loss(call: CallComparison, unit_roundoff: float) -> Origin | None:
    """Return how much a call's own operations lose, where that is notable."""
    own = call.own
    if own is None or not own.elements or own.nonfinite_ratio > 0:
        return None
    if own.underflow_ratio > max(own.relative_l2, _UNDERFLOW_RATIO):
        text = f"{percent(own.underflow_ratio)} of its outputs become zero"
        return _origin(call.module, OriginKind.UNDERFLOW, own.underflow_ratio, text)
    if own.relative_l2 <= _NOTABLE_ROUNDOFFS * unit_roundoff:
        return None
    times = own.relative_l2 / unit_roundoff
    text = (
        f"its own operations err by {scientific(own.relative_l2)}, "
        f"{times:,.0f} times the rounding of one operation"
    )
    return _origin(call.module, OriginKind.ROUNDING, own.relative_l2, text)


def _amplification(call: CallComparison, unit_roundoff: float) -> Origin | None:
    """Return how much a call enlarges what it reads, where that is far more than it adds."""
    own, total = call.own, call.output.relative_l2
    if own is None or call.input_nonfinite or call.output.nonfinite_ratio > 0:
        return None
    made = max(own.relative_l2, call.input_error)
    if made == 0 or total <= _AMPLIFIED * made or total <= _NOTABLE_ROUNDOFFS * unit_roundoff:
        return None
    text = (
        f"an error of {scientific(call.input_error)} in what it reads becomes "
        f"{scientific(total)}; a small difference of large numbers does that"
    )
    return _origin(call.module, OriginKind.AMPLIFICATION, total, text)


def _gradient_underflows(calls: Iterable[CallComparison]) -> list[Origin]:
    found = [
        _origin(
            call.module,
            OriginKind.GRADIENT_UNDERFLOW,
            own.underflow_ratio,
            f"{percent(own.underflow_ratio)} of the gradients that it computes become zero; "
            "a loss scale may avoid it",
        )
        for call in calls
        if (own := call.gradient_own) is not None and own.underflow_ratio > _UNDERFLOW_RATIO
    ]
    return sorted(found, key=lambda origin: -origin.severity)


def _each_once(origins: Sequence[Origin]) -> tuple[Origin, ...]:
    kept: dict[tuple[str, OriginKind], Origin] = {}
    for origin in origins:
        kept.setdefault((origin.module, origin.kind), origin)
    return tuple(kept.values())
