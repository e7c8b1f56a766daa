"""Checks of the settings from this process's environment and the settings file."""

from collections.abc import Iterator

from mp_agent.doctor.machine import CheckResult, Machine, ok, unknown, wrong
from mp_agent.errors import SettingError
from mp_agent.inputs.addresses import shown_message
from mp_agent.node.http.auth import access
from mp_agent.settings import ENV_PREFIX, SECRETS, unknown_variables

_SERVICE_VARIABLE = "MP_AGENT_SERVICE_HOST"
"""Set by Kubernetes in every pod of a namespace with a Service called mp-agent."""


def sources(machine: Machine) -> Iterator[CheckResult]:
    """Report settings that are not at their defaults, and where they are set."""
    named = sorted(machine.settings.model_fields_set)
    values = machine.settings.model_dump(mode="json")
    if not named:
        yield ok("all are at their defaults in this environment")
    for name in named:
        variable = ENV_PREFIX + name.upper()
        shown = "(hidden)" if name in SECRETS else shown_message(repr(values[name]))
        origin = variable if machine.environ.get(variable) else "the settings file"
        yield ok(f"{name} is {shown}, by {origin}")


def ignored_values(machine: Machine) -> Iterator[CheckResult]:
    """Report invalid values and misspelt variables, which are ignored."""
    for warning in machine.ignored:
        yield wrong(warning, "correct it, or remove it")
    if not machine.ignored:
        yield ok("no value is ignored")


def unread_variables(machine: Machine) -> Iterator[CheckResult]:
    """Report variables that look like settings, and resemble none."""
    unread = [name for name, meant in unknown_variables(machine.environ).items() if not meant]
    for name in unread:
        yield unknown(f"{name} is no setting", "mp-agent does not read it")
    if not unread:
        yield ok("no other variable begins with MP_AGENT_")


def service_variables(machine: Machine) -> Iterator[CheckResult]:
    """Detect a Kubernetes Service whose variables look like settings."""
    port = machine.environ.get("MP_AGENT_PORT", "")
    if _SERVICE_VARIABLE in machine.environ or "://" in port:
        yield wrong(
            "a Kubernetes Service called mp-agent sets MP_AGENT_… variables in this pod"
            + (f", MP_AGENT_PORT={port} among them" if port else ""),
            "rename the Service, or set enableServiceLinks: false in the pod's spec",
        )
    else:
        yield ok("no Kubernetes Service is in the way")


def enabled(machine: Machine) -> Iterator[CheckResult]:
    """Check that mp_agent is enabled."""
    if machine.settings.enabled:
        yield ok("mp_agent is enabled")
    else:
        yield wrong("enabled is False: mp_agent does nothing", "unset MP_AGENT_ENABLED")


def node_agent(machine: Machine) -> Iterator[CheckResult]:
    """Report what starts the node agent."""
    who = machine.settings.node_agent
    if who == "none":
        yield wrong(
            "node_agent is none: rings are written, but not read",
            "set MP_AGENT_NODE_AGENT to spawn or external",
        )
    else:
        yield ok(
            "local rank 0 starts the node agent"
            if who == "spawn"
            else "the node agent is started outside the job"
        )


def exporters(machine: Machine) -> Iterator[CheckResult]:
    """Report the enabled exporters."""
    on = machine.settings.exporters
    if "prometheus" in on:
        yield ok(f"exporters: {', '.join(on)}")
    elif on:
        yield unknown(
            f"exporters: {', '.join(on)}: nothing can be scraped",
            "add prometheus to MP_AGENT_EXPORTERS if something is to scrape",
        )
    else:
        yield wrong("no exporter is on", "set MP_AGENT_EXPORTERS=prometheus")


def port_settings(machine: Machine) -> Iterator[CheckResult]:
    """Detect contradictory TLS and password settings, with which nothing is served."""
    try:
        granted = access(machine.settings)
    except SettingError as error:
        yield wrong(str(error), "the node agent serves nothing until TLS and password are complete")
        return
    requirements = ["HTTPS" if granted.tls else "HTTP"]
    if machine.settings.tls_client_ca is not None:
        requirements.append("client certificates")
    if granted.requires_password:
        requirements.append("user and password")
    yield ok(
        f"the port speaks {requirements[0]}"
        + "".join(f", requires {one}" for one in requirements[1:])
    )
