"""What the terminal shows: a live line per job, alerts as they arrive, a closing table."""

from collections import deque
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from examples.demo.outcome import Outcome
from examples.demo.reading import Reading
from examples.demo.scenarios import Scenario
from tools.servers.webhook import Notification

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 40
_PLAIN_LINE_EVERY = 8
_STYLES = {"critical": "bold white on red", "warning": "black on yellow", "info": "black on cyan"}
_SHOWN = (
    ("loss", "mp_agent_loss"),
    ("gradient norm", "mp_agent_grad_norm"),
    ("loss scale", "mp_agent_loss_scale"),
)


class Screen:
    """Shows one job after the other; where there is no terminal, plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._history: dict[str, deque[float]] = {}
        self._readings = 0

    def __enter__(self) -> "Screen":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def opening(self, lines: Sequence[str]) -> None:
        """Say what is about to be seen."""
        self._console.print(Panel("\n".join(lines), title="mp_agent demo", expand=False))

    def job_begins(self, number: int, total: int, scenario: Scenario) -> None:
        """Announce a job and its mistake."""
        self._history = {name: deque(maxlen=_HISTORY) for name, _ in _SHOWN}
        self._readings = 0
        self._console.print(Rule(f"Job {number} of {total}: {scenario.title}", align="left"))
        self._console.print(f"The mistake: {scenario.mistake}.", style="italic")
        if self._console.is_terminal:
            self._live.start()
            self._live.update(Text("starting torchrun on 2 ranks …", style="dim"))

    def show(self, reading: Reading) -> None:
        """Show the live values of one reading."""
        for name, metric in _SHOWN:
            if (value := reading.value(metric)) is not None:
                self._history[name].append(value)
        if self._console.is_terminal:
            self._live.update(self._values(reading))
        elif self._readings % _PLAIN_LINE_EVERY == 0:
            self._console.print(_plain_line(reading))
        self._readings += 1

    def alert(self, alert: Notification) -> None:
        """Show an alert that arrived, with its remedy."""
        head = Text.assemble(
            (f" {alert.severity.upper()} ", _STYLES.get(alert.severity, "reverse")),
            f" {alert.name}",
        )
        notes = alert.annotations
        body = [notes.get(key, "") for key in ("summary", "description")]
        lines = [head, *(Text(text) for text in body if text)]
        lines.append(Text.assemble(("What to do: ", "bold"), notes.get("remedy", "")))
        self._console.print(Padding(Group(*lines), (1, 0, 0, 2)))

    def job_ends(self, outcome: Outcome) -> None:
        """Say what went wrong first."""
        self._live.stop()
        self._console.print(Padding(Text(outcome.sentence, style="bold"), (1, 0, 1, 2)))

    def closing(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Show all jobs side by side."""
        alerts = Column("alerts", overflow="fold")
        table = Table("job", "went wrong first", "step", "layer", alerts, title="What was found")
        for outcome in outcomes:
            first = outcome.first
            table.add_row(
                outcome.scenario.title,
                first.what if first else "nothing",
                str(first.step) if first else "",
                first.layer if first else "",
                "\n".join(
                    f"{alert.name.removeprefix('MpAgent')} ({alert.severity})"
                    for alert in outcome.alerts
                ),
            )
        self._console.print(table)
        self._console.print(f"{seconds:.0f} s; nothing is left running.", style="dim")

    def _values(self, reading: Reading) -> Table:
        table = Table(box=None, padding=(0, 2), show_header=False)
        table.add_row("step", f"{reading.count('mp_agent_step'):.0f}", "")
        for name, _ in _SHOWN:
            values = self._history[name]
            table.add_row(name, f"{values[-1]:.4g}" if values else "", _spark(values))
        skipped = reading.count("mp_agent_skipped_steps_total")
        table.add_row("skipped steps", f"{skipped:.0f}", "")
        return table


def _plain_line(reading: Reading) -> str:
    values = (
        f"{name} {value:.4g}"
        for name, metric in _SHOWN
        if (value := reading.value(metric)) is not None
    )
    return f"  step {reading.count('mp_agent_step'):.0f}  " + "  ".join(values)


def _spark(values: Sequence[float]) -> str:
    """Return values as a row of bars, the largest at full height."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = high - low or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in values)
