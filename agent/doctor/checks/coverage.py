"""Checks of runs over several nodes: is the root agent reachable, are all ranks covered."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.doctor.check_result import CheckResult, ok, unknown, wrong
from mp_agent.doctor.fetch import connection_problem
from mp_agent.doctor.machine import FoundRun, Machine
from mp_agent.inputs.addresses import shown_address
from mp_agent.node.transport.root_address import locate

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
