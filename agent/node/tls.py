"""TLS contexts of the agent's port, and for requests to other node agents."""

import ssl
from pathlib import Path

from mp_agent.errors import SettingError
from mp_agent.settings import Settings


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the agent's port; None for plain HTTP.

    With `tls_client_ca` clients need a certificate of that authority. Raises SettingError, naming
    the setting and the file, for files that cannot be used.
    """
    if settings.tls_certificate is None and settings.tls_key is None:
        if settings.tls_client_ca is not None:
            raise SettingError("tls_client_ca is set, but tls_certificate is not")
        return None
    if settings.tls_certificate is None or settings.tls_key is None:
        missing = "tls_certificate" if settings.tls_certificate is None else "tls_key"
        raise SettingError(f"{missing} is not set: TLS needs both a certificate and its key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _use_certificate(context, settings.tls_certificate, settings.tls_key)
    if settings.tls_client_ca is not None:
        _trust(context, "tls_client_ca", settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(settings: Settings) -> ssl.SSLContext:
    """Return the TLS context for requests to other node agents.

    It trusts `tls_ca`, else the system's authorities, and presents the agent's own certificate.
    """
    context = ssl.create_default_context()
    if settings.tls_ca is not None:
        _trust(context, "tls_ca", settings.tls_ca)
    if settings.tls_certificate is not None and settings.tls_key is not None:
        _use_certificate(context, settings.tls_certificate, settings.tls_key)
    return context


def _use_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        # An encrypted key must not make the agent prompt at a terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise SettingError(
            f"tls_certificate {certificate} and tls_key {key} cannot be used: {_reason(error)}"
        ) from error


def _trust(context: ssl.SSLContext, setting: str, authority: Path) -> None:
    try:
        context.load_verify_locations(cafile=authority)
    except OSError as error:
        raise SettingError(f"{setting} {authority} cannot be used: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
