"""A real node agent and clients of all manners: what they get, and what they leave behind in it."""

import gzip
import http.client
import socket
import struct
from pathlib import Path

import pytest

from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.agent_process import StartAgent, get, scrape, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.agent.node.fake_rank import FakeRank
from tests.waiting import wait_until


@pytest.mark.slow
def test_who_refuses_gzip_gets_plain_text(
    start: StartAgent, start_rank: StartRank, run_dir: Path
) -> None:
    start_rank().steps(1)
    start()
    status = wait_for_status(run_dir)

    for refusal in ("gzip;q=0", "gzip;q=0.0, *;q=1", "*;q=0, identity"):
        body, headers = get(f"{status.url}/metrics", {"Accept-Encoding": refusal})
        assert headers["Content-Encoding"] is None, refusal
        assert b"mp_agent_steps_total" in body
    body, headers = get(f"{status.url}/metrics", {"Accept-Encoding": "br;q=1, gzip;q=0.5"})
    assert headers["Content-Encoding"] == "gzip"
    assert b"mp_agent_steps_total" in gzip.decompress(body)


@pytest.mark.slow
def test_a_run_whose_name_is_not_utf8_is_served_everywhere(
    start: StartAgent, settings: Settings
) -> None:
    run_dir = locations.run_directory(settings.dir, "job\udcff")
    with FakeRank(run_dir, run="job\udcff", host="node\udce9", layers=("a\udcff",)) as rank:
        rank.steps(2, loss=1.5)
        rank.layer_table(sum_squares=1.0)
        start("--run-dir", run_dir)
        status = wait_for_status(run_dir)
        openmetrics = {"Accept": "application/openmetrics-text;version=1.0.0"}
        for headers in ({}, openmetrics, {"Accept-Encoding": "gzip"}):
            get(f"{status.url}/metrics", headers)
        assert scrape(status)["loss"] == 1.5
        assert b'run="job?"' in get(f"{status.url}/metrics")[0]
        for path in ("/api/v1/snapshot", "/api/v1/history?run=job%3F", "/sd", "/"):
            get(f"{status.url}{path}")


@pytest.mark.slow
def test_scrapers_that_do_not_wait_leave_no_traceback_and_count_for_nothing(
    start: StartAgent, start_rank: StartRank, run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start_rank(layers=tuple(f"layer{n}" for n in range(300))).layer_table(sum_squares=1.0)
    start()
    status = wait_for_status(run_dir)
    for request in (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /metr\x00\r\n\r\n"):
        for _ in range(50):
            client = socket.create_connection(("127.0.0.1", status.port))
            client.sendall(request)
            # A reset, not an orderly end: the answer finds no one.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
    assert scrape(status)["run_active"] == 1
    wait_until(lambda: wait_for_status(run_dir).scrapes_total >= 1, what="the one whole scrape")

    assert capfd.readouterr().err.count("Traceback") <= 1


@pytest.mark.long
@pytest.mark.slow
def test_clients_that_change_their_names_make_the_agent_no_bigger(
    start: StartAgent, start_rank: StartRank, run_dir: Path
) -> None:
    start_rank().steps(1)
    agent = start()
    status = wait_for_status(run_dir)

    def scrapes(count: int, name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", status.port)
        for number in range(count):
            agent_name = f"{name}-{number}-".ljust(7000, "x")
            connection.request("GET", "/metrics", headers={"User-Agent": agent_name})
            connection.getresponse().read()
        connection.close()

    scrapes(300, "first")
    before = _resident_bytes(agent.pid)
    scrapes(1500, "second")
    # Names of seven thousand bytes: 1 500 of them would be ten megabytes.
    assert _resident_bytes(agent.pid) - before < 6 * 2**20


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
