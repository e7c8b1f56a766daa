"""The threads of a signal's pushes."""

import threading

from mp_agent.exporters.otlp import signal_pusher
from mp_agent.exporters.otlp.client import Client
from tests.waiting import wait_until


def test_given_up_pushes_do_not_pile_up(tmp_path, monkeypatch):
    over = threading.Event()

    class StuckClient(Client):
        def __init__(self) -> None:
            pass

        def send(self, requests: object, *, limit_seconds: float) -> None:
            over.wait(30)

        def close(self) -> None:
            pass

    def open_client(*, timeout_seconds: float | None = None) -> Client:
        return StuckClient()

    monkeypatch.setattr(signal_pusher, "_GRACE_SECONDS", 0.0)
    stuck = signal_pusher.SignalPusher("otlp", open_client, limit_seconds=0.01)
    before = set(threading.enumerate())
    for _ in range(4):
        assert stuck.free
        stuck.start(lambda: [])
        wait_until(stuck.settle)
    assert not stuck.free
    assert len(set(threading.enumerate()) - before) == 4
    over.set()
    wait_until(lambda: stuck.free)
