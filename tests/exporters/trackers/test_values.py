"""What a tracker gets of a snapshot."""

from typing import Any

from mp_agent.catalog.metric import Snapshot
from mp_agent.catalog.thresholds import resolve
from mp_agent.exporters.trackers.client import values_by_run
from mp_agent.node.series.snapshot_builder import SnapshotBuilder
from tests.exporters.status_page.test_report import broken, healed


def sent(source: Any) -> set[str]:
    snapshot: Snapshot = SnapshotBuilder(resolve({}), max_series=20_000).build([source], 0.0)
    return set(values_by_run(snapshot)["llama"])


def test_values_from_before_a_nan_are_not_sent_so_that_curves_end() -> None:
    run = broken()
    healthy = sent(healed(run))
    now = sent(run)
    old = {"loss", "grad_norm", "grad_abs_max", "grad_zero"}
    assert {f"mp_agent/{name}" for name in old} == healthy - now
    assert "mp_agent/step" in now and "mp_agent/nonfinite_updates" in now
