"""Makes the client of a signal, over the protocol that the OTEL_* variables ask for."""

import logging

from mp_agent.exporters.otlp.environment import OtlpTransport
from mp_agent.exporters.otlp.transport.client import Client
from mp_agent.exporters.otlp.transport.exporter import ExportError, OtlpExporter, OtlpResponse
from mp_agent.exporters.otlp.transport.redaction import LogCapture

log = logging.getLogger("mp_agent.otlp")


def open_client(
    transport: OtlpTransport, capture: LogCapture, *, timeout_seconds: float | None = None
) -> Client:
    """Return a client; timeout_seconds: instead of the transport's own.

    What the exporter logs about the variables, such as headers that it ignores, is logged again,
    redacted. Raises ExportError when the variables do not make an exporter.
    """
    seconds = transport.timeout_seconds if timeout_seconds is None else timeout_seconds
    signal = transport.signal.name.lower()
    capture.pop()
    try:
        exporter, response = _open_exporter(transport, seconds)
    except ExportError as error:
        raise ExportError(capture.redact(f"no exporter for {signal}: {error}")) from None
    except Exception as error:
        text = f"no exporter for {signal}: {type(error).__name__}: {error}"
        raise ExportError(capture.redact(text)) from None
    if message := capture.pop():
        log.warning("the exporter for %s reports: %s", signal, message)
    return Client(exporter, response, capture)


def _open_exporter(
    transport: OtlpTransport, timeout_seconds: float
) -> tuple[OtlpExporter, OtlpResponse]:
    # Imported only when used: gRPC takes 20 MB of memory.
    if transport.grpc:
        from mp_agent.exporters.otlp.transport.grpc_exporters import open_grpc_exporter

        return open_grpc_exporter(transport, timeout_seconds)
    from mp_agent.exporters.otlp.transport.http_exporters import open_http_exporter

    return open_http_exporter(transport, timeout_seconds)
