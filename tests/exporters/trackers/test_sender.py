"""What a tracker gets, and that nothing waits for it."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from mp_agent.exporters.trackers.client import (
    WAITING_MAX,
    Entry,
    TrackedRun,
    TrackerSender,
    go_direct_to_this_machine,
)
from mp_agent.records.views import TrackerLink
from tests import waiting

wait_until = partial(waiting.wait_until, seconds=60)


class Client:
    """A tracker that takes its time, or fails."""

    name = "llama (mp_agent)"
    url = "https://user:secret@tracker.example/run?key=secret"

    def __init__(self, *, fails: bool = False) -> None:
        self.got: list[Entry] = []
        self.may_go_on = threading.Event()
        self.entered = threading.Event()
        self.closed = False
        self._fails = fails

    def log(self, values: Mapping[str, float], step: int, time_unix_seconds: float) -> None:
        self.entered.set()
        self.may_go_on.wait()
        if self._fails:
            raise OSError("no route")
        self.got.append(Entry(values, step, time_unix_seconds))

    def close(self) -> None:
        self.closed = True


def entry(step: int) -> Entry:
    return Entry({"mp_agent/loss": float(step), "mp_agent/step": float(step)}, step, 1e9 + step)


@pytest.fixture
def send_to(tmp_path: Path) -> Callable[[Client], TrackerSender]:
    return lambda client: TrackerSender("t", TrackedRun("llama", tmp_path), lambda run: client)


def ended(sender: TrackerSender) -> None:
    sender.close()
    wait_until(lambda: sender.closed, what="the thread's end")


def test_everything_arrives_in_order_and_the_run_is_closed(send_to):
    client = Client()
    client.may_go_on.set()
    sender = send_to(client)
    for step in range(50):
        sender.send(entry(step))
    ended(sender)
    assert client.got == [entry(step) for step in range(50)]
    assert client.closed
    assert (sender.account.failures, sender.account.rejected) == (0, 0)
    assert sender.account.last_success_unix_seconds is not None


def test_where_the_run_is_shown_is_known_once_it_is_open_and_without_the_secrets(send_to, caplog):
    client = Client()
    sender = send_to(client)
    assert sender.link is None
    with caplog.at_level("INFO"):
        sender.send(entry(0))
        client.may_go_on.set()
        ended(sender)
    url = "https://tracker.example/run"
    assert sender.link == TrackerLink(tracker="t", name="llama (mp_agent)", url=url)
    (record,) = caplog.records
    assert record.getMessage() == f"run llama is shown at {url}"


def test_what_a_tracker_that_hangs_does_not_take_is_counted_and_nothing_waits(send_to):
    client = Client()
    sender = send_to(client)
    sender.send(entry(0))
    client.entered.wait()
    for step in range(1, WAITING_MAX + 6):
        sender.send(entry(step))  # would never return if it waited
    assert sender.account.rejected == 5 * 2
    client.may_go_on.set()
    ended(sender)
    # The end takes the place of the oldest where the queue was full when it was asked for.
    kept = [item.step for item in client.got]
    assert kept == sorted(kept) and kept[-1] == WAITING_MAX
    assert len(kept) * 2 + sender.account.rejected == (WAITING_MAX + 6) * 2


def test_failures_are_counted_and_logged_once_without_their_message(send_to, caplog):
    client = Client(fails=True)
    client.may_go_on.set()
    sender = send_to(client)
    for step in range(3):
        sender.send(entry(step))
    ended(sender)
    assert (sender.account.failures, sender.account.rejected) == (3, 6)
    (record,) = caplog.records
    assert record.getMessage() == "t: run llama: OSError"
    assert sender.account.last_success_unix_seconds is None


def test_a_run_that_cannot_be_opened_is_not_tried_at_every_step(tmp_path: Path):
    tried: list[TrackedRun] = []

    def refuse(run: TrackedRun) -> Client:
        tried.append(run)
        raise ValueError("no key")

    sender = TrackerSender("t", TrackedRun("llama", tmp_path), refuse)
    for step in range(5):
        sender.send(entry(step))
    ended(sender)
    assert len(tried) == 1
    assert (sender.account.failures, sender.account.rejected) == (1, 10)


def test_a_tracker_on_this_machine_is_exempt_from_proxies_and_no_other_is() -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000", "no_proxy": "a.example"}
    go_direct_to_this_machine("mlflow", environ)
    assert environ["no_proxy"] == environ["NO_PROXY"] == "a.example,127.0.0.1"
    before = {"WANDB_BASE_URL": "https://wandb.example", "MLFLOW_TRACKING_URI": "http://[::1]"}
    environ = dict(before)
    go_direct_to_this_machine("wandb", environ)
    go_direct_to_this_machine("tensorboard", environ)
    assert environ == before
