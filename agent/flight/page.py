"""A story as one HTML file: no script, nothing loaded from anywhere."""

from html import escape

from mp_agent.flight.findings import NOT_MEASURED, Diagnosis
from mp_agent.flight.page_parts import section, table
from mp_agent.flight.page_plots import LANES_MAX, curves, layer_bars, rank_lanes
from mp_agent.flight.page_style import STYLE
from mp_agent.flight.story import Story
from mp_agent.flight.words import NAMES, STEP_HEADINGS, facts, number, step_cells, verdict
from mp_agent.records.steps import EndReason


def as_html(story: Story) -> str:
    """Return the page."""
    identity = story.evidence.identity
    sections = [_head(story), _findings(story), _remedies(story)]
    if story.history.steps:
        sections += [curves(story), rank_lanes(story)]
    sections += [layer_bars(story), _moves(story), _steps(story), _ranks(story), _foot(story)]
    title = escape(f"Post-mortem of {identity.run}")
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(story: Story) -> str:
    kind = "bad" if story.first_bad else "good"
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(story))
    return (
        f'<header><p class="kicker">mp_agent post-mortem</p>'
        f"<h1>{escape(story.evidence.identity.run)}</h1>"
        f'<p class="verdict {kind}">{escape(verdict(story))}</p><dl>{rows}</dl></header>'
    )


def _findings(story: Story) -> str:
    if not story.findings:
        return ""
    return section("Likely causes", "".join(map(_finding, story.findings)))


def _finding(finding: Diagnosis) -> str:
    place = f"step {finding.step}" + (f", {finding.place}" if finding.place else "")
    follows = f"; follows from {finding.follows}" if finding.follows else ""
    arguments = "".join(
        f'<li class="{kind}">{escape(argument.text)}</li>'
        for kind, arguments in (("for", finding.speaks_for), ("against", finding.speaks_against))
        for argument in arguments
    )
    return (
        f'<article class="{finding.likelihood}"><h3><span class="tag">{finding.likelihood}</span> '
        f"{escape(finding.cause.title)}</h3>"
        f'<p class="place">{escape(place + follows)}</p><ul>{arguments}</ul></article>'
    )


def _remedies(story: Story) -> str:
    if not story.remedies:
        return ""
    items = "".join(
        f"<li>{escape(text)}</li>" for remedy in story.remedies for text in remedy.remedies
    )
    first = story.remedies[0]
    why = f'<p class="muted">{escape(first.why)}</p>'
    confirm = f'<p class="muted">To make sure: {escape(first.confirm)}</p>'
    return section("What to do", f"<ol>{items}</ol>{why}{confirm}")


def _moves(story: Story) -> str:
    if not story.moves:
        return ""
    rows = [
        (NAMES[m.name], number(m.long_before), number(m.just_before), number(m.at))
        for m in story.moves
    ]
    headings = ("", "6–50 steps before", "1–5 steps before", "at the step")
    marked = {index for index, move in enumerate(story.moves) if move.moved}
    return section("What moved before it", table(headings, rows, marked, kind="numeric"))


def _steps(story: Story) -> str:
    rows = [step_cells(step) for step in story.around]
    bad = story.first_bad.sequence if story.first_bad else None
    marked = {index for index, step in enumerate(story.around) if step.sequence == bad}
    title = "The steps around it" if story.findings else "The last steps"
    return section(title, table(STEP_HEADINGS, rows, marked, kind="numeric remarks"))


def _ranks(story: Story) -> str:
    logs = story.evidence.ranks
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


def _foot(story: Story) -> str:
    evidence = story.evidence
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
