"""`python -m tests.alerting.noise.chaos`: what the rules find when scrapes and evaluations fail.

Prints, per fault and alert, the time from the fault to the alert under each disturbance. With
--write the table goes into docs/alert-path.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.alerting.noise.events import Scenario
from tests.alerting.noise.faults import FAULTS
from tests.alerting.noise.healthy import HEALTHY
from tests.alerting.noise.judge import Verdict, judge
from tests.alerting.noise.replay import SCRAPE_SECONDS, Recording, record
from tests.alerting.noise.scrape_effects import Effect, away, clock_stepped, doubled, missed, moved
from tools.servers import binaries

PAGE = Path(__file__).parents[3] / "docs" / "alert-path.md"
MARK = "<!-- measured: chaos -->"

FAULT_NAMES = (
    "explosion",
    "nan-loss-of-a-rank",
    "killed",
    "vanished",
    "straggler",
)
_FAULT_MINUTE = 25.0
"""When the faults begin, nearly."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What lies between the node agent and the alert. evaluation_seconds: between evaluations."""

    name: str
    effects: tuple[Effect, ...] = ()
    evaluation_seconds: int = SCRAPE_SECONDS


DISTURBANCES = (
    Disturbance("undisturbed"),
    Disturbance("30 % of scrapes missing", (missed(0.3),)),
    Disturbance("Prometheus restarts", (away(_FAULT_MINUTE, _FAULT_MINUTE + 2),)),
    Disturbance("two replicas", (doubled(replica="b"),)),
    Disturbance("pods rescheduled", (moved(_FAULT_MINUTE + 0.5, "rescheduled:9464"),)),
    Disturbance("clock +1 h", (clock_stepped(_FAULT_MINUTE, 3600.0),)),
    Disturbance("clock −1 h", (clock_stepped(_FAULT_MINUTE, -3600.0),)),
    Disturbance("evaluation every 60 s", evaluation_seconds=60),
)


def scenarios(names: Sequence[str] = FAULT_NAMES) -> list[Scenario]:
    """Return the faults by name, and a healthy run."""
    by_name = {scenario.name: scenario for scenario in FAULTS}
    return [*(by_name[name] for name in names), HEALTHY[0]]


def judged(
    recordings: Sequence[Recording], disturbance: Disturbance, promtool: Path, directory: Path
) -> dict[str, Verdict]:
    """Return by run what fires under a disturbance."""
    disturbed = []
    for recording in recordings:
        for effect in disturbance.effects:
            recording = effect(recording)
        disturbed.append(recording)
    verdicts = judge(
        disturbed, promtool, directory, evaluation_seconds=disturbance.evaluation_seconds
    )
    return {verdict.scenario.name: verdict for verdict in verdicts}


def table(found: Mapping[str, Mapping[str, Verdict]]) -> str:
    """Return a Markdown table: a row per fault and alert, a column per disturbance."""
    header = ["fault", "alert", *found]
    rows = [header, ["---"] * len(header)]
    for name, verdict in found["undisturbed"].items():
        for alert in verdict.scenario.expected:
            cells = [_cell(verdicts[name], alert) for verdicts in found.values()]
            rows.append([name, f"`{alert}`", *cells])
    surprises = [_surprises(verdicts.values()) for verdicts in found.values()]
    rows.append(["all, and a healthy run", "false alarms", *surprises])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(verdict: Verdict, alert: str) -> str:
    if alert in verdict.missed:
        return "missed"
    return f"{verdict.seconds_to(alert):.0f} s"


def _surprises(verdicts: Iterable[Verdict]) -> str:
    found = [
        f"{name} ({verdict.scenario.name})" for verdict in verdicts for name in verdict.surprises
    ]
    return ", ".join(found) or "none"


def main() -> int:
    """Return 1 when an alert is missed, or a false one fires."""
    parser = argparse.ArgumentParser(prog="python -m tests.alerting.noise.chaos")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} as well")
    write = parser.parse_args().write
    promtool = binaries.find("promtool")
    if promtool is None:
        print("promtool is needed, and is not to be had here", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        recordings = [record(scenario, directory) for scenario in scenarios()]
        found = {}
        for disturbance in DISTURBANCES:
            found[disturbance.name] = judged(recordings, disturbance, promtool, directory)
            print(table({"undisturbed": found["undisturbed"], **found}), file=sys.stderr)
    text = table(found)
    print(text)
    if write:
        _write(text)
    verdicts = [verdict for of_runs in found.values() for verdict in of_runs.values()]
    return int(any(verdict.missed or verdict.surprises for verdict in verdicts))


def _write(text: str) -> None:
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    _, _, after = rest.partition("<!-- end -->")
    PAGE.write_text(f"{head}{MARK}\n\n{text}\n\n<!-- end -->{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
