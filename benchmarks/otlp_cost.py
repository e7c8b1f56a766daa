"""What a push by OTLP costs the node agent, as a Markdown table, and whether memory stays flat."""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mp_agent.catalog.metric import Family, Sample, Snapshot
from mp_agent.catalog.metrics import METRICS, Scope
from mp_agent.exporters.otlp.client import Client
from mp_agent.exporters.otlp.environment import LogCapture, OtlpSignal, Redactor, read_environment
from mp_agent.exporters.otlp.events import make_resource
from mp_agent.exporters.otlp.service import open_client
from mp_agent.exporters.otlp.signal_pusher import MetricBatch, MetricSource

SERIES, SMALL = 20_000, 2_000
ROUNDS = 5
READINGS = 5
LIMIT_SECONDS = 30.0

_SINK = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def sink() -> Iterator[str]:
    """Run a receiver that forgets everything, in a separate process; yield its URL."""
    process = subprocess.Popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


def layers(series: int, value: float) -> Snapshot:
    """Return a snapshot of so many series of layers, with names as long as real ones."""
    metrics = [metric for metric in METRICS if metric.scope is Scope.LAYER and not metric.labels]
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(series // len(metrics))]
    return Snapshot(
        tuple(
            Family(metric, tuple(Sample(("llama-7b-run-17", name), value) for name in names))
            for metric in metrics
        ),
        time.time(),
    )


class Pusher:
    """Pushes what it is given, as the service's threads do."""

    def __init__(self, directory: Path) -> None:
        capture = LogCapture(Redactor({}))
        transports = read_environment(os.environ).transports
        self._client: Client = open_client(transports[OtlpSignal.METRICS], capture)
        self._shown = Snapshot()
        self._source = MetricSource(self._collect, make_resource(directory))

    def push(self, shown: Snapshot) -> None:
        self._shown = shown
        make_requests = self._source.next_push()
        assert make_requests is not None
        self._client.send(make_requests(), limit_seconds=LIMIT_SECONDS)
        self._source.settle(None)

    def _collect(self) -> MetricBatch:
        return MetricBatch(self._shown, {}, delivered=lambda: None)


def best_seconds(pusher: Pusher, series: int) -> tuple[float, float]:
    """Return processor and wall time of one push, the best of some rounds."""
    rounds = []
    for number in range(ROUNDS):
        shown = layers(series, float(number))
        processor, wall = time.process_time(), time.perf_counter()
        pusher.push(shown)
        rounds.append((time.process_time() - processor, time.perf_counter() - wall))
    return min(rounds)


def resident_mib() -> float:
    """Return the memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(pusher: Pusher, pushes: int) -> list[tuple[str, str]]:
    """Return the resident memory after so many pushes, at even distances."""
    readings = []
    for number in range(1, pushes + 1):
        pusher.push(layers(SMALL, float(number)))
        if number % max(1, pushes // READINGS) == 0:
            gc.collect()
            readings.append((f"{number}", f"{resident_mib():.1f} MiB"))
    return readings


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pushes", type=int, default=1000, help="so many for the memory (default: %(default)s)"
    )
    pushes = parser.parse_args().pushes
    with sink() as url, tempfile.TemporaryDirectory() as directory:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
        pusher = Pusher(Path(directory))
        rows = []
        for series in (SMALL, SERIES):
            seconds, wall_seconds = best_seconds(pusher, series)
            rows.append((f"{series}", f"{seconds:.3f} s", f"{wall_seconds:.3f} s"))
        readings = memory(pusher, pushes)
    # Only now: they import torch, which would be most of the memory.
    from torch import device

    from benchmarks.machine import describe, markdown

    print(f"{describe(device('cpu'))}\n")
    print(markdown(("series", "processor time of a push", "wall time"), rows))
    print(f"\nResident memory while {SMALL} series are pushed again and again:\n")
    print(markdown(("pushes", "resident"), readings))


if __name__ == "__main__":
    main()
