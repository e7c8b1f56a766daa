"""The texts of an analysis, for the terminal and the page alike."""

from datetime import datetime, timezone

from mp_agent.flight.postmortem.analysis import Analysis
from mp_agent.flight.postmortem.case import headroom_bits
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import EndReason

NAMES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "grad_abs_max": "largest gradient",
    "loss_scale": "loss scale",
    "headroom_bits": "FP16 headroom (bits)",
    "clip_coefficient": "clip coefficient",
    "learning_rate": "learning rate",
    "step_seconds": "step time (s)",
}
"""Names of the quantities that a post-mortem follows."""

_WHOLE_MAX = 1e7
_RANKS_SHOWN = 16

STEP_HEADINGS = ("step", "loss", "gradient norm", "loss scale", "headroom", "clipped", "remarks")


def number(value: float | None) -> str:
    """Return a number with four digits, a whole one in full; a dash for none."""
    if value is None:
        return "–"
    whole = abs(value) < _WHOLE_MAX and value == int(value)
    return f"{value:.0f}" if whole else f"{value:.4g}"


def moment(time_unix_seconds: float | None) -> str:
    """Return a time in UTC."""
    if time_unix_seconds is None:
        return "–"
    return f"{datetime.fromtimestamp(time_unix_seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def verdict(analysis: Analysis) -> str:
    """Return the result of the analysis in one sentence."""
    first = analysis.first_bad
    if first is None:
        return "Nothing found: the numbers of this run were normal."
    where = f" ({first.place})" if first.place else ""
    return f"{first.cause.title}, since step {first.step}{where}."


def ending(analysis: Analysis) -> str:
    """Return when and how the run ended."""
    when = moment(analysis.ended_unix_seconds)
    steps = analysis.history.steps
    last = f"step {steps[-1].step}" if steps else "no step"
    if analysis.end is EndReason.RUNNING:
        return f"was running; {last}, {when}"
    return f"{analysis.end.name.lower()} after {last}, {when}"


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Return facts about the run, by name."""
    evidence, identity = analysis.evidence, analysis.evidence.identity
    known = evidence.facts
    hosts = sorted({log.identity.host for log in evidence.ranks})
    versions = dict(evidence.versions) or {
        "mp_agent": identity.version,
        "torch": identity.torch_version,
    }
    rows = [
        ("run", f"{identity.run}, attempt {identity.attempt}"),
        ("ended", ending(analysis)),
        ("ranks", f"{len(evidence.ranks)} of {identity.world_size}, on {', '.join(hosts)}"),
        (
            "training",
            ", ".join(
                f"{k} {known[k]}" for k in ("strategy", "precision", "scaler") if known.get(k)
            ),
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("source", f"{evidence.source}"),
    ]
    if evidence.reasons:
        rows.insert(2, ("recorded because of", ", ".join(evidence.reasons)))
    return [(name, text) for name, text in rows if text]


def step_cells(step: MergedStep) -> tuple[str, ...]:
    """Return one row of the table of steps, in the order of `STEP_HEADINGS`."""
    norm = step.grad_norm
    coefficient = step.clip_coefficient
    clipped = "" if coefficient is None or coefficient >= 1.0 else f"×{coefficient:.3g}"
    return (
        str(step.step),
        "NaN/Inf" if step.flag("loss_nonfinite") else number(step.get("loss")),
        number(norm) if step.gradients_judged else f"({number(norm)})",
        number(step.loss_scale),
        number(headroom_bits(step)),
        clipped,
        ", ".join(_remarks(step)),
    )


def _remarks(step: MergedStep) -> list[str]:
    remarks = []
    if step.skipped:
        remarks.append("skipped")
    if step.gradient_nonfinite_elements > 0:
        remarks.append(f"{step.gradient_nonfinite_elements:.0f} NaN/Inf gradients")
    if step.nonfinite_loss_ranks and len(step.nonfinite_loss_ranks) < len(step.present_ranks):
        remarks.append("loss of rank " + ", ".join(map(str, step.nonfinite_loss_ranks)))
    elif 0 < len(step.nonfinite_gradient_ranks) < len(step.present_ranks):
        ranks = ", ".join(map(str, step.nonfinite_gradient_ranks))
        remarks.append(f"own gradients of rank {ranks}")
    if step.missing_ranks:
        missing = step.missing_ranks
        shown = ", ".join(map(str, missing[:_RANKS_SHOWN]))
        more = f" and {len(missing) - _RANKS_SHOWN} more" if missing[_RANKS_SHOWN:] else ""
        remarks.append(f"without rank {shown}{more}")
    return remarks
