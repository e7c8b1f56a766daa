"""The doctor reports whether OTLP pushes have somewhere to go."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from mp_agent.doctor.machine import CheckStatus, Machine
from mp_agent.settings import Settings
from tests.agent.doctor.conftest import found, only, verdicts
from tests.subtests import each

PUSHING = Settings(exporters=("otlp",))


def test_without_otlp_nothing_is_asked() -> None:
    machine = Machine(Settings(), environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert verdicts("otlp", machine) == {CheckStatus.OK}


def test_an_endpoint_that_listens_is_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/metrics"
        machine = Machine(PUSHING, environ={"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": url})
        assert verdicts("otlp", machine) == {CheckStatus.OK}


def test_an_endpoint_that_does_not_is_reported_without_its_secrets() -> None:
    url = "http://user:tell-nobody@127.0.0.1:1/?key=tell-nobody"
    finding = only("otlp", Machine(PUSHING, environ={"OTEL_EXPORTER_OTLP_ENDPOINT": url}))
    assert finding.verdict is CheckStatus.WRONG
    assert "127.0.0.1, port 1" in finding.text
    assert "tell-nobody" not in finding.text


@pytest.mark.parametrize(
    "url",
    ["http://[", "http://me:tell-nobody/@host", "ftp://collector", "://", "collector:4318"],
)
def test_what_is_no_address_is_reported(url: str) -> None:
    finding = only("otlp", Machine(PUSHING, environ={"OTEL_EXPORTER_OTLP_ENDPOINT": url}))
    assert finding.verdict is CheckStatus.WRONG
    assert "no address" in finding.text
    assert "tell-nobody" not in finding.text


@pytest.mark.parametrize(
    "variables", [{"OTEL_SDK_DISABLED": "TRUE"}, {"OTEL_METRICS_EXPORTER": "none"}]
)
def test_a_switch_that_is_off_is_reported(variables: dict[str, str]) -> None:
    finding = only("otlp", Machine(PUSHING, environ=variables))
    assert finding.verdict is CheckStatus.WRONG
    assert next(iter(variables)) in finding.text


def test_a_value_that_is_not_followed_is_reported() -> None:
    variables = {
        "OTEL_METRIC_EXPORT_INTERVAL": "often",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
    }
    ignored, unreachable = found("otlp", Machine(PUSHING, environ=variables))
    assert ignored.verdict is CheckStatus.UNKNOWN
    assert "OTEL_METRIC_EXPORT_INTERVAL" in ignored.text
    assert unreachable.verdict is CheckStatus.WRONG
    assert variables["OTEL_METRIC_EXPORT_INTERVAL"] == "often"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1/v1/metrics"}, "once more"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1/otlp"}, "used unchanged"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, "of the protocol grpc"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "127.0.0.1:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            "of the protocol http/protobuf",
        ),
    ],
)
def test_an_endpoint_that_is_nearly_right_is_reported(variables: dict[str, str], said: str) -> None:
    trap, _ = found("otlp", Machine(PUSHING, environ=variables))
    assert trap.verdict is not CheckStatus.OK
    assert said in trap.text


def test_without_an_endpoint_the_default_is_reported() -> None:
    unset, listens = found("otlp", Machine(PUSHING, environ={}))
    assert unset.verdict is CheckStatus.UNKNOWN
    assert "4318" in listens.text
    grpc = found("otlp", Machine(PUSHING, environ={"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}))
    assert "4317" in grpc[1].text


class Proxy(BaseHTTPRequestHandler):
    """Reaches nothing but `collector`."""

    def do_GET(self) -> None:
        self.send_response(405 if "//collector:" in self.path else 502)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def proxy() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://me:tell-nobody@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("host", "verdict"), [("collector", CheckStatus.OK), ("elsewhere", CheckStatus.WRONG)]
)
def test_a_collector_behind_a_proxy_is_asked_through_it(
    proxy: str, host: str, verdict: CheckStatus
) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{host}:4318", "http_proxy": proxy}
    finding = only("otlp", Machine(PUSHING, environ=variables))
    assert finding.verdict is verdict
    assert "the proxy 127.0.0.1" in finding.text and "tell-nobody" not in finding.text


@each("protocol", ["http/protobuf", "grpc"])
@each("host", ["localhost", "127.0.0.1", "127.8.9.10"])
def test_a_collector_on_this_machine_is_asked_without_the_proxy(host: str, protocol: str) -> None:
    with socket.create_server(("", 0)) as listener:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{host}:{listener.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "http_proxy": "http://127.0.0.1:1",
        }
        assert verdicts("otlp", Machine(PUSHING, environ=variables)) == {CheckStatus.OK}


def test_a_host_that_no_proxy_names_is_asked_without_it() -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.invalid:4318",
        "http_proxy": "http://127.0.0.1:1",
        "no_proxy": ".invalid",
    }
    finding = only("otlp", Machine(PUSHING, environ=variables))
    assert "nothing takes OTLP at collector.invalid" in finding.text
