"""Runs the demo: one job per scenario, watched from outside until its alerts have arrived."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.demo.alerts import AlertSource, alert_source
from examples.demo.display import Screen
from examples.demo.outcome import Outcome
from examples.demo.reading import Reading, read_metrics
from examples.demo.scenarios import Scenario
from examples.demo.story import Story
from tools.jobs import Job, torchrun_job
from tools.servers.webhook import Notification

_LOOK_INTERVAL_SECONDS = 0.25
_QUIET_SECONDS = 4.0
"""After the end of a job: no further alert for so long means that all have arrived."""
_NO_STEP_SECONDS_MAX = 90.0
"""A job that makes no step for so long is given up."""
_ENVIRONMENT = {
    "MP_AGENT_LAYER_INTERVAL": "1",
    "MP_AGENT_EXIT_WAIT_SECONDS": "3",
    "MP_AGENT_LINGER_SECONDS": "60",
}


def run_demo(scenarios: Sequence[Scenario], console: Console) -> list[Outcome]:
    """Run the scenarios one after the other and return what was found."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mp_agent-demo-") as directory,
        alert_source(Path(directory)) as source,
        Screen(console) as screen,
    ):
        screen.opening((_SETTING, *source.describe()))
        outcomes = []
        for number, scenario in enumerate(scenarios, 1):
            screen.job_begins(number, len(scenarios), scenario)
            outcome = _run_job(scenario, Path(directory), source, screen)
            screen.job_ends(outcome)
            outcomes.append(outcome)
        screen.closing(outcomes, time.monotonic() - began)
    return outcomes


_SETTING = (
    "A character-level transformer learns Python's standard library: torchrun, 2 ranks, DDP, "
    "CPU, FP16 autocast, GradScaler."
)


def _run_job(scenario: Scenario, directory: Path, source: AlertSource, screen: Screen) -> Outcome:
    arguments = ("-m", "examples.demo.train", "--scenario", scenario.name)
    run = f"demo-{scenario.name}"
    log_file = directory / f"{scenario.name}.log"
    with torchrun_job(arguments, run=run, log_file=log_file, environment=_ENVIRONMENT) as job:
        watch = _Watch(job, source, screen)
        while watch.goes_on():
            watch.look()
            time.sleep(_LOOK_INTERVAL_SECONDS)
        problem = "" if watch.seen else f"The job could not be watched:\n{job.log_tail()}"
    return Outcome(scenario=scenario, first=watch.story.first, alerts=watch.alerts, problem=problem)


class _Watch:
    """Looks at one job again and again, and passes on what is new."""

    def __init__(self, job: Job, source: AlertSource, screen: Screen) -> None:
        self._job = job
        self._source = source
        self._screen = screen
        self._url = ""
        self._last_news = self._last_step = time.monotonic()
        self._steps = 0.0
        self.story = Story()
        self.alerts: tuple[Notification, ...] = ()

    @property
    def seen(self) -> bool:
        """Whether the node agent was found."""
        return bool(self._url)

    def goes_on(self) -> bool:
        """Return whether the job runs, or may still bring an alert."""
        return time.monotonic() - self._last_news < _QUIET_SECONDS

    def look(self) -> None:
        """Take one look at the job's metrics and alerts."""
        now = time.monotonic()
        reading = self._read()
        if reading is not None:
            self.story.add(reading)
            self._screen.show(reading)
            if (steps := reading.count("mp_agent_steps_total")) != self._steps:
                self._steps, self._last_step = steps, now
        alerts = tuple(self._source.firing(self._job.run, reading))
        for alert in alerts[len(self.alerts) :]:
            self._screen.alert(alert)
        trains = self._job.running and now - self._last_step < _NO_STEP_SECONDS_MAX
        if trains or len(alerts) > len(self.alerts):
            self._last_news = now
        self.alerts = alerts

    def _read(self) -> Reading | None:
        if not self._url:
            status = self._job.agent()
            if status is None:
                return None
            self._url = status.url
            self._source.watch(self._job.run, status.url.removeprefix("http://"))
        return read_metrics(self._url)
