"""A whole host dies under a job that needs all of them: the job ends, and its end is reported."""

from pathlib import Path

import pytest

from tests.hosts.failures import RUN, missing_ranks, start
from tests.hosts.network import network

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


def test_a_host_that_dies_is_reported_by_the_root_when_the_others_have_ended(tmp_path: Path):
    with network(3, tmp_path) as hosts:
        job = start(hosts, tmp_path)
        job.begin()
        job.until_whole("a step of all ranks")
        hosts[2].kill()
        codes = job.job.wait()
        assert all(codes), "torchrun ends as it does by itself"

        end = job.until("the end of the run", run_active=0)
        assert end["run_end_info{failed}"] == 1
        assert end["rank_up{0}"] == end["rank_up{1}"] == 0
        own = job.until(
            "the end of the other host's ranks", 1, **{"rank_up{2}": 0, "rank_up{3}": 0}
        )
        assert "run_active" not in own
        assert end["steps_total"] >= job.step(0) - 1
        # Of the others, too, some may not have come through the collectives of the last step.
        missing = missing_ranks(end)
        assert not missing or missing >= {4, 5}
        assert hosts[0].wait_for_agent(RUN).port
