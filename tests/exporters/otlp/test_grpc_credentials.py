"""Endpoints that speak TLS and ask who calls, over HTTP and gRPC."""

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from tests.exporters.otlp.grpc_collector import grpc_collector
from tests.exporters.otlp.receiver import OtlpReceiver
from tests.exporters.otlp.service_loop import started

PROTOCOLS = ("http/protobuf", "grpc")


@dataclass(frozen=True)
class Certificates:
    """Of an authority, the endpoint, and the clients that may call it."""

    authority: Path
    key: Path
    certificate: Path
    endpoint: trustme.LeafCert

    @property
    def for_http(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.authority)
        context.verify_mode = ssl.CERT_REQUIRED
        self.endpoint.configure_cert(context)
        return context

    @property
    def for_grpc(self) -> grpc.ServerCredentials:
        chain = b"".join(pem.bytes() for pem in self.endpoint.cert_chain_pems)
        return grpc.ssl_server_credentials(
            [(self.endpoint.private_key_pem.bytes(), chain)],
            root_certificates=self.authority.read_bytes(),
            require_client_auth=True,
        )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    caller = authority.issue_cert("agent")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    caller.private_key_pem.write_to_path(folder / "key.pem")
    caller.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    return Certificates(
        folder / "authority.pem",
        folder / "key.pem",
        folder / "certificate.pem",
        authority.issue_cert("127.0.0.1"),
    )


@pytest.fixture(params=PROTOCOLS)
def endpoint(request, certificates, monkeypatch) -> Iterator[Callable[[], int]]:
    """An endpoint that asks for a certificate; returns how much metrics it has got."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with ExitStack() as stack:
        if request.param == "grpc":
            collector = stack.enter_context(grpc_collector(certificates.for_grpc))
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            yield lambda: len(collector.metrics)
        else:
            receiver = stack.enter_context(OtlpReceiver(tls=certificates.for_http))
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
            yield lambda: len(receiver.accepted)


@pytest.mark.parametrize(
    "names",
    [
        {"CERTIFICATE": "authority", "CLIENT_KEY": "key", "CLIENT_CERTIFICATE": "certificate"},
        # A signal's own win, each for itself.
        {
            "METRICS_CERTIFICATE": "authority",
            "CERTIFICATE": "key",
            "CLIENT_KEY": "key",
            "METRICS_CLIENT_CERTIFICATE": "certificate",
        },
    ],
    ids=["of all signals", "some of the signal's own"],
)
def test_both_sides_show_their_certificates(
    names: Mapping[str, str], endpoint, certificates, tmp_path, monkeypatch
):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates.certificate))
    for name, file in names.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(getattr(certificates, file)))
    with started(tmp_path) as loop:
        loop.push()
    assert (endpoint(), loop.account().failures) == (1, 0)


def test_a_scheme_without_tls_needs_no_certificates(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "false")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nonexistent/authority.pem")
    with grpc_collector() as collector, started(tmp_path) as loop:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        loop.push()
        assert len(collector.metrics) == 1


@pytest.mark.parametrize("name", ["key", "certificate"])
def test_half_of_a_clients_certificate_is_refused_before_grpc_ends_the_process(
    name, certificates, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")
    monkeypatch.setenv(
        f"OTEL_EXPORTER_OTLP_CLIENT_{name.upper()}", str(getattr(certificates, name))
    )
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 1
    assert (
        "CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE must be set together" in caplog.text
    )


def test_a_file_that_is_missing_is_named(endpoint, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nonexistent/authority.pem")
    with started(tmp_path) as loop:
        loop.push()
    assert (endpoint(), loop.account().failures) == (0, 1)
    assert "/nonexistent/authority.pem" in caplog.text
