"""A flight record is judged by the steps and layers that the node agent merged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.values import values_in_force
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.past_runs import play
from mp_agent.backtest.readers.find import read_logs
from mp_agent.errors import LogError
from mp_agent.flight.record.archive import write_archive
from mp_agent.node.cluster.root import MergedTable
from mp_agent.records.columns import FP8, GRADIENTS, OPTIMIZER
from mp_agent.records.columns.column import ColumnFamily
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import family_columns
from tests.agent.flight.builders import make_log, make_node_record, make_segment


def record_of(directory: Path, **values: Any) -> Path:
    segment = make_segment(40, tables=(1, 30), **values)
    with (directory / "node0.npz").open("wb") as file:
        write_archive(file, make_node_record(make_log(segments=(segment,))))
    return directory


def test_a_record_holds_steps_layers_and_ranks(tmp_path: Path) -> None:
    (log,) = read_logs(str(record_of(tmp_path)), ReadOptions())
    assert log.format == "flight"
    assert [point.step for point in log.points] == list(range(1, 41))
    assert {point.loss for point in log.points} == {2.0}
    kinds = [type(item) for item in log.merged]
    assert kinds.count(MergedStep) == 40 and kinds.count(MergedTable) == 2
    # A table follows the step on which it was sampled.
    assert kinds[1] is MergedTable
    assert {Quantity.LAYERS, Quantity.RANKS} <= log.held
    result = play(log, values_in_force())
    assert result.alerts == ()
    assert "MpAgentLayerGradientDead" not in {spot.name for spot in result.blind}


def test_a_loss_that_is_lost_is_found_in_it(tmp_path: Path) -> None:
    values = {"loss": float("nan"), "loss_nonfinite": 1.0}
    (log,) = read_logs(str(record_of(tmp_path, **values)), ReadOptions())
    found = {alert.name: alert for alert in play(log, values_in_force()).alerts}
    assert found["MpAgentLossNonFinite"].severity == "critical"
    assert found["MpAgentLossNonFinite"].first_step == 1


_STALE = {"elements": 1000.0, "active_elements": 1000.0, "squared_ratio_sum": 9000.0}
_SATURATED = {"tensors": 3.0, "scaled_tensors": 3.0, "range_used_max": 9.0, "range_used_min": 0.5}


@pytest.mark.parametrize(
    ("family", "held", "values", "alert"),
    [
        (OPTIMIZER, Quantity.OPTIMIZER, _STALE, "MpAgentSecondMomentStale"),
        (FP8, Quantity.FP8, _SATURATED, "MpAgentFp8Saturation"),
    ],
)
def test_what_a_record_holds_of_another_family_is_judged_too(
    tmp_path: Path, family: ColumnFamily, held: Quantity, values: dict[str, float], alert: str
) -> None:
    row = np.array([values.get(name, 0.0) for name in family.names])
    whole = make_segment(40, tables=(10, 20, 30))
    segment = replace(
        whole,
        schema=replace(whole.schema, families=family_columns((GRADIENTS, family))),
        steps=tuple(
            replace(step, families={**step.families, family.name: row[None, :]})
            for step in whole.steps
        ),
        tables=tuple(
            replace(table, families={**table.families, family.name: np.stack([row, row])})
            for table in whole.tables
        ),
    )
    with (tmp_path / "node0.npz").open("wb") as file:
        write_archive(file, make_node_record(make_log(segments=(segment,))))
    (log,) = read_logs(str(tmp_path), ReadOptions())
    assert held in log.held and Quantity.ACTIVATIONS not in log.held
    result = play(log, values_in_force())
    assert alert in {each.name for each in result.alerts}
    assert alert not in {spot.name for spot in result.blind}


def test_a_record_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = record_of(tmp_path) / "node0.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LogError, match=r"node0\.npz: "):
        read_logs(str(path), ReadOptions())
