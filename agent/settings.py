"""All settings: argument > `MP_AGENT_*` variable > file > default.

A wrong argument raises; a wrong environment or file value is logged, counted and left at its
default, because a Kubernetes Service called mp-agent puts `MP_AGENT_PORT=tcp://…` into every pod.
"""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mp_agent.catalog.thresholds import resolve
from mp_agent.errors import SettingError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger("mp_agent")

ENV_PREFIX = "MP_AGENT_"
CONFIG_VARIABLE = "MP_AGENT_CONFIG"
_EXPORTERS = ("prometheus", "otlp")
_OTLP_PACKAGES = ("sdk.metrics", "exporter.otlp.proto.http", "exporter.otlp.proto.grpc")
SECRETS = ("token", "basic_auth_password")
"""Settings whose values no message shows; each travels in a variable of its own."""


def default_directory() -> Path:
    """Return where shared memory lies unless it is set: one directory per user."""
    return Path("/dev/shm") / f"mp_agent-{os.getuid()}"


class Settings(BaseSettings):
    """What can be set. Every field is `MP_AGENT_<NAME>` in the environment."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=False)

    enabled: bool = Field(True, description="False makes everything a no-op.")
    run: str = Field(
        "",
        description="Name of the run; empty: torchrun's rendezvous id, the scheduler's job id, "
        "else a name made from the launcher.",
        max_length=200,
    )
    node_agent: Literal["spawn", "external", "none"] = Field(
        "spawn",
        description="spawn: local rank 0 starts the node agent; external: it runs outside the "
        "job; none: rings only.",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the node agent; empty: 9464 or the next free one of 16; "
        "0: any free one.",
    )
    bind: str = Field("0.0.0.0", description="Address that the node agent listens on.")
    linger_seconds: float = Field(
        120.0, ge=0, description="How long the node agent serves the last state after the end."
    )
    exit_wait_seconds: float = Field(
        30.0, ge=0, description="Longest wait at a normal exit for the last state to be exported."
    )
    layer_interval: int = Field(
        100, ge=1, description="Steps between two looks at every layer (every 10 in the first 100)."
    )
    window_seconds: float = Field(
        120.0, gt=0, description="Window of the gradient norm's largest and smallest value."
    )
    max_series: int = Field(20_000, ge=100, description="Most series that one node agent exports.")
    exporters: tuple[str, ...] = Field(("prometheus",), description="Exporters that are on.")
    otlp_span_events: bool = Field(
        False, description="Send critical conditions by OTLP as span events too, not only as logs."
    )
    otlp_exit_wait_seconds: float = Field(
        5.0,
        ge=0,
        description="Longest wait at a normal exit for the last state to be pushed by OTLP; "
        "exit_wait_seconds limits it too.",
    )
    dir: Path = Field(
        default_factory=default_directory,
        description="Directory for shared memory; must be on tmpfs to be cheap.",
    )
    log_dir: Path = Field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"mp_agent-{os.getuid()}",
        description="Directory for the node agent's log files.",
    )
    merge_deadline_seconds: float = Field(
        10.0, gt=0, description="How long a step waits for ranks before it is merged without them."
    )
    root: str = Field(
        "",
        description="host:port or URL of the root node agent; empty: found through the job's own "
        "store, else at MASTER_ADDR.",
    )
    advertise: str = Field(
        "",
        description="Name or address under which other nodes and Prometheus reach this node; "
        "empty: the one from which it reaches MASTER_ADDR.",
    )
    token: SecretStr = Field(
        SecretStr(""),
        description="Secret that the node agents of a run share; empty: rank 0 makes one and "
        "hands it out through the job's own store.",
    )
    tls_certificate: Path | None = Field(
        None, description="Certificate (PEM, with its chain) of the agent's port; empty: HTTP."
    )
    tls_key: Path | None = Field(None, description="Private key (PEM) of `tls_certificate`.")
    tls_client_ca: Path | None = Field(
        None, description="Authority (PEM) of whose certificates a client needs one; empty: none."
    )
    tls_ca: Path | None = Field(
        None,
        description="Authority (PEM) that node agents trust when they call each other; empty: "
        "the system's.",
    )
    basic_auth_user: str = Field("", description="User whom scrapers have to name; empty: none.")
    basic_auth_password: SecretStr = Field(
        SecretStr(""), description="Password of `basic_auth_user`."
    )
    push_interval_seconds: float = Field(
        5.0, gt=0, description="Time between two pushes of a node's merged rows to the root."
    )
    sd_dir: Path | None = Field(
        None, description="Shared directory into which file_sd targets are written; empty: none."
    )
    flight_dir: Path = Field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"mp_agent-{os.getuid()}" / "flight",
        description="Directory for flight records.",
    )
    flight_steps: int = Field(
        200, ge=1, description="Steps of every rank that a flight record holds at most."
    )
    flight_records_max: int = Field(
        10, ge=0, description="Flight records kept per run; 0 writes none."
    )
    flight_bytes_max: int = Field(
        256 * 2**20, ge=2**20, description="Bytes that the flight records of a run may take."
    )
    thresholds: dict[str, float] = Field(
        default_factory=dict, description="Overrides of the conditions' thresholds, by name."
    )
    alerts: dict[str, str] = Field(
        default_factory=dict,
        description="Overrides of the alerts' windows, severities and selectors, as `mp-agent "
        "rules --set` takes them: `{stall_window: 20m, MpAgentLossSpike: off}`.",
    )
    time_scale: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Multiplies the windows and waits of the conditions that the node agent "
        "judges itself, as `mp-agent rules --time-scale` does for rules; for demonstrations.",
    )

    @field_validator("exporters", mode="before")
    @classmethod
    def _split_exporters(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.lstrip().startswith("["):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return _from_json(value)

    @field_validator("exporters")
    @classmethod
    def _known_exporters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in _EXPORTERS:
                raise ValueError(f"{name!r} is unknown; known: {', '.join(_EXPORTERS)}")
            if name == "otlp" and not _has_otlp():
                raise ValueError("'otlp' needs the extra: pip install 'mp-agent[otlp]'")
        return value

    @field_validator("thresholds", mode="before")
    @classmethod
    def _parse_thresholds(cls, value: Any) -> Any:
        return _from_json(value)

    @field_validator("thresholds")
    @classmethod
    def _known_thresholds(cls, value: dict[str, float]) -> dict[str, float]:
        resolve(value)
        return value

    @field_validator("root")
    @classmethod
    def _reachable(cls, value: str) -> str:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        if value and (parts.scheme not in ("http", "https") or not _has_valid_host(parts)):
            raise ValueError("must be host, host:port or an http URL; IPv6 in brackets")
        return value

    @field_validator("alerts", mode="before")
    @classmethod
    def _parse_alerts(cls, value: Any) -> Any:
        """Take numbers as texts, and YAML's bare `off` as the word that it is."""
        table = _from_json(value)
        if not isinstance(table, Mapping):
            return table
        return {name: _plain_text(item) for name, item in table.items()}

    @field_validator("token")
    @classmethod
    def _fit_for_a_header(cls, value: SecretStr) -> SecretStr:
        token = value.get_secret_value().strip()
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("must be printable ASCII without spaces")
        return SecretStr(token)

    @field_validator(
        "dir",
        "log_dir",
        "sd_dir",
        "flight_dir",
        "tls_certificate",
        "tls_key",
        "tls_client_ca",
        "tls_ca",
    )
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from arguments alone: `load_settings` has sifted the other sources."""
        return (init_settings,)


def _has_valid_host(parts: SplitResult) -> bool:
    try:
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _has_otlp() -> bool:
    """Return whether OpenTelemetry's SDK and OTLP exporters are installed; imports neither."""
    try:
        return all(find_spec(f"opentelemetry.{package}") for package in _OTLP_PACKAGES)
    except ModuleNotFoundError:
        return False


