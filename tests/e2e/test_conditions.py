"""A real job without Prometheus: its condition reaches the process, the logs and the metrics."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent.node.agent_process import scrape
from tests.waiting import wait_until
from tools.jobs import torchrun_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

JOB = Path(__file__).parent / "conditions_job.py"
EXPLOSION = "MpAgentGradientExplosion"


def heard(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"rank{rank}.jsonl").read_text().splitlines()]


def test_an_explosion_reaches_every_rank_the_logs_and_the_metrics(tmp_path: Path):
    log_file = tmp_path / "job.log"
    with torchrun_job(
        (str(JOB), str(tmp_path)),
        run="explosion",
        log_file=log_file,
        environment={"MP_AGENT_EXIT_WAIT_SECONDS": "0"},
    ) as job:
        status = wait_until(job.agent, seconds=90, what=f"the node agent\n{job.log_tail()}")
        assert job.process.wait(180) == 0, job.log_tail(60)
        values = scrape(status)
        (agent_log,) = (tmp_path / "agent-log").glob("*.log")
        lines = [line for line in agent_log.read_text().splitlines() if EXPLOSION in line]

    for rank in range(2):
        first = heard(tmp_path, rank)[0]
        assert (first["name"], first["severity"], first["state"]) == (
            EXPLOSION,
            "critical",
            "firing",
        )
        assert first["run"] == "explosion"
        assert 1 <= first["since_step"] <= first["step"]
        assert "Clip gradients" in first["remedy"]
        begun = [c for c in heard(tmp_path, rank) if c["state"] == "firing"]
        assert [c["severity"] for c in begun if c["name"] == EXPLOSION].count("critical") == 1
    printed = log_file.read_text()
    assert printed.count(f"{EXPLOSION} (critical) since step") == 1
    first_line = heard(tmp_path, 0)[0]["summary"]
    assert ". Weights: " in first_line and ". Now: " in first_line
    assert f": {first_line}" in printed
    assert "Clip gradients" in printed
    assert "fail raised RuntimeError; training goes on" in printed
    assert f"condition={EXPLOSION} state=firing severity=critical run=explosion" in lines[0]
    assert 'remedy="Clip gradients' in lines[0]
    assert values[f"condition_active{{{EXPLOSION},critical}}"] == 1
    assert values[f"condition_fired_total{{{EXPLOSION},critical}}"] == 1
