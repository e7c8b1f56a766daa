"""Checks of the runs in shared memory and of the node agents that watch them."""

import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mp_agent.doctor.check_result import CheckResult, ok, unknown, wrong
from mp_agent.doctor.machine import FoundRun, Machine
from mp_agent.ring.address import DEFAULT_PORT

_LOG_BYTES_MAX = 1 << 16
_LOG_LINES_MAX = 3
_WARNING = " WARNING "
_TROUBLE = (_WARNING, " ERROR ", " CRITICAL ")
_CONDITION = " condition="
_CONNECT_SECONDS = 1.0
_STARTERS = {
    "spawn": "local rank 0 starts it, and gives up after three deaths: see the job's log",
    "external": "start `mp-agent node` as the user who trains, with the same MP_AGENT_DIR",
    "none": "set MP_AGENT_NODE_AGENT to spawn or external",
}


def runs(machine: Machine) -> Iterator[CheckResult]:
    """Report the runs and ranks on this node."""
    for run in machine.runs:
        if run.ranks:
            yield _ranks_of(run)
    if any(run.ranks for run in machine.runs):
        return
    which = f"run {machine.run!r}" if machine.run else "no run"
    text = f"{which} is {'not ' if machine.run else ''}in {machine.settings.dir}"
    if machine.scrape or machine.resident is not None:
        yield unknown(text, "a node agent waits for jobs" if machine.resident else "")
    else:
        yield wrong(
            text,
            "call mp_agent.init() in the script, or start it by `mp-agent run`; rings appear with "
            "the first step; call doctor as the same user, with the same MP_AGENT_DIR, in the "
            "same container",
        )


def _ranks_of(run: FoundRun) -> CheckResult:
    states = Counter("alive" if rank.alive else "gone" for rank in run.ranks)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    text = f"run {run.name}: ranks on this node: {counted}"
    return ok(text) if run.alive else unknown(text, "the run is over; its last state lingers")


def rings(machine: Machine) -> Iterator[CheckResult]:
    """Report rings that cannot be read."""
    refused = [reason for run in machine.runs for reason in run.refused]
    for reason in refused:
        yield wrong(
            reason,
            "of another version: install one version of mp-agent in trainer and node agent; "
            "of another user: let both run as one",
        )
    if not refused:
        yield ok("every ring can be read")


def agents(machine: Machine) -> Iterator[CheckResult]:
    """Check that each run has a node agent."""
    for run in machine.runs:
        if run.agent_alive and run.status is None:
            yield unknown(f"run {run.name}: its node agent has not written its status yet")
        elif run.agent_alive and run.status is not None:
            yield ok(f"run {run.name}: its node agent is alive, pid {run.status.pid}")
        elif run.alive:
            yield wrong(
                f"run {run.name}: no node agent watches it", _STARTERS[machine.settings.node_agent]
            )
        else:
            yield unknown(f"run {run.name}: left behind by a job that is gone")
    if machine.resident is not None:
        yield ok(f"a node agent waits for jobs, pid {machine.resident.pid}")
    elif not machine.runs:
        yield unknown("no run, so no node agent is expected")


def log_files(machine: Machine) -> Iterator[CheckResult]:
    """Show the last warnings in the logs of detached node agents."""
    names = [run.directory.name for run in machine.runs]
    paths = [machine.settings.log_dir / f"{name}.log" for name in names]
    shown = [path for path in paths if path.is_file()]
    for path in shown:
        lines = _warnings(path)
        for line in lines:
            # The log does not show whether the cause of a warning persists.
            result = unknown if _WARNING in line else wrong
            yield result(f"{path}: {line}", "read the whole file")
        if not lines:
            yield ok(f"{path} holds no warning")
    if not shown:
        yield unknown(f"no log of a run in {machine.settings.log_dir}")


def _warnings(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES_MAX))
            lines = file.read(_LOG_BYTES_MAX).decode("utf-8", "replace").splitlines()
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    # Conditions concern the training, not the telemetry.
    own = [line for line in lines if _CONDITION not in line]
    return [line for line in own if any(mark in line for mark in _TROUBLE)][-_LOG_LINES_MAX:]


def port(machine: Machine) -> Iterator[CheckResult]:
    """Detect a port that another program uses, and node agents without a port."""
    wanted = machine.settings.port or DEFAULT_PORT
    for status in machine.agents:
        if not status.port and "prometheus" in machine.settings.exporters:
            yield wrong(
                f"the node agent with pid {status.pid} serves no port",
                "its log says why: a port that is in use, or contradictory TLS settings",
            )
    ours = {status.port for status in machine.agents} - {0}
    if wanted in ours or machine.settings.port == 0:
        yield ok(f"serving on {', '.join(map(str, sorted(ours))) or 'no port yet'}")
    elif _is_in_use(wanted):
        moved = ", ".join(map(str, sorted(ours)))
        yield wrong(
            f"port {wanted} is another program's" + (f"; ours is {moved}" if moved else ""),
            "set MP_AGENT_PORT to a free port and let Prometheus scrape that one",
        )
    elif ours:
        yield wrong(
            f"the node agent serves on {', '.join(map(str, sorted(ours)))}, not on {wanted}",
            "another program had the port when the agent started: let Prometheus find the agents "
            "by sd_dir or /sd, or set MP_AGENT_PORT",
        )
    else:
        yield unknown(f"port {wanted} is free: no node agent has it")


def _is_in_use(port: int) -> bool:
    for host in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError:
            continue
        return True
    return False
