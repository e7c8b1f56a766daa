"""Endpoints that are down, slow, rejecting, busy, babbling, or come back: nothing is lost by it."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mp_agent.exporters.otlp import signal_pusher
from tests.exporters.otlp.receiver import Answer, OtlpReceiver
from tests.exporters.otlp.samples import PHASE, event, everything, family, snapshot, steps
from tests.exporters.otlp.service_loop import started
from tests.exporters.otlp.translation import labels, stored
from tests.waiting import wait_until

STEPS = ("mp_agent_steps_total", labels({"run": "llama"}))

pytestmark = pytest.mark.usefixtures("short_timeout")


@contextmanager
def raw_server(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Accept connections and say whatever `talk` does; yield the URL."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve() -> None:
            while not over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        connection.recv(65536)
                        talk(connection, over)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


def test_an_endpoint_that_comes_back_after_ten_minutes_has_every_increment(
    receiver, answers, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "mp_agent")
    answers(status=503)
    with started(tmp_path) as loop:
        for count in range(10):
            loop.push(steps(float(count)), after_seconds=60)
        assert loop.outcomes("otlp") == (10, 0)
        answers(status=200)
        loop.push(steps(10.0))
        assert loop.outcomes("otlp") == (10, 1)
        last_success_unix_seconds = loop.account().last_success_unix_seconds
        assert last_success_unix_seconds is not None
        assert time.time() - last_success_unix_seconds < 60

    assert stored(receiver.messages()) == {STEPS: 10.0}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, "an outage is logged when it begins and when it ends"
    assert "a push failed" in lines[0] and "after 10 failures" in lines[1]


def test_a_port_where_at_first_nothing_listens(tmp_path, monkeypatch):
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
        assert loop.outcomes("otlp") == (1, 0)
        with OtlpReceiver(port=receiver.port) as late:
            loop.push(steps(2.0))
            assert stored(late.messages()) == {STEPS: 2.0}


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 502, 503])
def test_a_rejection_is_counted_and_training_data_stays(status, receiver, answers, tmp_path):
    answers(status=status)
    with started(tmp_path) as loop:
        loop.push(everything())
        assert (loop.account().failures, loop.delivered) == (1, 0)
        answers(status=200)
        loop.push(steps(3.0))
    assert stored(receiver.messages())[STEPS] == 3.0


def test_who_is_busy_is_left_alone_for_as_long_as_he_asks(receiver, answers, tmp_path):
    answers(status=429, headers={"Retry-After": "120"})
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
        loop.now += 119
        loop.tick()
        answers(status=200)
        loop.push(steps(2.0), after_seconds=2)
    assert loop.outcomes("otlp") == (1, 1)
    assert [stored([posted.message])[STEPS] for posted in receiver.posted] == [1.0, 2.0]


def test_no_endpoint_is_left_alone_for_ever(receiver, answers, tmp_path):
    answers(status=429, headers={"Retry-After": "999999999"})
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
        loop.push(steps(2.0), after_seconds=301)
    assert len(receiver.posted) == 2


def test_who_is_busy_for_a_moment_gets_it_within_the_same_push(receiver, tmp_path):
    first = iter([Answer(status=429, headers={"Retry-After": "0"})])
    receiver.answer = lambda path: next(first, Answer())
    with started(tmp_path) as loop:
        loop.push(steps(1.0))
    assert (loop.account().failures, len(receiver.posted)) == (0, 2)


def test_a_slow_endpoint_delays_nothing_else(receiver, answers, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    answer = threading.Event()
    answers(after=answer)
    with started(tmp_path) as loop:
        loop.shown = steps(1.0)
        loop.tick()
        wait_until(lambda: receiver.posted)
        for _ in range(50):
            loop.now += 60
            loop.tick()
        assert len(receiver.posted) == 1, "one push at a time"
        assert loop.stop(seconds=0.5) < 3.0
        assert loop.account().failures == 1
        answer.set()


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_the_end_is_not_delayed_beyond_its_bound(seconds, receiver, answers, tmp_path):
    answer = threading.Event()
    answers(after=answer)
    with started(tmp_path) as loop:
        loop.service.on_condition(event())
        loop.tick()
        assert loop.stop(seconds=seconds) < seconds + 2.0
        answer.set()


def test_the_last_push_does_not_wait_for_the_one_before(receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    stuck = threading.Event()
    first = iter([Answer(after=stuck)])
    receiver.answer = lambda path: next(first, Answer())
    with started(tmp_path) as loop:
        loop.shown = steps(1.0)
        loop.tick()
        wait_until(lambda: receiver.posted)
        loop.shown = steps(2.0)
        assert loop.stop(seconds=5.0) < 4.0
        assert stored(receiver.messages())[STEPS] == 2.0
        stuck.set()


def test_what_a_push_under_way_may_have_brought_is_taken_back_at_the_end(receiver, tmp_path):
    stuck = threading.Event()
    first = iter([Answer(after=stuck)])
    receiver.answer = lambda path: next(first, Answer())
    with started(tmp_path) as loop:
        loop.shown = snapshot(family(PHASE, (("llama", "forward"), 1.0)))
        loop.tick()
        wait_until(lambda: receiver.posted)
        loop.shown = snapshot(family(PHASE, (("llama", "backward"), 1.0)))
        loop.stop()
        stuck.set()
    ((_, own),) = stored(posted.message for posted in receiver.posted)
    assert dict(own)["phase"] == "backward"


def test_what_is_being_repeated_is_given_up_at_the_end(receiver, answers, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    answers(status=503)
    before = set(threading.enumerate())
    with started(tmp_path) as loop:
        loop.tick()
        wait_until(lambda: receiver.posted)
        loop.stop(seconds=0.5)
        mine = [t for t in set(threading.enumerate()) - before if t.name == "otlp push"]
        wait_until(lambda: not any(t.is_alive() for t in mine), seconds=5, what="the threads' end")


def test_an_endpoint_that_is_no_http_server_fails_like_any_other(tmp_path, monkeypatch):
    def babble(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"\x00\x15SSH-2.0-OpenSSH_9.9\r\n" * 3)

    with raw_server(babble) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with started(tmp_path) as loop:
            loop.push()
            assert loop.account().failures == 1


def test_a_push_to_one_who_never_stops_answering_is_given_up(tmp_path, monkeypatch):
    def trickle(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
        while not over.wait(0.05):
            connection.sendall(b"x")

    monkeypatch.setattr(signal_pusher, "_GRACE_SECONDS", 0.2)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_TIMEOUT", "200")
    with raw_server(trickle) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with started(tmp_path) as loop:
            for failures in (1, 2):
                loop.push(steps(float(failures)))
                assert loop.account().failures == failures


def test_an_event_waits_for_its_endpoint(receiver, answers, tmp_path):
    answers(status=503)
    with started(tmp_path) as loop:
        fired = event(at=time.time())
        loop.service.on_condition(fired)
        loop.settle("otlp_logs", 1)
        loop.tick()
        assert len([p for p in receiver.posted if "logs" in p.path]) == 1, "not at every turn"
        answers(status=200)
        loop.now += 15
        loop.settle("otlp_logs", 2)
        loop.now += 60
        loop.tick()
    assert len(receiver.messages("logs")) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 404},
        # ExportLogsServiceResponse{partial_success{rejected_log_records: 7, "too old"}}
        {"body": b"\n\x0b\x08\x07\x12\x07too old"},
    ],
)
def test_an_event_that_is_refused_for_good_is_not_sent_again(answer, receiver, answers, tmp_path):
    answers(**answer)
    with started(tmp_path) as loop:
        loop.service.on_condition(event(at=time.time()))
        loop.settle("otlp_logs", 1)
        for _ in range(3):
            loop.now += 60
            loop.tick()
        assert len([p for p in receiver.posted if "logs" in p.path]) == 1
    assert loop.account("otlp_logs").failures == 1


def test_a_refusal_is_forgotten_when_the_next_request_has_no_answer(tmp_path, monkeypatch):
    with OtlpReceiver() as refusing, started(tmp_path) as loop:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", refusing.url)
        refusing.answer = lambda path: Answer(status=404, headers={"Connection": "close"})
        loop.service.on_condition(event(at=time.time()))
        loop.settle("otlp_logs", 1)
        refusing.close()
        loop.service.on_condition(event("resolved", at=time.time()))
        loop.now += 60
        loop.settle("otlp_logs", 2)
        with OtlpReceiver(port=refusing.port) as taking:
            loop.now += 60
            loop.settle("otlp_logs", 3)
            assert len(taking.messages("logs")) == 1


def test_a_failing_signal_leaves_the_others_alone(receiver, tmp_path):
    receiver.answer = lambda path: Answer(status=500 if "logs" in path else 200)
    with started(tmp_path) as loop:
        loop.service.on_condition(event())
        loop.push(steps(4.0))
        loop.settle("otlp_logs", 1)
    assert loop.account().failures == 0
    assert stored(receiver.messages()) == {STEPS: 4.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_EXPORTER_OTLP_HEADERS": "Authorization: Bearer hunter2secret"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20hunter2secret"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:hunter2secret@127.0.0.1:1"},
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1/v1/m?k=hunter2secret"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http//me:hunter2secret@127.0.0.1:1"},
        {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:hunter2secret@127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_HEADERS": "Authorization: Bearer hunter2secret",
        },
    ],
)
def test_no_secret_is_ever_shown(
    variables, receiver, answers, tmp_path, monkeypatch, caplog, capfd
):
    caplog.set_level(logging.DEBUG)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answers(status=401, headers={"Content-Type": "text/plain"}, body=b"who is hunter2secret?")
    with started(tmp_path) as loop:
        loop.service.on_condition(event())
        loop.push()
        loop.stop(seconds=1.0)
        shown = f"{loop.service!r} {vars(loop.service)!r} {loop.service._pushers!r}"
    output = capfd.readouterr()
    for text in (caplog.text, output.out, output.err, shown):
        assert "hunter2secret" not in text
    assert "a push failed" in caplog.text


def test_a_header_that_cannot_be_read_is_reported_without_its_value(
    receiver, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-a=1,Authorization: Bearer hunter2secret")
    with started(tmp_path) as loop:
        loop.push()
    assert receiver.accepted[0].headers["x-a"] == "1"
    (record,) = caplog.records
    assert "Header format invalid" in record.getMessage()
    assert "hunter2secret" not in caplog.text


@pytest.mark.slow
def test_an_outage_costs_no_memory(answers, tmp_path):
    answers(status=503)
    with started(tmp_path) as loop:
        loop.push(steps(0.0))
        threads = threading.active_count()
        for count in range(1, 50):
            loop.push(steps(float(count)))
        assert loop.account().failures == 50
        assert len(loop.service._capture._messages) <= 1
        assert threading.active_count() <= threads
