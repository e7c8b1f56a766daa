"""Numbers and names as every form of a report writes them."""

from math import isfinite, isnan

from mp_agent.compare.report.model import CandidateComparison, Verdict

MODEL = "(model)"
"""The model itself, whose name among its modules is empty."""


def named(module: str) -> str:
    """Return the name of a module as it is shown."""
    return module or MODEL


def scientific(value: float | None) -> str:
    """Return a number with three digits; "–" for none."""
    if value is None or isnan(value):
        return "–"
    if not isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def percent(ratio: float) -> str:
    """Return a share, without pretending that a small one is none."""
    if ratio == 0:
        return "0 %"
    if ratio < 1e-4:
        return "< 0.01 %"
    return f"{100 * ratio:.2f} %" if ratio < 0.01 else f"{100 * ratio:.3g} %"


def cosine_text(value: float) -> str:
    """Return a cosine: how far it is from 1 where it is close."""
    return f"{value:.4f}" if value < 0.9995 else f"1 − {scientific(1 - value)}"


def verdict_text(verdict: Verdict, tolerance: float) -> str:
    """Return a verdict in one sentence."""
    if verdict.passed:
        return f"passes: mean absolute difference {scientific(verdict.mean_abs)} < {tolerance:g}"
    return f"fails: {'; '.join(verdict.reasons)}"


def keep_text(candidate: CandidateComparison) -> str:
    """Return in one sentence which modules have to stay in FP32; "" where nothing was searched."""
    keep = candidate.keep
    if keep is None:
        return ""
    if not keep.found:
        return f"No set of modules in FP32 was found with which it passes ({keep.trials} trials)."
    names = ", ".join(map(named, keep.kept))
    proof = (
        ""
        if keep.verdict is None
        else "; compared again with them, it "
        + (f"passes ({scientific(keep.verdict.mean_abs)})" if keep.verdict.passed else "fails")
    )
    least = "" if keep.minimal else ", though fewer may do: the trials ran out"
    return f"Keep in FP32: {names}{proof}{least}."
