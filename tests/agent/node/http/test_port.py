import socket
from pathlib import Path

import pytest

from tests.agent.node.agent_process import StartAgent, scrape, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.waiting import wait_until


@pytest.mark.slow
def test_a_port_that_is_taken_costs_the_metrics_until_it_is_free(
    start: StartAgent, start_rank: StartRank, run_dir: Path
):
    start_rank()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent = start(port=port)
        status = wait_for_status(run_dir)
        assert (status.port, status.url) == (0, "")
        assert agent.poll() is None
    status = wait_until(
        lambda: (s := wait_for_status(run_dir)).port and s, what="the port", seconds=20
    )
    assert status.port == port
    assert scrape(status)["run_active"] == 1
