"""Responses over HTTP that are refusals, or explain one."""

import os

import pytest

from tests.exporters.otlp.service_loop import started

pytestmark = pytest.mark.usefixtures("short_timeout")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 302, "headers": {"Location": "/login?key=s3cret"}}, "redirect"),
        ({"headers": {"Content-Type": "text/html"}, "body": b"<html>sign in</html>"}, "web page"),
        ({"body": b"\xff\xff\xff"}, "other than OTLP"),
        # ExportMetricsServiceResponse{partial_success{rejected_data_points: 7, "too old"}}
        ({"body": b"\n\x0b\x08\x07\x12\x07too old"}, "accepted all but 7: too old"),
    ],
)
def test_a_refusal_that_looks_like_success_is_a_failure(answer, said, answers, tmp_path, caplog):
    answers(**answer)
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 1
    assert said in caplog.text and "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        ("application/x-protobuf", b"\x08\x03\x12\x07too old", "too old"),
        (
            "text/plain",
            b"out of order:\n  mp_agent_step\x1b[0m\n",
            "out of order: mp_agent_step?[0m",
        ),
        ("text/html", b"<html>so sorry</html>", ""),
        ("application/x-protobuf", b"\xff\xff\xff", ""),
    ],
)
def test_what_an_error_says_besides_its_status_is_told(
    content_type, body, said, answers, tmp_path, caplog
):
    answers(status=400, headers={"Content-Type": content_type}, body=body)
    with started(tmp_path) as loop:
        loop.push()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"reason: Bad Request{said and f'; {said}'}")


@pytest.mark.parametrize(
    "answer", [{"body": b""}, {"headers": {"Content-Type": "application/json"}, "body": b"{}"}]
)
def test_success_without_a_word_of_otlp_is_success(answer, answers, tmp_path):
    answers(**answer)
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 0 and loop.delivered == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_collector_on_this_machine_gets_pushes_whatever_proxy_there_is(
    host, answers, tmp_path, monkeypatch
):
    endpoint = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.replace("127.0.0.1", host))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 0 and loop.delivered == 1
