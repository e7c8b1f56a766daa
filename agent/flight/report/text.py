"""The texts of an analysis, for the terminal and the page alike."""

from datetime import UTC, datetime

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mp_agent.flight.postmortem.analysis import Analysis
from mp_agent.flight.postmortem.case import headroom_bits
from mp_agent.flight.postmortem.diagnosis import NOT_MEASURED, Diagnosis
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
    return f"{datetime.fromtimestamp(time_unix_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


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


_STYLES = {
    "likely": "bold white on red",
    "possible": "black on yellow",
    "unlikely": "black on bright_black",
    "consequence": "black on cyan",
}


def print_analysis(analysis: Analysis, console: Console) -> None:
    """Print the analysis."""
    style = "red" if analysis.first_bad else "green"
    console.print(Panel(Text(verdict(analysis), style="bold"), border_style=style, expand=False))
    console.print(_pairs(facts(analysis)))
    for finding in analysis.findings:
        console.print(_finding(finding))
    if analysis.remedies:
        console.print(Rule("What to do", align="left"))
        for remedy in analysis.remedies:
            for text in remedy.remedies:
                console.print(Padding(Text(f"• {text}"), (0, 0, 0, 2)))
        first = analysis.remedies[0]
        console.print(Padding(Text(first.why, style="dim"), (0, 0, 0, 2)))
        console.print(Padding(Text(f"To confirm: {first.confirm}", style="dim"), (0, 0, 1, 2)))
    if analysis.moves:
        console.print(Rule("What changed before it", align="left"))
        console.print(_moves(analysis))
    if analysis.around:
        console.print(
            Rule("Steps around it" if analysis.findings else "The last steps", align="left")
        )
        console.print(_steps(analysis))
    if analysis.layers:
        console.print(_layers(analysis))
    console.print(Rule("Ranks and conditions", align="left"))
    console.print(_ranks(analysis))
    for condition in analysis.evidence.conditions:
        console.print(
            Text(
                f"Active: {condition.name} ({condition.severity}) since step "
                f"{condition.since_step}. {condition.description}"
            )
        )
    missing = ", ".join(text for _, text in NOT_MEASURED)
    console.print(Text(f"Not measured, so neither shown nor ruled out: {missing}.", style="dim"))
    for note in analysis.evidence.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _finding(finding: Diagnosis) -> Padding:
    head = Text.assemble(
        (f" {finding.likelihood} ", _STYLES[finding.likelihood]),
        (f" {finding.cause.title}", "bold"),
        f"\n   step {finding.step}" + (f", {finding.place}" if finding.place else ""),
        f"; follows from {finding.follows}" if finding.follows else "",
    )
    lines = [head]
    lines += [Text(f"   + {argument.text}", style="") for argument in finding.arguments_for]
    lines += [Text(f"   − {argument.text}", style="dim") for argument in finding.arguments_against]
    return Padding(Group(*lines), (1, 0, 0, 0))


def _moves(analysis: Analysis) -> Table:
    table = Table("", "6–50 steps before", "1–5 steps before", "at the step", box=None)
    for move in analysis.moves:
        values = (move.long_before, move.just_before, move.at)
        table.add_row(NAMES[move.name], *map(number, values), style="bold" if move.moved else "dim")
    return table


def _steps(analysis: Analysis) -> Table:
    table = Table(*STEP_HEADINGS, box=None)
    for heading in table.columns[:-1]:
        heading.justify = "right"
    bad = analysis.first_bad.sequence if analysis.first_bad else None
    for step in analysis.around:
        cells = [Text(cell) for cell in step_cells(step)]
        table.add_row(*cells, style="bold red" if step.sequence == bad else "")
    return table


def _layers(analysis: Analysis) -> Group:
    table = Table("layer", "gradient norm", "largest", "NaN/Inf", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in analysis.layers:
        nonfinite = f"{layer.nonfinite_elements:.0f}" if layer.nonfinite_elements else ""
        table.add_row(Text(layer.name), number(layer.norm), number(layer.abs_max), nonfinite)
    title = f"The worst layers at step {analysis.layers_step}"
    return Group(Rule(title, align="left"), table)


def _ranks(analysis: Analysis) -> Table:
    table = Table("rank", "host", "end", "phase", "step", box=None)
    shown = [log for log in analysis.evidence.ranks if log.end.name != "COMPLETED"]
    for log in (shown or analysis.evidence.ranks)[:16]:
        identity, state = log.identity, log.state
        table.add_row(
            str(identity.rank),
            Text(identity.host),
            log.end.name.lower(),
            Text(state.phase_name),
            str(state.started_sequence),
        )
    return table
