"""Trainings that follow one another in the same processes, as the counters and gauges show them."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.counting import scrape, total, wait_for_agent
from tests.e2e.successive_job import FOLDS, ROUNDS, STEPS
from tests.waiting import wait_until
from tools.jobs import torchrun_job

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

JOB = str(Path(__file__).parent / "successive_job.py")


def test_every_step_of_every_fold_and_round_counts_with_the_norm_of_the_whole_model(tmp_path):
    with torchrun_job(
        (JOB,), run="successive", log_file=tmp_path / "job.log", environment={}
    ) as job:
        assert job.process.wait(180.0) == 0, job.log_tail(60)
        status = wait_for_agent(job)
        expected = ROUNDS * FOLDS * STEPS
        samples = wait_until(
            lambda: (
                (found := scrape(status))
                and total(found, "mp_agent_steps_total") >= expected
                and not total(found, "mp_agent_run_active")
                and found
            ),
            seconds=60,
            what="the last step",
        )
    said = re.search(r"^norms (.*)$", job.log_file.read_text(), re.MULTILINE)
    assert said, job.log_tail(60)
    norms = [float(word) for word in said[1].split()]
    assert total(samples, "mp_agent_steps_total") == expected
    assert total(samples, "mp_agent_records_dropped_total") == 0
    assert total(samples, "mp_agent_probe_errors_total") == 0
    shown = {
        json.loads(labels).get("optimizer", ""): value
        for (name, labels), value in samples.items()
        if name == "mp_agent_grad_norm"
    }
    assert [shown[name] for name in ("", "0", "1")] == pytest.approx(norms, rel=1e-6)
    assert total(samples, "mp_agent_clipped_steps_total") == expected
    labels = {name: labels for name, labels in samples}
    assert '"strategy": "ddp"' in labels["mp_agent_run_info"]
