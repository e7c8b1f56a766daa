"""What is recorded of ranks, by promtool over series that are known."""

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from grafana.boards import BOARDS
from mp_agent.alerting.rules import AGENT_TROUBLES, RANK_RECORDS, rank_recordings, render_rules
from mp_agent.alerting.values import values_in_force

_RUN = 'cluster="c",namespace="n",job="j",run="llama"'
_RANKS = 24
_PER_NODE = 4


def _series(name: str, values: Mapping[int, str], usual: str, labels: str = "") -> dict[str, str]:
    """Return a series per rank; those of `values` differ from the usual one."""
    more = f",{labels}" if labels else ""
    return {
        f'{name}{{{_RUN},rank="{rank}",instance="node{rank // _PER_NODE}"{more}}}': values.get(
            rank, usual
        )
        for rank in range(_RANKS)
    }


def _input() -> dict[str, str]:
    return {
        **_series("mp_agent_rank_up", {3: "0x10"}, "1x10"),
        **_series("mp_agent_rank_step", {7: "80x10", 8: "98x10"}, "100x10"),
        **_series("mp_agent_rank_last_step_timestamp_seconds", {3: "0x10", 7: "60x10"}, "590x10"),
        # The whole of node 4, and one rank of node 5.
        **_series(
            "mp_agent_rank_compute_seconds",
            {rank: "3x10" for rank in (16, 17, 18, 19)} | {20: "4x10", 21: "2.1x10"},
            "2x10",
        ),
        **_series("mp_agent_rank_loss", {0: "1x10", 1: "9x10"}, "2x10"),
        **_series("mp_agent_rank_loss_nonfinite_steps_total", {5: "6x10"}, "0x10"),
        **_series("mp_agent_rank_phase_info", {}, "1x10", 'phase="forward"'),
        **_series("mp_agent_overhead_ratio", {6: "0.05x10"}, "0.01x10", 'resource="host"'),
        **_series("mp_agent_probe_device_seconds_total", {}, "0+3x10"),
        **_series("mp_agent_rank_local_grad_norm", {2: "30x10", 4: "15x10"}, "10x10"),
        **_series("mp_agent_rank_local_grad_nonfinite_elements_total", {2: "1x10"}, "0x10"),
        **_series("mp_agent_rank_step_part_seconds_total", {9: "0+30x10"}, "0+6x10", 'part="data"'),
        **_series("mp_agent_rank_step_part_seconds_total", {}, "0+24x10", 'part="backward"'),
        **{
            f'{name}{{{_RUN},node_rank="{node}",instance="n"}}': f"{number * (node > 4)}x10"
            for number, name in enumerate(AGENT_TROUBLES)
            for node in range(_RANKS // _PER_NODE)
        },
    }


_EXPECTED: Mapping[str, Mapping[str, float]] = {
    "run:mp_agent_rank_up:sum": {"": _RANKS - 1},
    "run:mp_agent_rank_up:count": {"": _RANKS},
    "run_phase:mp_agent_rank_phase_info:count": {'phase="forward"': _RANKS},
    "run_lag:mp_agent_rank_step:count": {'lag="0"': _RANKS - 1, 'lag="20"': 1},
    "run_rank:mp_agent_rank_step:lag": {'rank="7"': 20},
    "run:mp_agent_rank_last_step_timestamp_seconds:age": {"": 540},
    "run_rank:mp_agent_rank_last_step_timestamp_seconds:age": {'rank="7"': 540},
    "run:mp_agent_rank_compute_seconds:median": {"": 2},
    "run:mp_agent_rank_compute_seconds:max": {"": 4},
    "run_rank:mp_agent_rank_compute_seconds:max": {
        'rank="20"': 4,
        **{f'rank="{rank}"': 3 for rank in (16, 17, 18, 19)},
    },
    "run_node:mp_agent_rank_compute_seconds:min": {'instance="node4"': 3},
    "run_ratio:mp_agent_rank_compute_seconds:count": {
        'ratio="1"': _RANKS - 6,
        'ratio="1.1"': 1,
        'ratio="1.5"': 4,
        'ratio="2"': 1,
    },
    "run:mp_agent_rank_loss:min": {"": 1},
    "run:mp_agent_rank_loss:median": {"": 2},
    "run:mp_agent_rank_loss:max": {"": 9},
    "run_rank:mp_agent_rank_loss_nonfinite_steps_total:max": {'rank="5"': 6},
    "run:mp_agent_rank_local_grad_norm:median": {"": 10},
    "run_rank:mp_agent_rank_local_grad_norm:max": {'rank="2"': 30},
    "run_rank:mp_agent_rank_local_grad_nonfinite_elements_total:max": {'rank="2"': 1},
    "run_resource:mp_agent_overhead_ratio:max": {'resource="host"': 0.05},
    "run_resource:mp_agent_overhead_ratio:median": {'resource="host"': 0.01},
    "run:mp_agent_probe_device_seconds_total:rate": {"": 0.05},
    "run_node:mp_agent_troubles:sum": {'node_rank="5"': 1 + 2 + 3 + 4 + 5},
    "run_part:mp_agent_rank_step_part_seconds_total:rate": {
        'part="data"': (23 * 0.1 + 0.5) / _RANKS,
        'part="backward"': 0.4,
    },
    "run_rank_part:mp_agent_rank_step_part_seconds_total:rate": {'rank="9",part="data"': 0.5},
}


def test_every_record_is_expected_here_and_read_by_a_board() -> None:
    queries = " ".join(
        query.expression for board in BOARDS for panel in board.panels for query in panel.queries
    )
    assert set(_EXPECTED) == RANK_RECORDS
    assert {name for name in RANK_RECORDS if f"{name}{{" not in queries} == set()


@pytest.mark.e2e
def test_the_records_say_what_the_ranks_do(server: Callable[[str], Path], tmp_path: Path) -> None:
    samples = [
        {
            "expr": f"round({name}, 0.0001)",
            "eval_time": "10m",
            "exp_samples": [
                {
                    "labels": f"{{{','.join(filter(None, (_RUN, labels)))}}}",
                    "value": round(value, 4),
                }
                for labels, value in expected.items()
            ],
        }
        for name, expected in _EXPECTED.items()
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in _input().items()],
        "promql_expr_test": samples,
    }
    (tmp_path / "rules.yaml").write_text(render_rules(values_in_force(), groups={}))
    file = tmp_path / "test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    done = subprocess.run(
        [server("promtool"), "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_site_selects_the_ranks_that_are_recorded() -> None:
    values = values_in_force(selectors={"series": 'cluster="a"', "targets": 'job="x"'})
    for group in rank_recordings(values).values():
        for name, expression in group.items():
            assert 'cluster="a"' in expression, name
