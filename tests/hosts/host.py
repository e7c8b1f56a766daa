"""A host: network, process, mount and host name namespaces of its own on this machine."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from tests.hosts.switch import Switch
from tests.waiting import wait_until

T = TypeVar("T")

_INIT = Path(__file__).parent / "init.py"
_CLOCK = Path(__file__).parent / "clock"
_CLONE_NEWNET = 0x40000000
_HTTP_SECONDS = 10.0


class Host:
    """One host, at `address`. It lives until `kill()`, and may be booted again."""

    def __init__(
        self,
        name: str,
        addresses: Mapping[str, str],
        switch: Switch,
        directory: Path,
        shared_memory: Path,
    ) -> None:
        """Describe a host; it lives from `boot()` on. addresses: of all hosts, by name."""
        self.name = name
        self.address = addresses[name]
        self._addresses = addresses
        self.directory = directory
        """For logs and what else the test wants to keep."""
        self.shared_memory = shared_memory
        """What `MP_AGENT_DIR` says on this host."""
        self.clock_skew_seconds = 0.0
        """By how much the wall clock of what is started from now on goes wrong."""
        self._switch = switch
        self._init: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def pid(self) -> int:
        """Process id, outside, of the host's init."""
        assert self._init is not None, f"{self.name} is not up"
        return int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text())

    @property
    def up(self) -> bool:
        """Whether the host lives."""
        return self._init is not None and self._init.poll() is None

    def boot(self) -> None:
        """Begin to live, connected to the switch."""
        names = self.directory / "hosts"
        known = {"localhost": "127.0.0.1", **self._addresses}
        names.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        self._init = subprocess.Popen(
            [
                # Also when the test itself is killed, and cannot clean up.
                *("setpriv", "--pdeathsig", "KILL", "--"),
                *("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"),
                *("--", sys.executable, "-S", str(_INIT), self.name, str(names)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"ready\n", f"{self.name} does not come up"
        self._init.stdout.close()
        self._switch.connect(self.name, self.pid)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def cut(self) -> None:
        """Lose all packets from and to the host; no process is notified, as when a switch fails."""
        self._switch.cut(self.name)

    def restore(self) -> None:
        """Let the packets through again."""
        self._switch.restore(self.name)

    def kill(self) -> None:
        """Lose power: every process of the host is gone at once, with its network."""
        if self._init is None:
            return
        self._init.kill()
        self._init.wait()
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.wait()
        self._init = None

    def pause(self) -> None:
        """Let every process of the host stand still; what comes for it over the network waits."""
        for outside in self.pids().values():
            os.kill(outside, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        # nsenter, which is outside of the host, stops together with what it has started.
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        for outside in self.pids().values():
            os.kill(outside, signal.SIGCONT)

    def start(
        self,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start a process on the host; signals for it go through `signal`."""
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                self._entering(*command),
                env={**os.environ, **self._clock_environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def run(self, *command: str) -> str:
        """Run a command on the host to its good end, and return what it prints."""
        return subprocess.run(
            self._entering(*command), check=True, capture_output=True, text=True
        ).stdout

    def pids(self, *words: str) -> dict[int, int]:
        """Return the processes whose command line has `words`: pid on the host → pid outside."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.readlink(entry / "ns/pid") != own:
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = (entry / "status").read_text()
            except OSError:
                continue
            if line and all(word in line for word in words):
                inside = next(x for x in status.splitlines() if x.startswith("NSpid:"))
                found[int(inside.split()[-1])] = int(entry.name)
        return found

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process by the pid that it has on the host."""
        os.kill(self.pids()[pid], number)

    def in_network(self, act: Callable[[], T]) -> T:
        """Return what `act` returns when its sockets are the host's; works while it is cut off."""
        outcome: list[T] = []
        failure: list[BaseException] = []
        namespace = f"/proc/{self.pid}/ns/net"

        def enter() -> None:
            try:
                fd = os.open(namespace, os.O_RDONLY)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"setns {namespace}")
                finally:
                    os.close(fd)
                outcome.append(act())
            except BaseException as error:
                failure.append(error)

        # Only the calling thread changes its network, so it is one that ends here.
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]
        return outcome[0]

    def get(self, url: str) -> bytes:
        """Return what an HTTP server answers to this host. Raises OSError when it does not."""

        def ask() -> bytes:
            with urllib.request.urlopen(url, timeout=_HTTP_SECONDS) as response:
                return bytes(response.read())

        return self.in_network(ask)

    @contextmanager
    def port_taken(self, port: int) -> Iterator[None]:
        """Let something else listen on a port of the host, as soon as it is free."""

        def listen() -> socket.socket | None:
            try:
                return socket.create_server(("0.0.0.0", port))
            except OSError:
                return None

        what = f"the end of the process that listens on port {port} of {self.name}"
        with wait_until(lambda: self.in_network(listen), what=what):
            yield

    def runs(self) -> set[str]:
        """Return the names of the runs that ranks of this host are in."""
        names = set()
        for run_dir in locations.find_runs(self.shared_memory):
            for ring in locations.find_rings(run_dir):
                reader = RingReader.open(ring)
                names.add(reader.identity.run)
                reader.close()
        return names

    def run_dir(self, run: str) -> Path:
        """Return where the ranks of this host and its node agent meet."""
        return locations.run_directory(self.shared_memory, run)

    def agent(self, run: str) -> locations.AgentStatus | None:
        """Return what the node agent of this host says of itself once it serves metrics."""
        status = locations.read_status(self.run_dir(run))
        return status if status is not None and status.port else None

    def wait_for_agent(self, run: str, *, seconds: float = 60.0) -> locations.AgentStatus:
        """Return the status of the host's node agent, once it is there."""
        found = wait_until(
            lambda: self.agent(run), seconds=seconds, what=f"the node agent on {self.name}"
        )
        assert found is not None
        return found

    def metrics(self, run: str) -> dict[str, float]:
        """Return what this host's node agent exports, as `name{label values but run}`."""
        status = self.wait_for_agent(run)
        text = self.get(f"http://127.0.0.1:{status.port}/metrics").decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(v for k, v in sorted(sample.labels.items()) if k != "run")
                name = sample.name.removeprefix("mp_agent_")
                found[f"{name}{{{labels}}}" if labels else name] = sample.value
        return found

    def targets(self, run: str) -> list[dict[str, Any]]:
        """Return what this host's node agent answers at /sd."""
        status = self.wait_for_agent(run)
        return list(json.loads(self.get(f"http://127.0.0.1:{status.port}/sd")))

    def agent_log(self) -> str:
        """Return what node agents on this host have logged."""
        files = sorted((self.directory / "agent-log").glob("*.log*"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def _entering(self, *command: str) -> list[str]:
        entering = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--pid"]
        return [*entering, "--", *command]

    def _clock_environment(self) -> dict[str, str]:
        if not self.clock_skew_seconds:
            return {}
        path = os.pathsep.join(filter(None, (str(_CLOCK), os.environ.get("PYTHONPATH"))))
        return {"TEST_CLOCK_SKEW_SECONDS": str(self.clock_skew_seconds), "PYTHONPATH": path}
