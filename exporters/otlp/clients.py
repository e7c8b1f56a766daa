"""An official exporter as something that sends or says why not."""

import logging
import time
from collections.abc import Iterable
from typing import Any, Protocol

from mp_agent.errors import MpAgentError
from mp_agent.exporters.otlp.environment import Transport
from mp_agent.exporters.otlp.redaction import LogCapture

log = logging.getLogger("mp_agent.otlp")


class ExportError(MpAgentError):
    """What was sent did not arrive, or may not have; the message holds no secret."""

    def __init__(
        self, reason: str, *, for_good: bool = False, retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(reason)
        self.for_good = for_good
        """Whether sending the same again is of no use."""
        self.retry_after_seconds = retry_after_seconds


class Exporter(Protocol):
    """What the official exporters have in common."""

    def export(self, data: Any, /) -> Any:
        """Send, repeat what may succeed when repeated, and return an enum with SUCCESS."""

    def shutdown(self) -> None:
        """Give up what is being repeated, and close the connection."""


class Verdict(Protocol):
    """What the connection of an exporter knows of the last answer."""

    refused_for_good: bool
    retry_after_seconds: float
    explanation: str


class Client:
    """Sends one signal. The exporter's own word on what went wrong is kept from the logs."""

    def __init__(self, exporter: Exporter, verdict: Verdict, capture: LogCapture) -> None:
        self._exporter = exporter
        self._verdict = verdict
        self._capture = capture
        self._said = "refused"

    def send(self, requests: Iterable[Any], *, limit_seconds: float) -> None:
        """Send the requests one after the other; ExportError at the first that does not arrive.

        None is begun after `limit_seconds`.
        """
        deadline_seconds = time.monotonic() + limit_seconds
        self._capture.take()
        for request in requests:
            if time.monotonic() > deadline_seconds:
                raise ExportError(f"not everything was sent within {limit_seconds:g} s")
            problem = ""
            try:
                result = self._exporter.export(request)
            except Exception as error:
                result, problem = None, self._capture.redact(f"{type(error).__name__}: {error}")
            if getattr(result, "name", "") != "SUCCESS":
                # The exporters say the same thing once a minute at most.
                self._said = _joined(problem, self._capture.take()) or self._said
                raise ExportError(
                    _joined(self._said, self._capture.redact(self._verdict.explanation)),
                    for_good=self._verdict.refused_for_good,
                    retry_after_seconds=self._verdict.retry_after_seconds,
                )
        # Of requests that arrived at the second try.
        self._capture.take()

    def close(self) -> None:
        """End the connection; a request that is being repeated is given up."""
        self._exporter.shutdown()
        self._capture.take()


def _joined(*said: str) -> str:
    return "; ".join(filter(None, said))


def open_client(
    transport: Transport, capture: LogCapture, *, timeout_seconds: float | None = None
) -> Client:
    """Return a client; timeout_seconds: instead of the transport's own.

    What the exporter says of the variables, such as headers that it skips, is logged. Raises
    ExportError when the exporter cannot be made of what they say.
    """
    seconds = transport.timeout_seconds if timeout_seconds is None else timeout_seconds
    signal = transport.signal.name.lower()
    capture.take()
    try:
        exporter, verdict = _open_exporter(transport, seconds)
    except ExportError as error:
        raise ExportError(capture.redact(f"no exporter for {signal}: {error}")) from None
    except Exception as error:
        text = f"no exporter for {signal}: {type(error).__name__}: {error}"
        raise ExportError(capture.redact(text)) from None
    if said := capture.take():
        log.warning("the exporter for %s says: %s", signal, said)
    return Client(exporter, verdict, capture)


def _open_exporter(transport: Transport, timeout_seconds: float) -> tuple[Exporter, Verdict]:
    # Each in a module of its own, since gRPC takes 20 MB of memory.
    if transport.grpc:
        from mp_agent.exporters.otlp.over_grpc import open_exporter as over_grpc

        return over_grpc(transport, timeout_seconds)
    from mp_agent.exporters.otlp.over_http import open_exporter as over_http

    return over_http(transport, timeout_seconds)
