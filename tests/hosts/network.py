"""Several hosts on one switch, all on this machine, and torchrun jobs over them.

Nothing of it is seen outside, no packet leaves it, and all of it is gone when the `with` ends.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tests.hosts.host import Host
from tests.hosts.switch import switch
from tests.waiting import wait_until
from tools.jobs import ROOT

T = TypeVar("T")

_PREFIX = "10.77.0."
_RENDEZVOUS_PORT = 29400
_LOST_AFTER_SECONDS = 3
"""An elastic job goes on without a lost host after some seconds instead of a minute."""
_NEEDED = ("ip", "unshare", "nsenter", "setpriv")


@dataclass(frozen=True, slots=True)
class Job:
    """A torchrun job under way on several hosts."""

    run: str
    hosts: tuple[Host, ...]
    launchers: tuple["subprocess.Popen[bytes]", ...]
    """One per host, or what was started without any: one per rank."""

    def log(self, index: int = 0) -> str:
        """Return what the ranks of one host have printed."""
        path = _log_file(self.hosts[index], self.run)
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        """Return the last lines of every host, for the message of a test that fails."""
        parts = []
        for index, host in enumerate(self.hosts):
            for title, text in (("job", self.log(index)), ("node agent", host.agent_log())):
                tail = "\n".join(text.splitlines()[-25:])
                parts.append(f"--- {host.name}: {title}\n{tail}")
        return "\n".join(parts)

    def until(
        self,
        predicate: Callable[[], T | Literal[False, 0] | None],
        what: str,
        *,
        seconds: float = 90.0,
    ) -> T:
        """Return the predicate's first true value; the logs of all hosts when it does not come."""
        try:
            return wait_until(predicate, seconds=seconds, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def wait_for(self, text: str, *, times: int = 1, seconds: float = 90.0) -> None:
        """Wait until the ranks have printed `text` so often, on all hosts together."""

        def printed() -> bool:
            count = sum(self.log(index).count(text) for index in range(len(self.hosts)))
            return count >= times or not self.running

        self.until(printed, repr(text), seconds=seconds)
        assert self.running, self.logs()

    @property
    def running(self) -> bool:
        """Whether a launcher has not ended yet."""
        return any(launcher.poll() is None for launcher in self.launchers)

    def wait(self, seconds: float = 120.0) -> list[int]:
        """Wait until all launchers have ended, and return their exit codes."""
        self.until(lambda: not self.running, "the end of the job", seconds=seconds)
        return [launcher.wait() for launcher in self.launchers]


class Network:
    """`network[0]` is the first host; torchrun's rendezvous is on the host that `start` gets."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        """Boot the hosts."""
        self.hosts = tuple(hosts)
        for host in hosts:
            host.boot()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def start(
        self,
        script: Path,
        *arguments: str,
        run: str,
        ranks: int = 2,
        hosts: Sequence[Host] = (),
        least_hosts: int = 0,
        rendezvous_host: int = 0,
        lost_after_seconds: int = _LOST_AFTER_SECONDS,
        max_restarts: int = 0,
        environment: Mapping[str, str] | None = None,
        **settings: str,
    ) -> Job:
        """Start torchrun with `ranks` ranks on each host, all by default.

        least_hosts: with how many hosts an elastic job, of which all may be, goes on; 0: with
        those that take part. lost_after_seconds: how long torchrun waits for a silent host.
        settings: of mp_agent, by name, on top of those that put everything in its host's place.
        """
        taking_part = tuple(hosts) or self.hosts
        nodes = f"{least_hosts}:{len(self.hosts)}" if least_hosts else str(len(taking_part))
        waiting = {
            "last_call_timeout": 2,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": lost_after_seconds,
        }
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", nodes),
            *("--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-id", run),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in waiting.items())),
            *("--rdzv-endpoint", f"{self.hosts[rendezvous_host].address}:{_RENDEZVOUS_PORT}"),
        ]
        launchers = [
            host.start(
                [*command, "--local-addr", host.address, str(script), *arguments],
                log_file=_log_file(host, run),
                environment={**_variables(host, settings), **(environment or {})},
                cwd=ROOT,
            )
            for host in taking_part
        ]
        return Job(run, taking_part, tuple(launchers))

    def start_unnamed(self, script: Path, *arguments: str, ranks: int = 2, **settings: str) -> Job:
        """Start torchrun by hand on each host, as its manual says, without an id of the job."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self)), "--nproc-per-node", str(ranks)),
            *("--master-addr", self.hosts[0].address, "--master-port", str(_RENDEZVOUS_PORT)),
        ]
        launchers = [
            host.start(
                [*command, "--node-rank", str(number), str(script), *arguments],
                log_file=_log_file(host, script.stem),
                environment=_variables(host, settings),
                cwd=ROOT,
            )
            for number, host in enumerate(self.hosts)
        ]
        return Job(script.stem, self.hosts, tuple(launchers))

    def start_as_srun(self, script: Path, *arguments: str, ranks: int = 2, **settings: str) -> Job:
        """Start the ranks without torchrun, each with the variables that `srun` gives it."""
        everyone = {
            **{"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"},
            "SLURM_NTASKS": str(ranks * len(self)),
            "SLURM_TASKS_PER_NODE": f"{ranks}(x{len(self)})",
            **{"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": str(_RENDEZVOUS_PORT)},
            "WORLD_SIZE": str(ranks * len(self)),
        }
        tasks = [
            host.start(
                [sys.executable, str(script), *arguments],
                log_file=_log_file(host, script.stem),
                environment={
                    **_variables(host, settings),
                    **everyone,
                    **{"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)},
                    **dict.fromkeys(("SLURM_PROCID", "RANK"), str(node * ranks + local)),
                },
                cwd=ROOT,
            )
            for node, host in enumerate(self.hosts)
            for local in range(ranks)
        ]
        return Job(script.stem, self.hosts, tuple(tasks))


@contextmanager
def network(count: int, directory: Path) -> Iterator[Network]:
    """Make `count` hosts on a network; their logs go to `directory`."""
    shared = Path(tempfile.mkdtemp(prefix="mp_agent-hosts-", dir=_memory()))
    addresses = {f"host{index}": f"{_PREFIX}{index + 1}" for index in range(count)}
    with switch() as middle:
        hosts = [
            Host(name, addresses, middle, directory / name, shared / name) for name in addresses
        ]
        try:
            yield Network(hosts)
        finally:
            for host in hosts:
                host.kill()
            shutil.rmtree(shared, ignore_errors=True)


def why_not() -> str | None:
    """Return why this machine has no network namespaces for us; None when it has."""
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found: packages iproute2 and util-linux"
    trial = [
        *("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--"),
        *("ip", "link", "add", "one", "type", "veth", "peer", "name", "other"),
    ]
    done = subprocess.run(trial, capture_output=True, text=True)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


def _log_file(host: Host, run: str) -> Path:
    return host.directory / f"{run}.log"


def _variables(host: Host, settings: Mapping[str, str]) -> dict[str, str]:
    values = {
        "dir": str(host.shared_memory),
        "log_dir": str(host.directory / "agent-log"),
        "flight_dir": str(host.directory / "flight"),
        "exit_wait_seconds": "1",
        **settings,
    }
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        **{f"MP_AGENT_{name.upper()}": value for name, value in values.items()},
    }


def _memory() -> Path | None:
    place = Path("/dev/shm")
    return place if os.access(place, os.W_OK) else None
