"""An official exporter as something that sends or says why not."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from mp_agent.errors import MpAgentError
from mp_agent.exporters.otlp.environment import OtlpTransport
from mp_agent.exporters.otlp.halves import halves, size_of
from mp_agent.exporters.otlp.redaction import LogCapture

SPLITS_MAX = 200
SPLITS_IN_VAIN_MAX = 16
"""How often a push splits requests at most, if something was taken and if nothing was."""

log = logging.getLogger("mp_agent.otlp")


class ExportError(MpAgentError):
    """What was sent did not arrive, or not all of it; the message holds no secret."""

    def __init__(
        self,
        reason: str,
        *,
        for_good: bool = False,
        retry_after_seconds: float = 0.0,
        rejected: int = 0,
        arrived: bool = False,
    ) -> None:
        super().__init__(reason)
        self.for_good = for_good
        """Whether everything was answered, and sending the same again is of no use."""
        self.retry_after_seconds = retry_after_seconds
        self.rejected = rejected
        """Data points, log records or spans that were refused for good."""
        self.arrived = arrived
        """Whether all that was not refused for good arrived, and that is more than nothing."""


class Exporter(Protocol):
    """What the official exporters have in common."""

    def export(self, data: Any, /) -> Any:
        """Send, repeat what may succeed when repeated, and return an enum with SUCCESS."""

    def shutdown(self) -> None:
        """Give up what is being repeated, and close the connection."""


class Response(Protocol):
    """What the connection of an exporter knows of the last answer."""

    refused_for_good: bool
    perhaps_in_part: bool
    """Whether it was the request as a whole that was refused: some of it may be accepted."""
    rejected: int
    """How much was refused of a request whose rest was taken."""
    retry_after_seconds: float
    explanation: str


@dataclass(slots=True)
class _Outcome:
    """What became of the requests of one push."""

    taken: bool = False
    """Whether anything was."""
    rejected: int = 0
    splits: int = 0
    problem: str = ""
    """What was said of the first refusal."""
    retry_after_seconds: float = 0.0

    def note_refusal(self, rejected: int, problem: str, retry_after_seconds: float) -> None:
        self.rejected += rejected
        self.problem = self.problem or problem
        self.retry_after_seconds = max(self.retry_after_seconds, retry_after_seconds)


class Client:
    """Sends one signal. The exporter's own word on what went wrong is kept from the logs."""

    def __init__(self, exporter: Exporter, verdict: Response, capture: LogCapture) -> None:
        self._exporter = exporter
        self._verdict = verdict
        self._capture = capture
        self._said = "refused"
        self._splits = True
        """Whether anything was taken in the last push; true before the first."""

    def send(self, requests: Iterable[Any], *, limit_seconds: float) -> None:
        """Send the requests one after the other; raise ExportError if not all of it arrived.

        A refusal for good is counted, and the next request is sent: one point that the other side
        does not like costs no other. A request of metrics that is refused as a whole is sent in
        halves until what is refused is found. Any other failure ends the push. No request is begun
        after `limit_seconds`.
        """
        deadline_seconds = time.monotonic() + limit_seconds
        outcome = _Outcome()
        self._capture.take()
        for request in requests:
            waiting = [request]
            while waiting:
                if time.monotonic() > deadline_seconds:
                    problem = f"not everything was sent within {limit_seconds:g} s"
                    raise ExportError(problem, rejected=outcome.rejected)
                waiting.extend(reversed(self._send_one(waiting.pop(), outcome)))
        # Of requests that arrived at the second try.
        self._capture.take()
        self._splits = outcome.taken
        if outcome.problem:
            raise ExportError(
                outcome.problem,
                for_good=True,
                retry_after_seconds=outcome.retry_after_seconds,
                rejected=outcome.rejected,
                arrived=outcome.taken,
            )

    def _send_one(self, request: Any, outcome: _Outcome) -> tuple[Any, ...]:
        """Send one request; return the parts in which to send it again, usually none."""
        problem = ""
        try:
            result = self._exporter.export(request)
        except Exception as error:
            result, problem = None, self._capture.redact(f"{type(error).__name__}: {error}")
        if getattr(result, "name", "") == "SUCCESS":
            outcome.taken = True
            return ()
        # The exporters say the same thing once a minute at most.
        self._said = _joined(problem, self._capture.take()) or self._said
        verdict = self._verdict
        problem = _joined(self._said, self._capture.redact(verdict.explanation))
        if not verdict.refused_for_good:
            raise ExportError(
                problem,
                retry_after_seconds=verdict.retry_after_seconds,
                rejected=outcome.rejected,
            )
        parts = self._parts(request, outcome) if verdict.perhaps_in_part else ()
        if verdict.rejected:
            outcome.taken |= verdict.rejected < size_of(request)
        outcome.note_refusal(
            0 if parts else verdict.rejected or size_of(request),
            problem,
            verdict.retry_after_seconds,
        )
        return parts

    def _parts(self, request: Any, outcome: _Outcome) -> tuple[Any, ...]:
        """Return the halves of a refused request, unless too much was split in this push.

        An endpoint that takes nothing is not asked about every point, nor at every push.
        """
        limit = SPLITS_MAX if outcome.taken else SPLITS_IN_VAIN_MAX
        if outcome.splits >= limit or not (self._splits or outcome.taken):
            return ()
        outcome.splits += 1
        return halves(request)

    def close(self) -> None:
        """End the connection; a request that is being repeated is given up."""
        self._exporter.shutdown()
        self._capture.take()


def _joined(*said: str) -> str:
    return "; ".join(filter(None, said))


def open_client(
    transport: OtlpTransport, capture: LogCapture, *, timeout_seconds: float | None = None
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


def _open_exporter(transport: OtlpTransport, timeout_seconds: float) -> tuple[Exporter, Response]:
    # Each in a module of its own, since gRPC takes 20 MB of memory.
    if transport.grpc:
        from mp_agent.exporters.otlp.over_grpc import open_exporter as over_grpc

        return over_grpc(transport, timeout_seconds)
    from mp_agent.exporters.otlp.over_http import open_exporter as over_http

    return over_http(transport, timeout_seconds)
