"""An analysis in a terminal, its texts there and on the page, and the same as JSON, for programs.

docs/flight-record.md describes the JSON.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from mp_agent.flight.postmortem.analysis import Analysis
from mp_agent.flight.postmortem.case import headroom_bits
from mp_agent.flight.postmortem.diagnosis import Diagnosis
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import EndReason
from mp_agent.report import terminal
from mp_agent.report.content import Table, picked, written
from mp_agent.report.numbers import moment, number

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

_RANKS_SHOWN = 16

_MOVE_HEADINGS = ("quantity", "6–50 steps before", "1–5 steps before", "at the step")
_STEP_HEADINGS = ("step", "loss", "gradient norm", "loss scale", "headroom", "clipped", "remarks")
_RANK_HEADINGS = ("rank", "host", "end", "phase", "step")


def verdict(analysis: Analysis) -> str:
    """Return the result of the analysis in one sentence."""
    first = analysis.first_bad
    if first is None:
        return _nothing_found(analysis.history.steps)
    where = f" ({first.place})" if first.place else ""
    oldest = min((step.sequence for step in analysis.history.steps), default=1)
    earlier = " or earlier, which the record does not hold" if 1 < first.sequence == oldest else ""
    return f"{first.cause.title}, since step {first.step}{earlier}{where}."


def first_line(analysis: Analysis) -> str:
    """Return the cause, how sure it is, and the first argument for it; on one line."""
    first = analysis.first_bad
    if first is None:
        return verdict(analysis)
    return " ".join(
        (
            f"{first.likelihood.capitalize()}: {verdict(analysis)}",
            *(argument.text for argument in first.arguments_for[:1]),
        )
    )


def _nothing_found(steps: Sequence[MergedStep]) -> str:
    if not steps:
        return "Nothing found: the record holds no step."
    numbers = f"steps {steps[0].step} to {steps[-1].step}"
    return f"Nothing found: no condition held in {numbers}, and their numbers were normal."


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


def moves_table(analysis: Analysis) -> Table:
    """Return what changed before the first bad step."""
    moves = analysis.moves
    rows = [(NAMES[m.name], *map(number, (m.long_before, m.just_before, m.at))) for m in moves]
    return Table(_MOVE_HEADINGS, rows, marked=[i for i, one in enumerate(moves) if one.moved])


def steps_table(analysis: Analysis) -> Table:
    """Return the steps around the first bad one, else the last ones."""
    bad = analysis.first_bad.sequence if analysis.first_bad else None
    return Table(
        _STEP_HEADINGS,
        [_step_cells(step) for step in analysis.around],
        text=(len(_STEP_HEADINGS) - 1,),
        marked=[i for i, step in enumerate(analysis.around) if step.sequence == bad],
    )


def ranks_table(analysis: Analysis, ranks_max: int) -> Table:
    """Return the ranks that did not complete, else all."""
    logs = analysis.evidence.ranks
    remarkable = [log for log in logs if log.end is not EndReason.COMPLETED]
    rows = [
        (
            str(log.identity.rank),
            log.identity.host,
            log.end.name.lower(),
            log.state.phase_name,
            str(log.state.started_sequence),
        )
        for log in (remarkable or list(logs))[:ranks_max]
    ]
    return Table(_RANK_HEADINGS, rows, text=range(len(_RANK_HEADINGS)))


def _step_cells(step: MergedStep) -> tuple[str, ...]:
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


def condition_text(condition: ActiveCondition) -> str:
    """Return a condition that the run had, in a line."""
    when = f"since step {condition.since_step}"
    if condition.ended_step:
        when = f"from step {condition.since_step} to {condition.ended_step}"
    return f"{condition.name} ({condition.severity}) {when}. {condition.description}"


_STYLES = {
    "likely": "bold white on red",
    "possible": "black on yellow",
    "unlikely": "black on bright_black",
    "consequence": "black on cyan",
}


def print_analysis(analysis: Analysis, console: Console) -> None:
    """Print the analysis."""
    console.print(terminal.verdict(verdict(analysis), good=analysis.first_bad is None))
    console.print(terminal.facts(facts(analysis)))
    for finding in analysis.findings:
        console.print(_finding(finding))
    if analysis.remedies:
        first = analysis.remedies[0]
        console.print(terminal.heading("What to do"))
        for text in (text for remedy in analysis.remedies for text in remedy.remedies):
            console.print(terminal.indented(f"• {text}"))
        console.print(terminal.indented(first.why, "dim"))
        console.print(terminal.indented(f"To confirm: {first.confirm}", "dim"), Text())
    if analysis.moves:
        console.print(terminal.heading("What changed before it"))
        console.print(terminal.table(moves_table(analysis)))
    if analysis.around:
        title = "Steps around it" if analysis.findings else "The last steps"
        console.print(terminal.heading(title), terminal.table(steps_table(analysis)))
    if analysis.layers:
        console.print(terminal.heading(f"The worst layers at step {analysis.layers_step}"))
        console.print(terminal.table(_layers(analysis)))
    console.print(terminal.heading("Ranks and conditions"))
    console.print(terminal.table(ranks_table(analysis, _RANKS_SHOWN)))
    for condition in analysis.evidence.conditions:
        held = "Ended" if condition.ended_step else "Active"
        console.print(Text(f"{held}: {condition_text(condition)}"))
    missing = ", ".join(text for _, text in analysis.not_measured)
    console.print(Text(f"Not measured, so neither shown nor ruled out: {missing}.", style="dim"))
    terminal.print_notes(console, analysis.evidence.notes)


def _finding(finding: Diagnosis) -> Padding:
    head = Text.assemble(
        (f" {finding.likelihood} ", _STYLES[finding.likelihood]),
        (f" {finding.cause.title}", "bold"),
        f"\n   step {finding.step}" + (f", {finding.place}" if finding.place else ""),
        f"; follows from {finding.follows}" if finding.follows else "",
        f"; {', '.join(finding.alerts)}" if finding.alerts else "",
    )
    lines = [head]
    lines += [Text(f"   + {argument.text}") for argument in finding.arguments_for]
    lines += [Text(f"   − {argument.text}", style="dim") for argument in finding.arguments_against]
    return Padding(Group(*lines), (1, 0, 0, 0))


def _layers(analysis: Analysis) -> Table:
    rows = [
        (
            layer.name,
            number(layer.norm),
            number(layer.abs_max),
            f"{layer.nonfinite_elements:.0f}" if layer.nonfinite_elements else "",
        )
        for layer in analysis.layers
    ]
    return Table(("layer", "gradient norm", "largest", "NaN/Inf"), rows)


_NANOSECONDS = 1e9


def as_json(analysis: Analysis) -> str:
    """Return the analysis as JSON."""
    return written(as_dict(analysis))


def as_dict(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as plain values."""
    evidence, identity = analysis.evidence, analysis.evidence.identity
    first, steps = analysis.first_bad, analysis.history.steps
    return {
        "format": "mp_agent postmortem",
        "version": 1,
        "source": str(evidence.source),
        "reasons": list(evidence.reasons),
        "run": {
            "name": identity.run,
            **picked(identity, "attempt", "world_size"),
            "end": analysis.end.name.lower(),
            "last_step": steps[-1].step if steps else None,
            "last_step_unix_seconds": analysis.ended_unix_seconds,
            "versions": dict(evidence.versions),
            "facts": dict(evidence.facts),
        },
        "first_bad": None if first is None else {**_place(first), "cause": first.cause.name},
        "findings": [_finding_entry(finding) for finding in analysis.findings],
        "remedies": [
            picked(remedy, "condition", "remedies", "confirm", "why")
            for remedy in analysis.remedies
        ],
        "moves": [
            picked(move, "name", "long_before", "just_before", "at", "moved")
            for move in analysis.moves
        ],
        "steps": [_step(step) for step in steps],
        "layers": {
            "step": analysis.layers_step,
            "worst": [
                {
                    "name": layer.name,
                    "grad_norm": layer.norm,
                    "grad_abs_max": layer.abs_max,
                    "nonfinite_elements": layer.nonfinite_elements,
                }
                for layer in analysis.layers
            ],
        },
        "ranks": [_rank(log) for log in evidence.ranks],
        "conditions": [
            picked(
                condition, "name", "severity", "since_step", "ended_step", "value", "description"
            )
            for condition in evidence.conditions
        ],
        "not_measured": [name for name, _ in analysis.not_measured],
        "notes": list(evidence.notes),
    }


