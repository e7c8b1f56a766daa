"""The certificates that the OTEL_* variables name, for gRPC.

The official exporter sends a client certificate only if an authority is configured too, does not
mix a signal's own variables with those for all signals, and ignores a missing file. Over HTTP it
does none of this.
"""

import os
from pathlib import Path
from typing import Any

from grpc import ssl_channel_credentials

from mp_agent.exporters.otlp.environment import OtlpSignal, variable_names
from mp_agent.exporters.otlp.transport.exporter import ExportError


def credentials(signal: OtlpSignal) -> Any:
    """Return the channel's credentials; None if no variable names a file.

    None, too, if a credential provider is configured, which the exporter calls itself. Raises
    ExportError when a file cannot be read, or for a key without its certificate or vice versa.
    """
    if _has_provider(signal):
        return None
    authority, key, certificate = (
        _content(signal, what) for what in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
    )
    if bool(key) is not bool(certificate):
        # gRPC would abort the process.
        raise ExportError(
            "OTEL_EXPORTER_OTLP_CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE must be set "
            "together"
        )
    if authority is None and certificate is None:
        return None
    return ssl_channel_credentials(authority, key, certificate)


def _content(signal: OtlpSignal, what: str) -> bytes | None:
    named = (name for name in variable_names(signal, what) if os.environ.get(name))
    if (name := next(named, None)) is None:
        return None
    path = Path(os.environ[name])
    try:
        return path.read_bytes()
    except OSError as error:
        raise ExportError(f"{name}: {path}: {error.strerror}") from None


def _has_provider(signal: OtlpSignal) -> bool:
    names = (
        "OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER",
        f"OTEL_PYTHON_EXPORTER_OTLP_GRPC_{signal.value}_CREDENTIAL_PROVIDER",
    )
    return any(os.environ.get(name) for name in names)
