"""A run as the node agent accounts for it, without rings or processes; and its conditions."""

from pathlib import Path
from typing import Any

from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.ranks import Standstill
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.conditions import ConditionMemory, StoredConditionEvent
from tests.agent.node.builders import make_export, make_run_view, merged_step

EXPLOSION, UPDATE = "MpAgentGradientExplosion", "MpAgentNonFiniteUpdate"
HEALTHY = {"norm": 1.0, "loss": 2.0, "skipped": 0.0, "step_seconds": 0.1, "nan_elements": 0.0}


class Training:
    """A run as the node agent accounts for it, and the clock of its loop."""

    def __init__(self, run_dir: Path, memory: ConditionMemory | None = None, **earlier: Any):
        self.account = Accumulator(
            resolve({}),
            progress=earlier.get("progress", Progress()),
            counters=earlier.get("counters", CounterStore()),
            window_seconds=120.0,
        )
        self.tracker = ConditionTracker(
            run_dir,
            values_in_force(),
            memory=memory or ConditionMemory(),
            earlier=earlier.get("counters"),
        )
        self.events: list[StoredConditionEvent] = []
        self.tracker.listeners.append(self.events.append)
        self.now_seconds, self.sequence = 1_000.0, earlier.get("sequence", 0)
        self.standstill = Standstill()
        self.looks = 0

    def step(self, **values: float) -> None:
        self.sequence += 1
        # What is the same on every step is no healthy loss.
        usual = {**HEALTHY, "loss": HEALTHY["loss"] + self.sequence * 5 % 7 / 100}
        step = merged_step(self.sequence, **{**usual, **values})
        self.account.fold_step(step)
        self.tracker.after_step(self.account, self.now_seconds, self.export)

    def wait(self, seconds: float) -> None:
        self.now_seconds += seconds
        self.tracker.tick(self.now_seconds, self.export)

    def train(self, seconds: float, *, every: float = 1.0, **values: float) -> None:
        for _ in range(round(seconds / every)):
            self.wait(every)
            self.step(**values)

    def export(self) -> RunExport:
        self.looks += 1
        self.standstill.update("", self.sequence, "backward", self.now_seconds)
        run = make_run_view(
            conditions=self.tracker.active,
            conditions_fired=self.tracker.fired,
            phase_name="backward",
            standing_seconds=self.standstill.seconds(self.now_seconds),
        )
        view = self.account.view(run, self.now_seconds)
        return make_export(view=view, counters=self.account.counters)

    def heard(self) -> list[tuple[str, str, str]]:
        return [(e.state, e.condition.name, e.condition.severity) for e in self.events]
