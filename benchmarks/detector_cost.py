"""What judging a run costs the node agent: processor time per step and memory, as a table.

Run: python benchmarks/detector_cost.py
"""

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.conditions import tracker
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.conditions import ConditionMemory
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason
from mp_agent.records.views import AgentView, RunView

HOURS = 3
STEP_SECONDS = 2.5
MEASURED_STEPS = 1_000
IDENTITY = RankIdentity(
    run="benchmark",
    attempt=0,
    launch="benchmark",
    rank=0,
    world_size=8,
    local_rank=0,
    local_world_size=8,
    node_rank=0,
    host="localhost",
    pid=1,
    created_unix_ns=1,
    torch_version="",
    version="",
)
AGENT = AgentView(
    version="",
    probe_seconds=0.0,
    probe_errors=0,
    setting_errors=0,
    records_dropped=0,
    series_dropped=0,
    scrape_duration_seconds=None,
    unsupported=(),
)


class Training:
    """A healthy FP16 run of one node, as its root accounts for it."""

    def __init__(self, run_dir: Path) -> None:
        self.account = Accumulator(
            resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
        )
        self.tracker = ConditionTracker(run_dir, values_in_force(), memory=ConditionMemory())
        self.sequence = 0
        self.now_seconds = 0.0

    def fold(self, **changes: float) -> None:
        """Take one more step into the account."""
        self.sequence += 1
        self.now_seconds += STEP_SECONDS
        columns = {
            "loss": 2.0 + self.sequence % 7 / 10,
            "loss_scale": 65536.0,
            "skipped": 0.0,
            "step_seconds": STEP_SECONDS,
        }
        gradients = {
            "sum_squares": 1.0 + self.sequence % 5 / 10,
            "nan_elements": 0.0,
            "inf_elements": 0.0,
            **changes,
        }
        self.account.fold_step(
            MergedStep(
                sequence=self.sequence,
                step=self.sequence,
                time_unix_seconds=self.now_seconds,
                columns=columns,
                families={GRADIENTS.name: gradients},
                complete=frozenset({GRADIENTS.name}),
                world_size=8,
                present_ranks=frozenset(range(8)),
                compute_seconds=dict.fromkeys(range(8), 0.1),
            )
        )

    def judge(self) -> None:
        """Judge the step that was folded last."""
        self.tracker.after_step(self.account, self.now_seconds, self._export)

    def _export(self) -> RunExport:
        view = RunView(
            identity=IDENTITY,
            facts={},
            nodes=1,
            active=True,
            end_reason=EndReason.RUNNING,
            phase_name="forward",
            conditions=self.tracker.active,
            conditions_fired=self.tracker.fired,
        )
        view = self.account.view(view, self.now_seconds)
        return RunExport(
            run="benchmark",
            node_rank=0,
            view=view,
            layers=(),
            ranks=(),
            faded_ranks=frozenset(),
            agent=AGENT,
            counters=self.account.counters,
        )


def mean_microseconds(training: Training, **values: float) -> tuple[float, float]:
    """Return what folding a step costs, and what judging it costs on top."""
    fold_seconds = judge_seconds = 0.0
    for _ in range(MEASURED_STEPS):
        begun = time.process_time()
        training.fold(**values)
        folded = time.process_time()
        training.judge()
        judge_seconds += time.process_time() - folded
        fold_seconds += folded - begun
    return fold_seconds / MEASURED_STEPS * 1e6, judge_seconds / MEASURED_STEPS * 1e6


def aged(run_dir: Path) -> Training:
    """Return a run whose histories are full."""
    training = Training(run_dir)
    while training.now_seconds < HOURS * 3600:
        training.fold()
        training.judge()
    return training


def with_share(share: float, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Return what `measure` says when judging may take this share of a processor."""
    before, tracker.PROCESSOR_SHARE = tracker.PROCESSOR_SHARE, share
    try:
        return measure()
    finally:
        tracker.PROCESSOR_SHARE = before


def main() -> None:
    """Measure and print."""
    tracker.PROCESSOR_SHARE = 1.0
    with tempfile.TemporaryDirectory() as directory:
        tracemalloc.start()
        grown = aged(Path(directory))
        megabytes = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
        rows = {
            "every step judged, healthy": with_share(1.0, lambda: mean_microseconds(grown)),
            "every step judged, exploding": with_share(
                1.0, lambda: mean_microseconds(grown, sum_squares=1e8)
            ),
            "as fast as it goes, 5 %": with_share(0.05, lambda: mean_microseconds(grown)),
        }
    print("| steps | folding, µs | judging, µs |\n|---|---|---|")
    for name, (fold, judge) in rows.items():
        print(f"| {name} | {fold:.0f} | {judge:.0f} |")
    print(f"\nHistories of {HOURS} hours: {megabytes:.1f} MiB with the run's account.")


if __name__ == "__main__":
    main()
