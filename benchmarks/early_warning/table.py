"""The tables of leads, and the page that holds them."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from benchmarks.early_warning.causes import BY_NAME, CAUSES
from benchmarks.early_warning.judging import LOSS_BASED
from benchmarks.early_warning.leads import (
    CRITICAL_WITHIN_STEPS,
    Pair,
    Reach,
    any_signal,
    critical_delays,
    reaches,
    twins_of,
)
from benchmarks.machine import describe, markdown

PAGE = Path("docs/early-warning.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
LEAD_STEPS, RECALL = 20, 0.9
"""Lead and recall that are aimed at."""


def tables(pairs: Sequence[Pair]) -> str:
    """Return all that was measured, as Markdown."""
    held_out = [pair for pair in pairs if BY_NAME[pair.cause].held_out]
    parts = (
        "## What came out",
        _sentences(pairs, held_out),
        "## By cause",
        _by_cause(pairs),
        "## By condition",
        _by_signal(pairs),
        _of_no_use(pairs),
        "## By training",
        _by_training(pairs),
        _machine(),
    )
    return "\n\n".join(parts)


def write(text: str, page: Path = PAGE) -> None:
    """Replace what is between the marks of a page. ValueError when it has no marks."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: has no {BEGIN} … {END}")
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


def _sentences(pairs: Sequence[Pair], held_out: Sequence[Pair]) -> str:
    """Return how the aims compare with what came out."""
    found, unseen = any_signal(pairs), any_signal(held_out)
    lead, recall = found.median_lead, found.recall
    delays = critical_delays(pairs)
    in_time = sum(delay is not None and delay <= CRITICAL_WITHIN_STEPS for delay in delays)
    known = [delay for delay in delays if delay is not None]
    noticed = sum(bool(pair.faulty.fired) for pair in pairs if pair.left_step is not None)
    twins = twins_of(pairs)
    seeds, causes = ({getattr(pair, name) for pair in pairs} for name in ("seed", "cause"))
    lines = [
        f"{len(causes)} causes, seeds {_names(sorted(map(str, seeds)))}: of {found.wrong} of "
        f"{len(pairs)} trainings the loss left its course.",
        f"Median lead of the first signal to that step: {_number(lead)} steps"
        f"{_range(found.leads)}; aimed at {LEAD_STEPS} or more: "
        f"{_reached(lead is not None and lead >= LEAD_STEPS)}. Of the held-out causes: "
        f"{_number(unseen.median_lead)}{_range(unseen.leads)}.",
        f"Recall, by a signal at any time: {_share(recall)}, of the held-out causes "
        f"{_share(unseen.recall)}; aimed at {RECALL:.0%} or more: "
        f"{_reached(recall is not None and recall >= RECALL)}. Before the loss left its course: "
        f"{found.warned} of {found.wrong}, of the held-out causes {unseen.warned} of "
        f"{unseen.wrong}.",
        f"By any condition, those of the loss included: {noticed} of {found.wrong}.",
        f"Critical alarms on healthy trainings: {found.false_critical} of {found.healthy}; aimed "
        f"at none: {_reached(found.false_critical == 0)}. Any alarm: {found.false_alarms}.",
        f"A loss that doubled was critical within {CRITICAL_WITHIN_STEPS} steps in {in_time} of "
        f"{len(delays)} trainings; median delay {_number(median(known) if known else None)} "
        f"steps{_range(known)}: {_reached(in_time == len(delays))}.",
        f"Healthy trainings whose loss itself stayed above its best at the end: "
        f"{sum(twin.twin_left_step is not None for twin in twins)} of {len(twins)}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _by_cause(pairs: Sequence[Pair]) -> str:
    rows = []
    for cause in CAUSES:
        own = [pair for pair in pairs if pair.cause == cause.name]
        if own:
            found = any_signal(own)
            delays = critical_delays(own)
            rows.append(
                (
                    f"{cause.title} ({cause.source})",
                    cause.model,
                    "yes" if cause.held_out else "",
                    f"{found.wrong} of {len(own)}",
                    f"{_number(found.median_lead)}{_range(found.leads)}",
                    f"{len(found.leads)} of {found.wrong}",
                    f"{found.warned} of {found.wrong}",
                    _firsts(own),
                    _number(median(found.leads_to_condition) if found.leads_to_condition else None),
                    " ".join("–" if delay is None else str(delay) for delay in delays),
                    f"{found.false_alarms} of {found.healthy}",
                )
            )
    header = (
        "cause",
        "model",
        "held out",
        "loss left its course",
        "median lead of the first signal to that (range)",
        "found",
        "found before",
        "the first signal",
        "median lead to a condition of the loss",
        "from a doubled loss to critical, steps",
        "healthy twins with any signal",
    )
    return markdown(header, rows)


def _firsts(pairs: Sequence[Pair]) -> str:
    """Return which signals were the first of their training, with the number of trainings."""
    names = [first[0].removeprefix("MpAgent") for p in pairs if (first := p.first_signal())]
    ordered = sorted(set(names), key=lambda name: (-names.count(name), name))
    return ", ".join(f"{name} {names.count(name)}" for name in ordered)


def _by_signal(pairs: Sequence[Pair]) -> str:
    header = (
        "condition",
        "median lead",
        "leads",
        "fired before",
        "fired at all",
        "fired, the loss did not leave",
        "healthy",
        "healthy, critical",
    )
    found = [each for each in reaches(pairs) if each.leads or each.unmoved or each.false_alarms]
    return markdown(header, [_row(each) for each in (*found, any_signal(pairs))])


def _row(found: Reach) -> tuple[str, ...]:
    return (
        found.signal,
        _number(found.median_lead),
        " ".join(map(str, sorted(found.leads, reverse=True))),
        f"{found.warned} of {found.wrong}",
        f"{len(found.leads)} of {found.wrong}",
        str(found.unmoved),
        f"{found.false_alarms} of {found.healthy}",
        str(found.false_critical),
    )


def _of_no_use(pairs: Sequence[Pair]) -> str:
    """Return which conditions did nothing, and which are effects."""
    found = [each for each in reaches(pairs) if each.signal not in LOSS_BASED]
    late = [each.signal for each in found if each.only_late]
    silent = [each.signal for each in found if not each.leads and not each.unmoved]
    lines = (
        f"Never fired before the loss had left its course, so an effect here: {_names(late)}.",
        f"Never fired on any of these causes: {_names(silent)}.",
    )
    return "\n".join(f"* {line}" for line in lines)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _by_training(pairs: Sequence[Pair]) -> str:
    header = (
        *("cause", "seed", "loss", "twin's loss", "loss left its course", "loss doubled"),
        *("what fired, with its step", "critical", "in the twin"),
    )
    rows = [
        (
            pair.cause,
            str(pair.seed),
            f"{pair.faulty_loss:.3g}",
            f"{pair.healthy_loss:.3g}",
            _number(pair.left_step),
            _number(pair.doubled_step),
            _fired(pair.faulty.fired),
            _fired(pair.faulty.critical),
            _fired(pair.healthy.fired),
        )
        for pair in pairs
    ]
    return markdown(header, rows)


def _fired(fired: Mapping[str, int]) -> str:
    ordered = sorted(fired.items(), key=lambda item: item[1])
    return ", ".join(f"{name.removeprefix('MpAgent')} {step}" for name, step in ordered)


def _machine() -> str:
    today = datetime.now(UTC).date().isoformat()
    return f"{describe(torch.device('cpu'))}; {today}"


def _range(values: Sequence[int]) -> str:
    return f" ({min(values)} to {max(values)})" if values else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _reached(reached: bool) -> str:
    return "reached" if reached else "**not reached**"
