"""A real VictoriaMetrics (one server) and its vmalert, on free ports, as long as a `with` lasts.

VictoriaMetrics takes OTLP over HTTP at `/opentelemetry/v1/metrics` and Prometheus text at
`/api/v1/import/prometheus`.
"""

import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from tools.servers.relocation import start_directory
from tools.servers.running import VICTORIA_STYLE, read_json, serving

_LINES_AT_A_TIME = 5_000


def _batched(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lines in lists of some thousands."""
    rest = iter(lines)
    while some := list(islice(rest, _LINES_AT_A_TIME)):
        yield some


@dataclass(frozen=True, slots=True)
class VictoriaMetrics:
    """A running VictoriaMetrics, and what one asks of it."""

    url: str
    log_file: Path

    def query(
        self, expression: str, time_unix_seconds: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the instant vector of an expression: metric labels and [time, value].

        What was sent before is seen: it is made searchable first, and the time of the query is
        given, since VictoriaMetrics' own present is rounded down to a second.
        """
        self._flush()
        moment = time.time() if time_unix_seconds is None else time_unix_seconds
        parameters = {"query": expression, "nocache": "1", "time": repr(moment)}
        answer = read_json(f"{self.url}/api/v1/query?{urllib.parse.urlencode(parameters)}")
        return list(answer["data"]["result"])

    def send_text(self, text: str) -> None:
        """Store samples in Prometheus' text format, with or without times in milliseconds."""
        request = urllib.request.Request(f"{self.url}/api/v1/import/prometheus", text.encode())
        urllib.request.urlopen(request, timeout=30).close()
        self._flush()

    def send_lines(self, lines: Iterable[str]) -> int:
        """Store series, each a line of VictoriaMetrics' JSON, and return how many there are."""
        count = 0
        for some in _batched(lines):
            text = "".join(some).encode()
            request = urllib.request.Request(f"{self.url}/api/v1/import", text)
            urllib.request.urlopen(request, timeout=600).close()
            count += len(some)
        self._flush()
        return count

    def _flush(self) -> None:
        urllib.request.urlopen(f"{self.url}/internal/force_flush", timeout=30).close()


@contextmanager
def victoria_metrics(
    binary: Path, directory: Path, *, memory: str = "256MB"
) -> Iterator[VictoriaMetrics]:
    """Run a VictoriaMetrics that keeps a year and answers with its newest samples at once."""
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-storageDataPath={directory / 'data'}",
        "-retentionPeriod=1y",
        "-search.latencyOffset=0s",
        f"-memory.allowedBytes={memory}",
        "-opentelemetry.usePrometheusNaming",
    ]
    log_file = directory / "victoria-metrics.log"
    with serving(binary, arguments, log_file, VICTORIA_STYLE) as url:
        yield VictoriaMetrics(url, log_file)


@contextmanager
def vmagent(
    binary: Path, directory: Path, *, configuration: Path, shard: int, shards: int, store_url: str
) -> Iterator[str]:
    """Run one of several vmagents that share the targets of a configuration, and yield its URL."""
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-promscrape.config={configuration}",
        f"-promscrape.cluster.membersCount={shards}",
        f"-promscrape.cluster.memberNum={shard}",
        f"-remoteWrite.url={store_url}/api/v1/write",
        "-remoteWrite.flushInterval=200ms",
        f"-remoteWrite.tmpDataPath={directory / 'data'}",
    ]
    with serving(binary, arguments, directory / "vmagent.log", VICTORIA_STYLE) as url:
        yield url


@contextmanager
def vmalert(
    binary: Path,
    directory: Path,
    *,
    rules: Path,
    datasource_url: str,
    alertmanager_url: str,
    interval_seconds: int = 1,
) -> Iterator[str]:
    """Run vmalert with a rule file over a VictoriaMetrics or Prometheus, and yield its URL."""
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-rule={rules}",
        f"-datasource.url={datasource_url}",
        # What recording rules record, the alerts of the next evaluation look at.
        f"-remoteWrite.url={datasource_url}",
        "-remoteWrite.flushInterval=200ms",
        f"-notifier.url={alertmanager_url}",
        f"-evaluationInterval={interval_seconds}s",
        f"-rule.resendDelay={interval_seconds}s",
        "-rule.evalDelay=0s",
    ]
    with serving(binary, arguments, directory / "vmalert.log", VICTORIA_STYLE) as url:
        yield url


def replay(
    binary: Path, rules: Path, url: str, start_unix_seconds: int, end_unix_seconds: int
) -> None:
    """Add to a VictoriaMetrics what recording rules would have recorded between two times."""
    subprocess.run(
        [
            binary,
            f"-rule={rules}",
            f"-datasource.url={url}",
            f"-remoteWrite.url={url}",
            f"-replay.timeFrom={_rfc3339(start_unix_seconds)}",
            f"-replay.timeTo={_rfc3339(end_unix_seconds)}",
            "-replay.rulesDelay=0s",
            "-replay.disableProgressBar",
            "-evaluationInterval=60s",
        ],
        check=True,
        capture_output=True,
        cwd=start_directory(binary) or rules.parent,
    )


def _rfc3339(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
