"""Checks of the Prometheus that is to scrape, and of how much of the job it sees."""

from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.promql import quoted
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.doctor.machine import (
    TIMEOUT_SECONDS,
    CheckResult,
    FoundRun,
    Machine,
    connection_problem,
    ok,
    unknown,
    wrong,
)
from mp_agent.errors import SourceError
from mp_agent.inputs.addresses import shown_address
from mp_agent.inputs.http import Vector, ask
from mp_agent.node.transport.root_address import locate

_BUILD = BY_PROMETHEUS_NAME["mp_agent_build_info"].prometheus_name
_NAMES = frozenset(condition.name for condition in CONDITIONS)
_JOB = "mp-agent"
_SD_HINT = (
    "in Kubernetes: does the pod carry the label and the named port, does Prometheus select the "
    "PodMonitor (the `release` label of kube-prometheus-stack)? Elsewhere: does file_sd read "
    "sd_dir, or http_sd the root's /sd?"
)

_Data = TypeVar("_Data")


class _BuildInfo(Struct):
    version: str = "unknown"


class _Target(Struct, rename="camel"):
    scrape_url: str
    health: str = "unknown"
    last_error: str = ""
    labels: dict[str, str] = {}


class _Targets(Struct, rename="camel"):
    active_targets: list[_Target]


class _LoadedRule(Struct, rename="camel"):
    name: str
    health: str = ""
    last_error: str = ""


class _RuleGroup(Struct):
    rules: list[_LoadedRule] = []


class _RuleGroups(Struct):
    groups: list[_RuleGroup]


class _Alertmanagers(Struct, rename="camel"):
    active_alertmanagers: list[dict[str, str]] = []


class _Alert(Struct):
    labels: dict[str, str]
    state: str


class _Alerts(Struct):
    alerts: list[_Alert]


def reachable(machine: Machine) -> Iterator[CheckResult]:
    """See whether Prometheus answers."""
    answer, shown = _ask(machine, "status/buildinfo", _BuildInfo), shown_address(machine.prometheus)
    if isinstance(answer, str):
        yield wrong(f"{shown}: {answer}", "give the address of a Prometheus")
    else:
        yield ok(f"{shown} answers, version {answer.version}")


def targets(machine: Machine) -> Iterator[CheckResult]:
    """Look for the node agents among its targets."""
    answer = _ask(machine, "targets", _Targets, state="active")
    if isinstance(answer, str):
        yield unknown(f"its targets are not known: {answer}")
        return
    ours = [target for target in answer.active_targets if _is_ours(target, machine)]
    for target in ours:
        text = f"target {shown_address(target.scrape_url)}: {target.health}"
        if target.health == "up":
            yield ok(text)
        elif target.health == "down":
            yield wrong(f"{text}: {target.last_error}", _target_remedy(target.last_error))
        else:
            yield unknown(text, "it was not scraped yet")
    if ours:
        return
    if "prometheus" in machine.settings.exporters:
        yield wrong("no node agent is among its targets", _SD_HINT)
    else:
        yield ok("no node agent is among its targets: exporters lacks prometheus")


def _is_ours(target: _Target, machine: Machine) -> bool:
    """Return whether a target is a node agent, by its port or the name of its job."""
    ports = {_port_of(exposition.url) for exposition in machine.expositions} - {None}
    job = target.labels.get("job", "")
    return _port_of(target.scrape_url) in ports or job.startswith(_JOB)


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _target_remedy(error: str) -> str:
    if "401" in error:
        return "give the scrape the basic_auth that the agent asks for"
    if "421" in error:
        return "add the host of that address to MP_AGENT_ALLOWED_HOSTS, or scrape by IP address"
    if "limit" in error:
        return "raise sample_limit above MP_AGENT_MAX_SERIES"
    if "certificate" in error or "tls" in error:
        return "give the scrape the tls_config that fits the agent's certificate"
    if "HTTP response to HTTPS" in error or "malformed HTTP" in error:
        return "set the scrape's scheme to what the agent speaks: http, or https with TLS settings"
    if "404" in error:
        return "another program answers there, or exporters lacks prometheus"
    return "let Prometheus reach the agent's port: bind, NetworkPolicy, firewall"


def series(machine: Machine) -> Iterator[CheckResult]:
    """Check that Prometheus has the series."""
    where = f"{{run={quoted(machine.run)}}}" if machine.run else ""
    answer = _ask(machine, "query", Vector, query=f"count by (run) ({_BUILD}{where})")
    if isinstance(answer, str):
        yield unknown(f"whether it has series is not known: {answer}")
        return
    found = [f"{one.metric.get('run', '')} ({one.value[1]})" for one in answer.result]
    if found:
        yield ok(f"it has series of {', '.join(sorted(found))} (node agents)")
    else:
        yield wrong(
            f"it has no {_BUILD}{where}",
            "see the targets above; relabelling may drop the series, or another Prometheus scrapes",
        )


