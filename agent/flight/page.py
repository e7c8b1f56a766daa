"""A analysis as one HTML file: no script, nothing loaded from anywhere."""

from html import escape

from mp_agent.flight.analysis import Analysis
from mp_agent.flight.diagnosis import NOT_MEASURED, Diagnosis
from mp_agent.flight.page_parts import section, table
from mp_agent.flight.page_plots import LANES_MAX, curves, layer_bars, rank_lanes
from mp_agent.flight.page_style import STYLE
from mp_agent.flight.text import NAMES, STEP_HEADINGS, facts, number, step_cells, verdict
from mp_agent.records.steps import EndReason


def as_html(analysis: Analysis) -> str:
    """Return the page."""
    identity = analysis.evidence.identity
    sections = [_head(analysis), _findings(analysis), _remedies(analysis)]
    if analysis.history.steps:
        sections += [curves(analysis), rank_lanes(analysis)]
    sections += [
        layer_bars(analysis),
        _moves(analysis),
        _steps(analysis),
        _ranks(analysis),
        _foot(analysis),
    ]
    title = escape(f"Post-mortem of {identity.run}")
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(analysis: Analysis) -> str:
    kind = "bad" if analysis.first_bad else "good"
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(analysis)
    )
    return (
        f'<header><p class="kicker">mp_agent post-mortem</p>'
        f"<h1>{escape(analysis.evidence.identity.run)}</h1>"
        f'<p class="verdict {kind}">{escape(verdict(analysis))}</p><dl>{rows}</dl></header>'
    )


def _findings(analysis: Analysis) -> str:
    if not analysis.findings:
        return ""
    return section("Likely causes", "".join(map(_finding, analysis.findings)))


def _finding(finding: Diagnosis) -> str:
    place = f"step {finding.step}" + (f", {finding.place}" if finding.place else "")
    follows = f"; follows from {finding.follows}" if finding.follows else ""
    arguments = "".join(
        f'<li class="{kind}">{escape(argument.text)}</li>'
        for kind, arguments in (
            ("for", finding.arguments_for),
            ("against", finding.arguments_against),
        )
        for argument in arguments
    )
    return (
        f'<article class="{finding.likelihood}"><h3><span class="tag">{finding.likelihood}</span> '
        f"{escape(finding.cause.title)}</h3>"
        f'<p class="place">{escape(place + follows)}</p><ul>{arguments}</ul></article>'
    )


def _remedies(analysis: Analysis) -> str:
    if not analysis.remedies:
        return ""
    items = "".join(
        f"<li>{escape(text)}</li>" for remedy in analysis.remedies for text in remedy.remedies
    )
    first = analysis.remedies[0]
    why = f'<p class="muted">{escape(first.why)}</p>'
    confirm = f'<p class="muted">To make sure: {escape(first.confirm)}</p>'
    return section("What to do", f"<ol>{items}</ol>{why}{confirm}")


def _moves(analysis: Analysis) -> str:
    if not analysis.moves:
        return ""
    rows = [
        (NAMES[m.name], number(m.long_before), number(m.just_before), number(m.at))
        for m in analysis.moves
    ]
    headings = ("", "6–50 steps before", "1–5 steps before", "at the step")
    marked = {index for index, move in enumerate(analysis.moves) if move.moved}
    return section("What moved before it", table(headings, rows, marked, kind="numeric"))


def _steps(analysis: Analysis) -> str:
    rows = [step_cells(step) for step in analysis.around]
    bad = analysis.first_bad.sequence if analysis.first_bad else None
    marked = {index for index, step in enumerate(analysis.around) if step.sequence == bad}
    title = "The steps around it" if analysis.findings else "The last steps"
    return section(title, table(STEP_HEADINGS, rows, marked, kind="numeric remarks"))


def _ranks(analysis: Analysis) -> str:
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
        for log in (remarkable or list(logs))[:LANES_MAX]
    ]
    return section("Where each rank stood", table(("rank", "host", "end", "in", "step"), rows))


def _foot(analysis: Analysis) -> str:
    evidence = analysis.evidence
    conditions = "".join(
        f"<li>{escape(c.name)} ({escape(c.severity)}) since step {c.since_step}. "
        f"{escape(c.description)}</li>"
        for c in evidence.conditions
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in evidence.notes)
    missing = ", ".join(text for _, text in NOT_MEASURED)
    parts = [f"<h2>Conditions in force</h2><ul>{conditions}</ul>" if conditions else ""]
    parts.append(f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
    parts.append(
        f'<p class="muted">Not measured, so neither shown nor ruled out: {escape(missing)}.</p>'
    )
    return f"<footer>{''.join(parts)}</footer>"
