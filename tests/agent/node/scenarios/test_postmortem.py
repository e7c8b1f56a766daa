"""A node agent explains a critical condition by its own record, which is served over HTTP."""

import json
import os
import urllib.error
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mp_agent.flight.record.store import newest_report
from mp_agent.node.children import Child, Ended, start_child
from mp_agent.ring.run_files import read_conditions
from tests.agent.node.agent_process import get, wait_for_status
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RATE, JUMPED = 0.001, 0.3
STEPS = 150


def train(rank) -> None:
    """Write healthy steps, then one at 300 times the learning rate, and what follows from it."""
    for n in range(STEPS):
        wobble = n % 7 / 100
        rank.steps(
            loss=2.0 + wobble,
            learning_rate=RATE,
            step_seconds=0.1,
            skipped=0.0,
            gradients={"sum_squares": 1.0 + wobble},
        )
    for n in range(12):
        rank.steps(
            loss=2.0 + 40.0 * n,
            learning_rate=JUMPED,
            step_seconds=0.1,
            skipped=0.0,
            gradients={"sum_squares": 4.0 * 1e4**n},
        )


def conditions(status) -> list[dict[str, Any]]:
    (run,) = json.loads(get(f"{status.url}/api/v1/snapshot")[0])["runs"]
    found: list[dict[str, Any]] = run["conditions"]
    return found


def explained(status) -> list[dict[str, Any]]:
    """Return the conditions once every critical one has its post-mortem."""

    def all_have() -> list[dict[str, Any]]:
        critical = [one for one in conditions(status) if one["severity"] == "critical"]
        return critical if critical and all(one["postmortem"] for one in critical) else []

    return wait_until(all_have, seconds=120, what="the post-mortem of the critical conditions")


def test_a_learning_rate_that_jumps_is_named_by_api_log_event_page_and_files(
    start, start_rank, run_dir, settings, capfd
):
    rank = start_rank()
    train(rank)
    start()
    status = wait_for_status(run_dir)

    jump = f"rose from {RATE} to {JUMPED}, 300-fold"
    for condition in explained(status):
        assert jump in condition["postmortem"], condition
        assert f"since step {STEPS + 1}" in condition["postmortem"]
    logged = capfd.readouterr().err
    lines = [line for line in logged.splitlines() if "state=explained" in line]
    assert lines and all(jump in line for line in lines)
    news = wait_until(lambda: read_conditions(run_dir), what="the conditions for the ranks")
    heard = [one.event for one in news.events if one.event.state == "explained"]
    assert heard and all(jump in event.condition.postmortem for event in heard)

    page, headers = get(f"{status.url}/postmortem/llama")
    assert jump in page.decode() and headers["Content-Type"].startswith("text/html")
    document = json.loads(get(f"{status.url}/postmortem/llama.json")[0])
    assert document["first_bad"]["cause"] == "learning_rate_jump"
    assert document["first_bad"]["step"] == STEPS + 1
    assert newest_report(settings.flight_dir, "llama", "postmortem.html") == page
    assert f'url="{status.url}"' in get(f"{status.url}/metrics")[0].decode()
    assert rank.running


def test_without_flight_records_the_condition_says_what_is_missing(
    start, start_rank, run_dir, settings
):
    train(start_rank())
    start(flight_records_max=0)
    status = wait_for_status(run_dir)
    assert all("flight_records_max is 0" in one["postmortem"] for one in explained(status))
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{status.url}/postmortem/llama")
    assert refused.value.code == 404 and b"flight_records_max" in refused.value.read()


def test_a_directory_that_cannot_be_written_is_named(start, start_rank, run_dir, tmp_path):
    (tmp_path / "file").touch()
    train(start_rank())
    start(flight_dir=tmp_path / "file")
    status = wait_for_status(run_dir)
    assert all(
        "no flight record could be written" in one["postmortem"] for one in explained(status)
    )


def test_a_healthy_run_has_no_post_mortem_and_starts_no_process(start, start_rank, run_dir):
    rank = start_rank()
    for n in range(STEPS):
        rank.steps(loss=2.0 + n % 7 / 100, learning_rate=RATE, gradients={"sum_squares": 1.0})
    agent = start()
    status = wait_for_status(run_dir)
    wait_until(lambda: b"mp_agent_loss" in get(f"{status.url}/metrics")[0], what="the run")
    assert conditions(status) == []
    assert not children(agent.pid)
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{status.url}/postmortem/llama")
    assert refused.value.code == 404 and b"critical condition" in refused.value.read()


def children(pid: int) -> list[str]:
    """Return the processes that a process has started and that are not over."""
    tasks = Path(f"/proc/{pid}/task")
    return [child for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def test_the_reports_are_as_protected_as_the_rest(start, start_rank, run_dir):
    train(start_rank())
    start(basic_auth_user="a", basic_auth_password="b")
    status = wait_for_status(run_dir)
    for path in ("/postmortem/llama", "/postmortem/llama.json", "/runbooks/", "/api/v1/snapshot"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{status.url}{path}")
        assert refused.value.code == 401, path


def ended(*arguments: str) -> Ended:
    """Return how a child process of a node agent ends."""
    child = start_child(arguments, seconds_max=60.0, now_seconds=0.0)
    assert isinstance(child, Child)
    return wait_until(partial(child.poll, 1.0), seconds=60, what="the end of the child process")


def test_what_is_no_record_ends_the_analysis_with_a_reason(tmp_path):
    (tmp_path / "record").mkdir()
    done = ended("-m", "mp_agent.node.commands.flight", str(tmp_path / "record"))
    assert "holds no flight record" in done.problem


def test_an_analysis_limits_itself_to_a_low_priority_and_some_memory():
    code = (
        "import os, resource; from mp_agent.inputs.files import limit_resources as limit; "
        "limit(niceness=10, cpu_seconds=9, memory_bytes=1 << 33); "
        "print(os.nice(0), resource.getrlimit(resource.RLIMIT_AS)[0])"
    )
    niceness, memory_bytes = map(int, ended("-c", code).printed.split())
    assert niceness == min(os.nice(0) + 10, 19) and 0 < memory_bytes <= 1 << 33
