"""Types of the values that settings have, with their checks."""

import json
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr

from mp_agent.catalog.guard import default_policies, with_defaults
from mp_agent.catalog.thresholds import resolve
from mp_agent.errors import CatalogError, unknown_name

_EXPORTERS = ("prometheus", "otlp")
_TRACKERS = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "tensorboard": "tensorboardX",
    "comet": "comet_ml",
}
"""Package of each tracker."""
_HOST_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,255}")
_OTLP_PACKAGES = ("sdk.metrics", "exporter.otlp.proto.http")


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _split(value: Any) -> Any:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return _from_json(value)


def _known_exporters(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if name not in _EXPORTERS:
            raise ValueError(unknown_name(name, _EXPORTERS))
        if name == "otlp" and not _has_otlp():
            raise ValueError("'otlp' needs the extra: pip install 'mp-agent[otlp]'")
    return value


def _known_trackers(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if name not in _TRACKERS:
            raise ValueError(unknown_name(name, _TRACKERS))
        if find_spec(_TRACKERS[name]) is None:
            raise ValueError(f"{name!r} needs the extra: pip install 'mp-agent[{name}]'")
    return tuple(dict.fromkeys(value))


def _has_otlp() -> bool:
    """Return whether OpenTelemetry's SDK and OTLP exporters are installed; imports neither."""
    try:
        return all(find_spec(f"opentelemetry.{package}") for package in _OTLP_PACKAGES)
    except (ImportError, ValueError):  # absent, or another module of that name
        return False


def _as_policies(value: Any) -> Any:
    """Return policies as a table: of names alone, and of True, with the parameters' defaults."""
    if isinstance(value, str) and value.strip().lower() in _ON_OR_OFF:
        value = _ON_OR_OFF[value.strip().lower()]
    elif isinstance(value, str) and value.lstrip().startswith("{"):
        value = json.loads(value)
    if isinstance(value, bool):
        return default_policies() if value else {}
    if not isinstance(value, Mapping):
        names = _split(value)
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise ValueError("must be True, names of policies, or a table of them")
        value = {str(name): {} for name in names}
    table = {
        str(name): {} if values is None or values is True else values
        for name, values in value.items()
        if values is not False
    }
    try:
        return with_defaults(table)
    except CatalogError as error:
        raise ValueError(str(error)) from None


_ON_OR_OFF = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def _known_thresholds(value: dict[str, float]) -> dict[str, float]:
    resolve(value)
    return value


def _as_router_patterns(value: Any) -> Any:
    """Return patterns as a table, also those of one text: `*.gate=2, *.router=1`."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return json.loads(value)
    table = {}
    for part in filter(None, map(str.strip, value.split(","))):
        pattern, separator, count = part.rpartition("=")
        if not separator:
            raise ValueError(f"{part!r} does not say how many experts it chooses: {part}=2")
        table[pattern.strip()] = count.strip()
    return table


def _usable_router_patterns(value: dict[str, int]) -> dict[str, int]:
    for pattern, count in value.items():
        if not pattern:
            raise ValueError("a pattern is empty")
        if count < 1:
            raise ValueError(f"{pattern!r} chooses {count} experts; at least 1")
    return value


def _as_texts(value: Any) -> Any:
    """Convert numbers to text, and YAML's bare `off`, which is False, to the word."""
    table = _from_json(value)
    if not isinstance(table, Mapping):
        return table
    return {name: _plain_text(item) for name, item in table.items()}


def _plain_text(value: Any) -> Any:
    """Return a number as text, and False as `off`; anything else as it is."""
    if isinstance(value, bool):
        return value if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else value


def _without_spaces(value: str) -> str:
    value = value.strip()
    if not value.isprintable() or " " in value:
        raise ValueError("must not contain spaces or control characters")
    return value


def _reachable(value: str) -> str:
    parts = urlsplit(value if "://" in value else f"http://{value}")
    if value and (parts.scheme not in ("http", "https") or not _has_valid_host(parts)):
        raise ValueError("must be host, host:port or an http URL; IPv6 in brackets")
    if parts.username or parts.password:
        raise ValueError("holds a user or password, not shown here: the token authorizes nodes")
    return value


def _has_valid_host(parts: SplitResult) -> bool:
    try:
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _host_patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        if not _HOST_PATTERN.fullmatch(pattern):
            raise ValueError(f"{pattern!r} is no host name, such as *.example.com; without a port")
    return value


def _fit_for_a_header(value: SecretStr) -> SecretStr:
    token = value.get_secret_value().strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("must be printable ASCII without spaces")
    return SecretStr(token)


def _absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError("must be an absolute path")
    if "\0" in str(value):
        raise ValueError("must not contain NUL")
    return value


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]

Host = Annotated[str, AfterValidator(_without_spaces)]
"""Name or address of this node; empty: none."""

Address = Annotated[Host, AfterValidator(_reachable)]
"""Host, host:port or URL of another agent; empty: none."""

Exporters = Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_known_exporters)]
"""Names, as JSON or separated by commas where they are one text."""

HostPatterns = Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_host_patterns)]
"""Host names, `*` for any part of one, as JSON or separated by commas where they are one text."""

GuardPolicies = Annotated[dict[str, dict[str, float | str]], BeforeValidator(_as_policies)]
"""Policies of the guard, each with all its parameters."""

Trackers = Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_known_trackers)]
"""Names, as JSON or separated by commas where they are one text."""

HeaderSecret = Annotated[SecretStr, AfterValidator(_fit_for_a_header)]

RouterPatterns = Annotated[
    dict[str, int], BeforeValidator(_as_router_patterns), AfterValidator(_usable_router_patterns)
]
"""Numbers of experts by patterns of names, as JSON or `pattern=number` where they are one text."""

Texts = Annotated[dict[str, str], BeforeValidator(_as_texts)]
"""A table, as JSON where it is one text."""

Thresholds = Annotated[
    dict[str, float], BeforeValidator(_from_json), AfterValidator(_known_thresholds)
]
"""Some of the catalog's thresholds, as JSON where they are one text."""
