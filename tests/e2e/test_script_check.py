"""A job that asks for it has its script checked by the node agent, and its mistakes exported."""

from pathlib import Path

import pytest

from tests.agent.node.agent_process import get, scrape
from tests.waiting import wait_until
from tools.jobs import torchrun_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

JOB = Path(__file__).parent / "script_job.py"
LINT = "MpAgentPrecisionLint"


def test_a_mistake_in_a_file_that_the_script_imports_becomes_a_condition(tmp_path: Path) -> None:
    with torchrun_job(
        (str(JOB), str(tmp_path)),
        run="linted",
        log_file=tmp_path / "job.log",
        ranks=1,
        environment={"MP_AGENT_EXIT_WAIT_SECONDS": "0"},
    ) as job:
        status = wait_until(job.agent, seconds=120, what=f"the node agent\n{job.log_tail()}")
        values = wait_until(
            lambda: (
                found if (found := scrape(status)).get(f"condition_active{{{LINT},info}}") else None
            ),
            seconds=300,
            what="the condition",
        )
        assert values["lint_findings{MP106}"] == 1
        assert values["lint_files"] == 2
        assert values["probe_errors_total{0}"] == 0
        body, _ = get(f"{status.url}/api/v1/snapshot", {})
        assert JOB.name.encode() not in body, "the path stays on the node"
        (tmp_path / "stop").touch()
        assert job.process.wait(180) == 0, job.log_tail(60)
        (agent_log,) = (tmp_path / "agent-log").glob("*.log")
    lines = agent_log.read_text()
    assert "script_job_step.py:16: MP106" in lines
    assert f"condition={LINT} state=firing severity=info run=linted" in lines
    assert "breaks rule MP106 of mp-agent check in 1 place(s)" in lines
