"""The certificates that the OTEL_* variables name, for gRPC.

The official exporter would not show a client's certificate unless an authority is named too,
would not mix a signal's own variables with those for all signals, and goes on without a file
that is missing. Over HTTP it does none of this.
"""

import os
from pathlib import Path
from typing import Any

from grpc import ssl_channel_credentials  # type: ignore[import-untyped]

from mp_agent.exporters.otlp.clients import ExportError
from mp_agent.exporters.otlp.environment import OtlpSignal, variable_names


def credentials(signal: OtlpSignal) -> Any:
    """Return the channel's credentials; None where no variable names a file.

    None as well where a credential provider is named, which the exporter asks itself. Raises
    ExportError when a file cannot be read, or a key is without its certificate or vice versa.
    """
    if _has_provider(signal):
        return None
    authority, key, certificate = (
        _content(signal, what) for what in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
    )
    if bool(key) is not bool(certificate):
        # gRPC would end the process.
        raise ExportError("a client's key and certificate are of use together only: set both")
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
