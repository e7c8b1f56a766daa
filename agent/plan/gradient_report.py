"""What a check of gradients found: its numbers, its texts, its JSON. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from mp_agent.report import terminal
from mp_agent.report.content import Table, picked, written
from mp_agent.report.numbers import counted, number, scientific

BY_DESIGN = (
    "What stops gradients on purpose looks the same: straight-through estimators of quantization, "
    "detached targets, teachers that are averages of the weights."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMismatch:
    """A module whose own parameters get another gradient than finite differences show.

    Derivatives of the loss are along a random direction of these parameters.
    """

    module: str
    parameters: tuple[str, ...]
    """Those of its own parameters that disagree by themselves."""
    autograd: float | None
    """None: NaN or Inf."""
    differences: float
    """By central finite differences, at the step that agrees best."""
    error: float
    """Relative to the larger of what was measured and what is usual for a direction."""
    limit: float
    """Above which it disagrees, from the size of the step and the noise of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """Gradients of a model against central finite differences of its loss, in FP64."""

    model: str
    parameters: int
    modules: int
    """That have parameters of their own to train."""
    losses: tuple[float, float]
    """Twice, with the same random numbers."""
    unrepeatable: str
    """What is not the same twice with the same random numbers: `loss`, `gradients`; else ""."""
    noise: float
    """Of the loss, next to the weights."""
    mismatches: tuple[GradientMismatch, ...]
    """The last in the forward pass first: gradients go wrong there, or between it and the loss."""
    following: str
    """The module with parameters that runs after the first of these and agrees; "" for none."""
    unmeasured: tuple[str, ...]
    """Modules whose gradient cannot be distinguished from the noise of the loss."""
    coarsest: float
    """The largest limit below which an error of a module that agrees remains unseen."""
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there is a gradient that could be checked, and none that disagrees."""
        checked = len(self.unmeasured) < self.modules
        return checked and not self.mismatches and not self.unrepeatable

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.unrepeatable == "loss":
            first, second = (number(loss, 12) for loss in self.losses)
            return (
                "The loss is not the same twice with the same random numbers: "
                f"{first} and {second}. No gradient was checked."
            )
        if self.unrepeatable:
            return "The gradients are not the same twice with the same random numbers."
        if self.mismatches:
            return (
                f"The gradients of {len(self.mismatches)} of {counted(self.modules, 'module')} "
                "disagree with finite differences of the loss."
            )
        measured = self.modules - len(self.unmeasured)
        if not measured:
            return "No gradient could be checked: the loss has too much noise."
        return (
            f"Gradients agree with finite differences of the loss to {scientific(self.coarsest)}: "
            f"{counted(measured, 'module')}."
        )

    def as_json(self) -> str:
        """Return the report as JSON."""
        return written(
            {
                "format": "mp_agent gradient check",
                "version": 1,
                **picked(self, "verdict", "passed", "model", "parameters", "modules", "losses"),
                **picked(self, "unrepeatable", "noise", "mismatches", "following", "unmeasured"),
                **picked(self, "coarsest", "notes"),
                "by_design": BY_DESIGN if self.mismatches else "",
            }
        )


def print_gradients(report: GradientReport, console: Console, *, rows: int) -> None:
    """Print the verdict, then the modules that disagree; rows: at most so many."""
    console.print(terminal.verdict(report.verdict, good=report.passed))
    console.print(Text(f"{report.model}, {report.parameters:,} parameters, in FP64"))
    if report.mismatches:
        console.print(terminal.heading("Last in the forward pass first"))
        console.print(terminal.table(_table(report.mismatches[:rows])))
        if (more := len(report.mismatches) - rows) > 0:
            console.print(Text(f"and {counted(more, 'more module')}", style="dim"))
        console.print(Text(_place(report)))
        console.print(Text(BY_DESIGN))
    terminal.print_notes(console, (*_unmeasured(report), *report.notes))


def _table(mismatches: Sequence[GradientMismatch]) -> Table:
    return Table(
        ("module", "parameters", "autograd", "differences", "error"),
        [
            (
                one.module or "(the model)",
                ", ".join(one.parameters),
                "NaN or Inf" if one.autograd is None else scientific(one.autograd),
                scientific(one.differences),
                scientific(one.error),
            )
            for one in mismatches
        ],
        text=(0, 1),
    )


def _place(report: GradientReport) -> str:
    first = report.mismatches[0].module or "the model's own parameters"
    end = report.following or "the loss"
    return (
        f"Gradients are lost or wrong from {end} back to {first}: look at what lies between them "
        f"in the forward pass, {first} included. What runs before gets its gradients through it."
    )


def _unmeasured(report: GradientReport) -> list[str]:
    if not report.unmeasured:
        return []
    names = ", ".join(report.unmeasured[:5])
    more = len(report.unmeasured) - 5
    return [
        "not checked, since their gradients are too small against the noise of the loss "
        f"({scientific(report.noise)}): {names}{f' and {more} more' if more > 0 else ''}"
    ]
