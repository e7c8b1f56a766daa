"""`mp-agent export` from a real Prometheus: every series of the run, with the step of its time."""

import csv
import json
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mp_agent.cli import main
from tools.synthetic_store import prometheus_over

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INTERVAL_SECONDS, SCRAPES = 15, 20


def test_every_series_of_the_run_is_in_the_table(server, tmp_path: Path) -> None:
    end = int(time.time()) // INTERVAL_SECONDS * INTERVAL_SECONDS
    times = [end - INTERVAL_SECONDS * back for back in reversed(range(SCRAPES))]
    text = tmp_path / "samples.txt"
    with text.open("w") as file:
        for metric, labels, scale in (
            ("mp_agent_step", "", 10.0),
            ("mp_agent_loss", "", 0.5),
            ("mp_agent_layer_grad_norm", ',layer="head.weight"', 0.25),
            ("mp_agent_rank_up", ',rank="3"', 1.0),
        ):
            for run in ("llama", "other"):
                for at, when in enumerate(times, start=1):
                    own = f'run="{run}",instance="node:9464"{labels}'
                    file.write(f"{metric}{{{own}}} {scale * at} {when}\n")
        file.write("# EOF\n")
    (tmp_path / "data").mkdir()
    command = ("tsdb", "create-blocks-from", "openmetrics", "--quiet")
    files = (str(text), str(tmp_path / "data"))
    subprocess.run([server("promtool"), *command, *files], check=True, stdout=subprocess.DEVNULL)
    with prometheus_over(server("prometheus"), tmp_path) as url:
        options = ("--run", "llama", "--start", str(times[0]), "--end", str(times[-1]))
        output = ("--to", "csv", "--output", str(tmp_path / "run.csv"))
        result = CliRunner().invoke(main, ["export", url, *options, *output])
        assert result.exit_code == 0, result.output
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * SCRAPES and {row["run"] for row in rows} == {"llama"}
    norms = [row for row in rows if row["name"] == "mp_agent_layer_grad_norm"]
    assert {row["layer"] for row in norms} == {"head.weight"}
    assert [float(row["time_unix_seconds"]) for row in norms] == times
    assert [int(row["step"]) for row in norms] == [10 * at for at in range(1, SCRAPES + 1)]
    assert [float(row["value"]) for row in norms] == [0.25 * at for at in range(1, SCRAPES + 1)]
    ranks = [json.loads(row["labels"]) for row in rows if row["name"] == "mp_agent_rank_up"]
    assert ranks == [{"instance": "node:9464", "rank": "3"}] * SCRAPES