def _plain_text(value: Any) -> Any:
    """Return a number as text, and False as `off`; anything else as it is."""
    if isinstance(value, bool):
        return value if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else value


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def load_settings(**arguments: Any) -> tuple[Settings, int]:
    """Return the settings in force, and how many environment and file values were ignored.

    Arguments that are None count as not given. Raises SettingError for a wrong argument, naming
    field and value; wrong environment and file values are logged and counted instead.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if problem := _problem(name, value):
            raise SettingError(f"{name} has value {_shown(name, value)}: {problem}")
    values: dict[str, Any] = {}
    ignored = 0
    for origin, name, value in (*_file_values(), *_environment_values()):
        if problem := _problem(name, value):
            ignored += 1
            log.warning("%s has value %s: %s; it is ignored", origin, _shown(name, value), problem)
        else:
            values[name] = value
    return Settings(**{**values, **given}), ignored


def _shown(name: str, value: Any) -> str:
    """Return a setting's value as messages may show it."""
    return "(hidden)" if name in SECRETS else repr(value)


def _problem(name: str, value: Any) -> str | None:
    """Return what is wrong with one setting's value, or None."""
    if name not in Settings.model_fields:
        return f"no such setting; known: {', '.join(Settings.model_fields)}"
    try:
        Settings(**{name: value})
    except ValidationError as error:
        return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    return None


def _environment_values() -> Iterator[tuple[str, str, Any]]:
    for name in Settings.model_fields:
        variable = ENV_PREFIX + name.upper()
        value = os.environ.get(variable)
        if value:
            yield variable, name, value


def _file_values() -> Iterator[tuple[str, str, Any]]:
    """Yield the values of `MP_AGENT_CONFIG` (YAML or TOML), else of ./pyproject.toml."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named) if named else Path("pyproject.toml")
    if not named and not path.is_file():
        return
    try:
        table = _read_table(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.warning("settings file %s cannot be read and is ignored: %s", path, error)
        yield str(path), "settings file", "unreadable"
        return
    for name, value in table.items():
        yield f"{path}: {name}", name, value


def _read_table(path: Path) -> Mapping[str, Any]:
    """Return the mp_agent table of a TOML or YAML file."""
    if path.suffix == ".toml":
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("mp_agent", {})
    else:
        table = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(table, Mapping):
        raise ValueError("must hold a table of settings")
    return table
