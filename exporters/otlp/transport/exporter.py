"""What the rest of the package needs of an official exporter, over HTTP or gRPC."""

from typing import Any, Protocol

from mp_agent.errors import MpAgentError


class ExportError(MpAgentError):
    """A push was not delivered, or not completely; the message holds no secret."""

    def __init__(
        self,
        reason: str,
        *,
        permanent: bool = False,
        retry_after_seconds: float = 0.0,
        rejected: int = 0,
        partial_success: bool = False,
    ) -> None:
        super().__init__(reason)
        self.permanent = permanent
        """Whether every request was answered, and sending the same again cannot succeed."""
        self.retry_after_seconds = retry_after_seconds
        self.rejected = rejected
        """Data points, log records or spans that were refused permanently."""
        self.partial_success = partial_success
        """Whether everything that was not refused permanently arrived, and that is not nothing."""


class OtlpExporter(Protocol):
    """What the official exporters have in common."""

    def export(self, data: Any, /) -> Any:
        """Send, retry what may succeed on retry, and return an enum with SUCCESS."""

    def shutdown(self) -> None:
        """Abort pending retries, and close the connection."""


class OtlpResponse(Protocol):
    """What an exporter's connection knows of the last response."""

    refused_permanently: bool
    """Whether sending the same request again cannot succeed."""
    may_be_partly_acceptable: bool
    """Whether the request was refused as a whole, and a part of it may be accepted."""
    rejected: int
    """How many items were rejected of a request that was otherwise accepted."""
    retry_after_seconds: float
    explanation: str
