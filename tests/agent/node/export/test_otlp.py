"""Real node agents that push by OTLP to a real receiver, over real rings."""

import asyncio
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mp_agent.catalog.metric import Snapshot
from mp_agent.node.export.push import OtlpPush
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests import waiting
from tests.agent.node.agent_process import scrape, start_agent, wait_for_status
from tests.agent.node.conftest import StartRank
from tests.exporters.otlp.receiver import Answer, OtlpReceiver
from tests.exporters.otlp.samples import event
from tests.exporters.otlp.translation import attributes_of, labels, stored

wait_until = partial(waiting.wait_until, seconds=60)
"""An agent takes long to start where much else is at work."""

STEPS = ("mp_agent_steps_total", labels({"run": "llama"}))
ACTIVE = ("mp_agent_run_active", STEPS[1])
STOP_SECONDS = 5.0
"""What the documentation says of the delay at the end."""

StartAgent = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def receiver(monkeypatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running


@pytest.fixture
def start(run_dir: Path, settings: Settings) -> Iterator[StartAgent]:
    """Start an agent for the run that pushes and serves; kill it when the test ends."""
    with ExitStack() as stack:

        def start_(**changes: object) -> "subprocess.Popen[bytes]":
            both = {"exporters": ("prometheus", "otlp"), **changes}
            agent = start_agent(settings.model_copy(update=both), "--run-dir", run_dir)
            stack.callback(agent.wait)
            stack.callback(agent.kill)
            return agent

        yield start_


def current(receiver: OtlpReceiver) -> dict[Any, Any]:
    return stored(receiver.messages())


def states(receiver: OtlpReceiver) -> list[dict[Any, Any]]:
    """Return what was current after each request."""
    messages = receiver.messages()
    return [stored(messages[: count + 1]) for count in range(len(messages))]


@pytest.mark.slow
def test_a_run_is_pushed_to_its_end_and_is_gone_once_its_linger_is_over(
    start: StartAgent, start_rank: StartRank, run_dir: Path, receiver: OtlpReceiver
):
    rank = start_rank()
    rank.steps(3, loss=1.25)
    agent = start(linger_seconds=1.5, exporters=("otlp",))
    wait_until(lambda: current(receiver).get(STEPS) == 3, what="the first steps")
    assert wait_for_status(run_dir).otlp_pending
    rank.steps(2)
    rank.end(EndReason.COMPLETED)
    pending = set()

    def over() -> bool:
        if status := locations.read_status(run_dir):
            pending.add(status.otlp_pending)
        return agent.poll() is not None

    wait_until(over, what="the agent's end")
    assert agent.returncode == 0
    assert False in pending, "that the end was pushed is reported while the agent lingers"
    *_, last, gone = states(receiver)
    assert (last[STEPS], last[ACTIVE]) == (5, 0)
    assert gone == {}


@pytest.mark.slow
def test_a_successor_goes_on_with_the_same_series(
    start: StartAgent, start_rank: StartRank, run_dir: Path, receiver: OtlpReceiver
):
    rank = start_rank()
    rank.steps(3)
    first = start()
    wait_until(lambda: current(receiver).get(STEPS) == 3, what="the first steps")
    first.send_signal(signal.SIGTERM)
    first.wait(60)
    rank.steps(4)
    start()
    wait_until(lambda: current(receiver)[STEPS] == 7, what="the later steps")

    instances, births = set(), set()
    for message in receiver.messages():
        (resource,) = message.resource_metrics
        instances.add(attributes_of(resource.resource)["service.instance.id"])
        for metric in resource.scope_metrics[0].metrics:
            if metric.name == "mp_agent.steps":
                births |= {p.start_time_unix_nano for p in metric.sum.data_points}
    assert len(instances) == len(births) == 1
    assert 0 < time.time_ns() - births.pop() < 600 * 10**9


@pytest.mark.slow
def test_what_fails_is_seen_by_who_scrapes(
    start: StartAgent, start_rank: StartRank, run_dir: Path, receiver: OtlpReceiver, monkeypatch
):
    receiver.answer = lambda path: Answer(status=500)
    start_rank().steps(1)
    start()
    status = wait_until(lambda: (s := wait_for_status(run_dir)).port and s, what="the port")

    def value(name: str) -> float | None:
        return scrape(status).get(name)

    wait_until(lambda: (value("export_failures_total{otlp,0}") or 0) >= 2, what="failures")
    assert value("export_failures_total{otlp_logs,0}") == 0
    assert value("export_last_success_timestamp_seconds{otlp,0}") is None
    receiver.answer = lambda path: Answer()
    wait_until(lambda: value("export_last_success_timestamp_seconds{otlp,0}"), what="success")
    wait_until(
        lambda: any(
            name == "mp_agent_export_failures_total" and value >= 2
            for (name, _), value in current(receiver).items()
        ),
        what="the failures being pushed",
    )


@pytest.mark.slow
def test_a_signal_ends_an_agent_within_its_bound_though_no_collector_answers(
    start: StartAgent, start_rank: StartRank, run_dir: Path, receiver: OtlpReceiver
):
    answer = threading.Event()
    receiver.answer = lambda path: Answer(after=answer)
    start_rank().steps(1)
    agent = start()
    wait_until(lambda: receiver.posted, what="a push")
    agent.send_signal(signal.SIGTERM)
    # The endpoint holds its answer back for much longer.
    agent.wait(STOP_SECONDS + 15)
    answer.set()


class _NoRuns:
    """A node agent without runs, around an OtlpPush."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.push = OtlpPush(
            Settings(**settings),
            shown=lambda: [],
            snapshot=lambda shown: Snapshot(),
            directory=lambda: directory,
        )

    def live(self) -> None:
        self.push.start()
        self.push.tick(0.0)
        asyncio.run(self.push.stop(time.monotonic() + 1))


def test_nothing_is_made_unless_it_is_asked_for(tmp_path):
    idle = _NoRuns(tmp_path)
    idle.live()
    assert idle.push.accounts == ()


@pytest.mark.slow
def test_a_run_that_goes_wrong_is_a_log_record(
    start: StartAgent, start_rank: StartRank, run_dir: Path, receiver: OtlpReceiver
):
    rank = start_rank()
    rank.steps(1)
    start()
    wait_until(lambda: receiver.messages(), what="a push")
    # Stepped, not skipped, with NaN in the gradients: weights are being destroyed.
    rank.steps(3, gradients={"nan_elements": 2.0})
    (message, *_) = wait_until(lambda: receiver.messages("logs"), what="the log record")
    (record, *_) = message.resource_logs[0].scope_logs[0].log_records
    said = attributes_of(record)
    assert (said["condition"], said["state"]) == ("MpAgentNonFiniteUpdate", "firing")
    assert said["run"] == "llama" and said["remedy"]


def test_a_condition_that_the_node_agent_hears_of_is_sent(tmp_path, receiver):
    push = _NoRuns(tmp_path, exporters=("otlp",)).push
    push.start()
    push.on_condition(event(at=time.time()))

    def arrived() -> bool:
        push.tick(0.0)
        return any(account.last_success_unix_seconds for account in push.accounts)

    wait_until(arrived, what="the log record")
    assert receiver.messages("logs")
    asyncio.run(push.stop(time.monotonic() + 5))


def test_a_missing_extra_is_named_and_nothing_else_suffers(tmp_path, monkeypatch, caplog):
    for name in [n for n in sys.modules if n.startswith("mp_agent.exporters.otlp")]:
        monkeypatch.delitem(sys.modules, name)
    pushing = _NoRuns(tmp_path, exporters=("otlp",))
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    pushing.live()
    assert pushing.push.accounts == ()
    assert "mp-agent[otlp]" in caplog.text


def test_the_environment_can_switch_it_off(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mp_agent")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    pushing = _NoRuns(tmp_path, exporters=("otlp",))
    pushing.live()
    assert pushing.push.accounts == ()
    assert "switch it off" in caplog.text


def test_the_age_of_a_run_is_that_of_its_lock(run_dir: Path, settings: Settings):
    from mp_agent.node.export.push import _born_unix_ns
    from mp_agent.node.registry import RunSupervisor

    run_dir.mkdir(parents=True, mode=0o700)
    lock_fd = locations.hold_agent_lock(run_dir)
    assert lock_fd is not None
    watch = RunSupervisor(run_dir, lock_fd, settings, setting_errors=0, now_seconds=0.0)
    born = _born_unix_ns(watch)
    assert born == locations.agent_lock_path(run_dir).stat().st_mtime_ns
    watch.release()
    assert _born_unix_ns(watch) == born
    locations.agent_lock_path(run_dir).unlink()
    assert _born_unix_ns(watch) >= born