def _place(found: Diagnosis) -> dict[str, Any]:
    return picked(found, "step", "sequence", "rank", "layer", "phase")


def _finding_entry(finding: Diagnosis) -> dict[str, Any]:
    return {
        "cause": finding.cause.name,
        "title": finding.cause.title,
        **picked(finding, "likelihood", "score", "follows"),
        "alerts": list(finding.alerts),
        **_place(finding),
        "for": [picked(argument, "text", "weight") for argument in finding.arguments_for],
        "against": [picked(argument, "text", "weight") for argument in finding.arguments_against],
    }


def _step(step: MergedStep) -> dict[str, Any]:
    return {
        **picked(step, "step", "sequence", "time_unix_seconds"),
        "loss": step.get("loss"),
        "loss_nonfinite_ranks": list(step.nonfinite_loss_ranks),
        "local_grad_nonfinite_ranks": list(step.nonfinite_gradient_ranks),
        "grad_norm": step.grad_norm,
        "grad_norm_counts": step.gradients_judged,
        "grad_abs_max": step.get("abs_max"),
        "grad_nonfinite_elements": step.gradient_nonfinite_elements,
        "loss_scale": step.loss_scale,
        "headroom_bits": headroom_bits(step),
        **picked(step, "skipped", "clip_coefficient"),
        "learning_rate": step.get("learning_rate"),
        "step_seconds": step.get("step_seconds"),
        "missing_ranks": list(step.missing_ranks),
    }


def _rank(log: RankLog) -> dict[str, Any]:
    identity, state = log.identity, log.state
    return {
        **picked(identity, "rank", "node_rank", "host"),
        "end": log.end.name.lower(),
        "phase": state.phase_name,
        "phase_unix_seconds": state.phase_unix_ns / _NANOSECONDS,
        **picked(state, "started_sequence", "committed_sequence", "probe_errors"),
        "records_dropped": state.records_dropped,
    }
