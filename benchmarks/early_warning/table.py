"""The tables of leads, and the page that holds them."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.early_warning.causes import CAUSES
from benchmarks.early_warning.judging import LOSS_BASED
from benchmarks.early_warning.leads import Pair, Reach, any_signal, reaches
from benchmarks.machine import describe, markdown

PAGE = Path("docs/early-warning.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
LEAD_STEPS, RECALL = 20, 0.9
"""Lead and recall that are aimed at."""
_HEAD = (
    "# Early warning: planted causes\n"
    "\n"
    "The leads here count to a **condition of the loss** (MpAgentLossSpike, "
    "MpAgentLossDiverging or MpAgentLossNonFinite), which may come long after the loss has "
    "left its healthy course, and, where a table says so, to **the loss itself**: the first "
    "step from which on the loss, as a median of ten steps, stays 10 % above its best or its "
    "twin's. The second is the smaller figure, and the one that says how early a warning is.\n"
    "\n"
    "`python -m benchmarks.early_warning --write` trains small transformers on the CPU "
    "and counts both. Each cause is known from the literature and is trained from several "
    "seeds, each time with a healthy twin: the same shape and data from the same seed, "
    "trained well.\n"
    "\n"
    "* The probe is attached as a user attaches it, with all statistics that are "
    "measured on request; layers are measured on every tenth step, not on every "
    "hundredth as by default, since the trainings are short.\n"
    "* What it wrote is merged and judged as `mp-agent backtest` does, at the shipped "
    "thresholds. Delays of the conditions count in time, as if a step took 10 s.\n"
    "* A training went wrong if a condition of the loss fired, or if its last losses are "
    "more than 5 % above its twin's. A warning is a condition that fired before any of "
    "the loss, or where none of the loss fired. A lead is negative where the condition "
    "came after the loss.\n"
    "* The causes were set on other seeds than those of the tables, so that the "
    "trainings do go wrong; thresholds were not changed for them.\n"
    "\n"
    "These are models of about a hundred thousand parameters and some hundred steps. "
    "What the tables show of a large model is the order in which the conditions fire, "
    "not how many steps lie between them.\n"
)


def tables(pairs: Sequence[Pair]) -> str:
    """Return all that was measured, as Markdown."""
    return "\n\n".join(
        (_sentence(pairs), _by_cause(pairs), _by_signal(pairs), _by_training(pairs), _machine())
    )


def write(text: str, page: Path = PAGE) -> None:
    """Replace what is between the marks of a page, which is begun where there is none.

    ValueError when it has no marks.
    """
    begun = page.exists()
    content = page.read_text(encoding="utf-8") if begun else f"{_HEAD}\n{BEGIN}\n{END}\n"
    head, begin, rest = content.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: has no {BEGIN} … {END}")
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


def _sentence(pairs: Sequence[Pair]) -> str:
    """Return how the aims compare with what came out."""
    found = any_signal(pairs)
    lead, recall = found.median_lead, found.recall
    to_loss = found.median_lead_to_loss
    reached = (
        to_loss is not None and to_loss >= LEAD_STEPS,
        recall is not None and recall >= RECALL,
    )
    lines = [
        f"{found.wrong} of {len(pairs)} trainings that were meant to go wrong did.",
        f"Median lead of the first signal to a condition of the loss: {_number(lead)} steps; to "
        f"the loss itself: {_number(to_loss)}; aimed at {LEAD_STEPS} or more of the latter: "
        f"{_reached(reached[0])}.",
        f"Recall: {_share(recall)}; aimed at {RECALL:.0%} or more: {_reached(reached[1])}.",
        f"Critical alarms on healthy trainings: {found.false_critical} of {found.healthy}; aimed "
        f"at none: {_reached(found.false_critical == 0)}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _by_cause(pairs: Sequence[Pair]) -> str:
    rows = []
    for cause in CAUSES:
        own = [pair for pair in pairs if pair.cause == cause.name]
        if own:
            found = any_signal(own)
            alarms = sum(pair.faulty.loss_step is not None for pair in own if pair.went_wrong)
            rows.append(
                (
                    f"{cause.title} ({cause.source})",
                    f"{found.wrong} of {len(own)}",
                    str(alarms),
                    _number(found.median_lead),
                    _number(found.median_lead_to_loss),
                    f"{found.warned} of {found.wrong}",
                    f"{found.false_alarms} of {found.healthy}",
                )
            )
    header = (
        "cause",
        "went wrong",
        "a condition of the loss fired",
        "median lead of the first signal to it",
        "to the loss itself",
        "warned before",
        "healthy twins with any signal",
    )
    return markdown(header, rows)


def _by_signal(pairs: Sequence[Pair]) -> str:
    header = (
        "condition",
        "median lead to a condition of the loss",
        "to the loss itself",
        "leads to a condition of the loss",
        "fired, the loss did not",
        "recall",
        "healthy",
        "healthy, critical",
    )
    return markdown(header, [_row(found) for found in (*reaches(pairs), any_signal(pairs))])


def _row(found: Reach) -> tuple[str, ...]:
    of_loss = found.signal in LOSS_BASED
    return (
        found.signal,
        "" if of_loss else _number(found.median_lead),
        _number(found.median_lead_to_loss),
        "" if of_loss else " ".join(map(str, sorted(found.leads, reverse=True))),
        "" if of_loss else str(found.alone),
        f"fired in {len(found.leads)} of {found.wrong}" if of_loss else _share(found.recall),
        f"{found.false_alarms} of {found.healthy}",
        str(found.false_critical),
    )


def _by_training(pairs: Sequence[Pair]) -> str:
    header = (
        *("cause", "seed", "loss", "twin's loss", "loss left its course"),
        *("what fired, with its step", "in the twin"),
    )
    rows = [
        (
            pair.cause,
            str(pair.seed),
            f"{pair.faulty_loss:.3g}",
            f"{pair.healthy_loss:.3g}",
            _number(pair.left_step),
            _fired(pair.faulty.fired),
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


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _reached(reached: bool) -> str:
    return "reached" if reached else "**not reached**"