def rules(machine: Machine) -> Iterator[CheckResult]:
    """Check that the alert rules are loaded and evaluate without errors."""
    answer = _ask(machine, "rules", _RuleGroups, type="alert")
    if isinstance(answer, str):
        yield unknown(f"its rules are not known: {answer}")
        return
    loaded = [rule for group in answer.groups for rule in group.rules]
    ours = [rule for rule in loaded if rule.name in _NAMES]
    if not ours:
        yield wrong(
            "the alert rules are not loaded",
            "write them by `mp-agent rules --output mp_agent.rules.yaml`, name the file in "
            "rule_files and reload; in Kubernetes: does Prometheus select the PrometheusRule?",
        )
        return
    for rule in ours:
        if rule.health == "err":
            yield wrong(f"rule {rule.name}: {rule.last_error}", "render the rules again")
    absent = sorted(_NAMES - {rule.name for rule in ours})
    if absent:
        yield unknown(f"not loaded: {', '.join(absent)}", "switched off, or of an older version")
    else:
        yield ok(f"all {len(_NAMES)} alerts are loaded")


def delivery(machine: Machine) -> Iterator[CheckResult]:
    """Check that Prometheus has an Alertmanager."""
    answer = _ask(machine, "alertmanagers", _Alertmanagers)
    if isinstance(answer, str):
        yield unknown(f"its Alertmanagers are not known: {answer}")
    elif answer.active_alertmanagers:
        yield ok(f"alerts go to {len(answer.active_alertmanagers)} Alertmanager")
    else:
        yield wrong("it has no Alertmanager: alerts go nowhere", "name one under `alerting`")


def alerts(machine: Machine) -> Iterator[CheckResult]:
    """Report which alerts fire."""
    answer = _ask(machine, "alerts", _Alerts)
    if isinstance(answer, str):
        yield unknown(f"its alerts are not known: {answer}")
        return
    firing = {
        f"{labels['alertname']} ({labels.get('severity', '')}, run {labels.get('run', '')})"
        for labels in (one.labels for one in answer.alerts if one.state == "firing")
        if labels.get("alertname") in _NAMES and machine.run in ("", labels.get("run", ""))
    }
    yield ok(f"firing: {', '.join(sorted(firing))}" if firing else "no alert fires")


def _ask(machine: Machine, path: str, data: type[_Data], **parameters: str) -> _Data | str:
    """Return `data` of Prometheus' response, or what is wrong with it."""
    try:
        return ask(machine.prometheus, path, parameters, data, seconds=TIMEOUT_SECONDS)
    except SourceError as error:
        return str(error)


_COVERAGE = BY_PROMETHEUS_NAME["mp_agent_coverage_ratio"].prometheus_name
_MISSING = BY_PROMETHEUS_NAME["mp_agent_missing_rank_info"].prometheus_name
_RANKS_SHOWN = 8


def coverage(machine: Machine) -> Iterator[CheckResult]:
    """Report the ranks that merged metrics do not cover."""
    found = False
    for exposition in machine.expositions:
        for labels, value in exposition.values(_COVERAGE):
            run = labels.get("run", "")
            if machine.run not in ("", run):
                continue
            found = True
            if value >= 1:
                yield ok(f"run {run}: the numbers cover all ranks")
                continue
            missing = [
                one.get("rank", "")
                for one, _ in exposition.values(_MISSING)
                if one.get("run", "") == run
            ]
            shown = ", ".join(missing[:_RANKS_SHOWN]) + (", …" if missing[_RANKS_SHOWN:] else "")
            yield wrong(
                f"run {run}: the numbers cover {value:.0%} of the ranks"
                + (f"; missing: {shown}" if shown else ""),
                "call mp-agent doctor on the nodes of those ranks; if they never called "
                "mp_agent.init(), start the job with MP_AGENT_ATTACH=1",
            )
    if not found:
        yield unknown("no root agent answers here, so what its numbers cover is not known")


def root(machine: Machine) -> Iterator[CheckResult]:
    """Check that each run of several nodes has a reachable root agent and a token."""
    over_nodes = [run for run in machine.live_runs if run.ranks and _has_other_nodes(run)]
    for run in over_nodes:
        yield from _root_of(run, machine)
    if not over_nodes:
        yield ok("no run here has ranks on other nodes")


def _has_other_nodes(run: FoundRun) -> bool:
    identity = run.ranks[-1].identity
    return identity.world_size > identity.local_world_size


def _root_of(run: FoundRun, machine: Machine) -> Iterator[CheckResult]:
    settings = machine.settings
    if run.note is not None and run.note.problem and not settings.root:
        yield unknown(
            f"run {run.name}: the job's store did not provide the root agent's address: "
            f"{run.note.problem}",
            "set MP_AGENT_ROOT to host:port of the root agent and MP_AGENT_TOKEN on all nodes",
        )
    token = settings.token.get_secret_value() or (run.note.token if run.note else "")
    if not token:
        yield wrong(
            f"run {run.name}: no token is known, so no rows go from node to node",
            "set MP_AGENT_TOKEN to the same secret on all nodes",
        )
    if any(rank.identity.rank == 0 for rank in run.ranks):
        yield ok(f"run {run.name}: the root agent is on this node")
        return
    address = locate(settings, run.note, machine.environ, waited=True)
    if address is None:
        yield wrong(
            f"run {run.name}: the root agent is not known", "set MP_AGENT_ROOT to its host:port"
        )
        return
    parts, shown = urlsplit(address.url), shown_address(address.url)
    if problem := connection_problem(parts.hostname or "", parts.port or 443):
        yield wrong(
            f"run {run.name}: the root agent at {shown} cannot be reached: {problem}",
            "let the nodes reach each other on the agents' port; set MP_AGENT_ADVERTISE on rank "
            "0's node if the address is not the right one",
        )
    else:
        yield ok(f"run {run.name}: the root agent at {shown} can be reached")
