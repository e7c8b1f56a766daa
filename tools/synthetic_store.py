"""A Prometheus store with hours of a run that never was, of any size, from the metrics catalog."""

import re
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import yaml

from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import level_label
from tools.servers.running import serving

RUN = "large"
_BLOCK_SECONDS = 2 * 3600
_SHAPES = 32
"""So many different courses a metric takes; series share them."""
_STEP_SECONDS = 2.0

_LABEL_VALUES: dict[str, Sequence[str]] = {
    "bound": [level_label(name) for name in ("grad_norm_high", "grad_norm_extreme")],
    "kind": ["gradients", "weights"],
    "exporter": ["otlp"],
    "condition": ["MpAgentGradientExplosion", "MpAgentLossSpike", "MpAgentRankStraggler"],
    "severity": ["warning"],
    "reason": [],
}
"""Label values of families with their own labels; those not named here have the value 1."""
_NODE = re.compile(r'instance="node(\d+)[.:]')
_NAMED = {"missing_rank": 16, "lagging_rank": 16, "dead_layer": 10, "underflowing_layer": 10}
"""How many series there are of an info metric that names what is in trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What the run is made of, and how much of it is kept."""

    ranks: int
    layers: int
    ranks_per_node: int = 8
    runs: int = 1
    """So many alike, each on nodes of its own."""
    hours: float
    interval_seconds: int

    @property
    def members(self) -> dict[Scope, list[tuple[str, ...]]]:
        """Return the label values that each scope starts with."""
        nodes = -(-self.ranks // self.ranks_per_node)
        names = [RUN, *(f"{RUN}-{number}" for number in range(1, self.runs))]
        layers = [f"blocks.{n // 8}.part{n % 8}.weight" for n in range(self.layers)]
        return {
            Scope.RUN: [(run,) for run in names],
            Scope.LAYER: list(product(names, layers)),
            Scope.RANK: list(product(names, map(str, range(self.ranks)))),
            Scope.AGENT: list(product(names, map(str, range(nodes)))),
        }


def series_of(size: Size) -> Iterator[tuple[Metric, str]]:
    """Yield every series: its metric, and its name with labels as text."""
    members = size.members
    for metric in METRICS:
        for labels in _own_labels(metric):
            for scope in members[metric.scope]:
                pairs = zip(metric.label_names, (*scope, *labels), strict=False)
                text = ",".join(f'{name}="{value}"' for name, value in pairs)
                node = scope[1] if metric.scope is Scope.AGENT else "0"
                if metric.scope is Scope.RANK:
                    node = str(int(scope[1]) // size.ranks_per_node)
                place = "" if scope[0] == RUN else f".{scope[0]}"
                target = f'job="mp-agent",instance="node{node}{place}:9440"'
                if metric.kind is not Kind.HISTOGRAM:
                    yield metric, f"{metric.prometheus_name}{{{text},{target}}}"
                    continue
                for bound in (*metric.bounds, "+Inf"):
                    yield metric, f'{metric.prometheus_name}_bucket{{{text},{target},le="{bound}"}}'


def json_lines(size: Size, end_unix_seconds: int) -> Iterator[str]:
    """Yield every series with its samples, as VictoriaMetrics imports them."""
    interval = size.interval_seconds
    begin = int(end_unix_seconds - size.hours * 3600) // interval * interval
    times = range(begin, end_unix_seconds, interval)
    at = ",".join(f"{time}000" for time in times)
    values = {
        metric.name: [
            ",".join(line.split()[0] for line in course)
            for course in _courses(metric, times, begin)
        ]
        for metric in METRICS
    }
    for number, (metric, name) in enumerate(series_of(size)):
        family, _, labels = name.removesuffix("}").partition("{")
        pairs = re.sub(r'(\w+)="', r'"\1":"', labels)
        samples = values[metric.name][number % _SHAPES]
        yield (
            f'{{"metric":{{"__name__":"{family}",{pairs}}},"values":[{samples}],'
            f'"timestamps":[{at}]}}\n'
        )


def expositions(size: Size, step: int) -> list[str]:
    """Return what the agent of each node of a run answers to a scrape at a step."""
    texts = [""] * len(size.members[Scope.AGENT])
    courses = {metric.name: _courses(metric, (step,), 0) for metric in METRICS}
    for number, (metric, name) in enumerate(series_of(size)):
        own, _, target = name.partition(',job="')
        node = int(_NODE.findall(target)[0])
        more = f",le={target.partition('le=')[2]}" if "le=" in target else "}"
        value = courses[metric.name][number % _SHAPES][0].split()[0]
        texts[node] += f"{own}{more} {value}\n"
    return texts


def _own_labels(metric: Metric) -> Iterator[tuple[str, ...]]:
    for ending, count in _NAMED.items():
        if metric.name.removeprefix("mp_agent.").startswith(f"{ending}."):
            rest = ("1",) * (len(metric.labels) - 1)
            yield from ((str(number), *rest) for number in range(count))
            return
    yield from product(*(_LABEL_VALUES.get(label, ["1"]) for label in metric.labels))


def _courses(metric: Metric, times: Sequence[int], begin: int) -> list[list[str]]:
    """Return the values that a metric takes at some times, as ends of lines, in some variants."""
    seed = zlib.crc32(metric.name.encode())
    return [
        [f" {_value(metric, seed, shape, at, begin):.6g} {at}\n" for at in times]
        for shape in range(_SHAPES)
    ]


def _value(metric: Metric, seed: int, shape: int, at: int, begin: int) -> float:
    noise = zlib.crc32(f"{seed} {shape} {at}".encode()) / 2**32
    steps = (at - begin) // _STEP_SECONDS
    if metric.kind is Kind.INFO or metric.name.endswith((".up", ".active")):
        return 1.0
    if metric.kind in (Kind.COUNTER, Kind.HISTOGRAM):
        return steps * (shape + 1)
    if metric.name.endswith("timestamp"):
        return at - noise * 10
    if metric.name.endswith(".step"):
        return steps - shape % 3
    if metric.name.endswith("norm"):
        return float(2.0 ** (shape - 20) * (1 + noise / 4))
    return 1 + noise / 4


def write_openmetrics(size: Size, path: Path, times: Sequence[int], begin: int) -> int:
    """Write the samples of all series at some times, and return how many series there are."""
    courses = {metric.name: _courses(metric, times, begin) for metric in METRICS}
    count = 0
    with path.open("w", encoding="utf-8", buffering=2**22) as out:
        for metric, name in series_of(size):
            ends = courses[metric.name][count % _SHAPES]
            out.write(name + name.join(ends))
            count += 1
        out.write("# EOF\n")
    return count


def fill(promtool: Path, data: Path, size: Size, end_unix_seconds: int) -> int:
    """Make the blocks of a store that ends at a time, and return how many series it has."""
    text = data.with_suffix(".txt")
    interval = size.interval_seconds
    begin = int(end_unix_seconds - size.hours * 3600) // interval * interval
    series, start = 0, begin
    while start < end_unix_seconds:
        stop = min((start // _BLOCK_SECONDS + 1) * _BLOCK_SECONDS, end_unix_seconds)
        series = write_openmetrics(size, text, range(start, stop, interval), begin)
        subprocess.run(
            [promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", text, data],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        text.unlink()
        start = -(-stop // interval) * interval
    return series


def record(
    binaries: tuple[Path, Path], directory: Path, rules: Path, size: Size, end_unix_seconds: int
) -> None:
    """Add to the store in `directory`/data what rules would have recorded meanwhile.

    binaries: promtool and Prometheus. Twice, since some rules read what others record.
    """
    promtool, prometheus = binaries
    for _ in range(2):
        with prometheus_over(prometheus, directory) as url:
            subprocess.run(
                [
                    promtool,
                    *("tsdb", "create-blocks-from", "rules"),
                    f"--start={int(end_unix_seconds - size.hours * 3600)}",
                    f"--end={end_unix_seconds}",
                    f"--eval-interval={size.interval_seconds}s",
                    f"--url={url}",
                    f"--output-dir={directory / 'data'}",
                    rules,
                ],
                check=True,
                capture_output=True,
            )


@contextmanager
def prometheus_over(
    binary: Path, directory: Path, *, rules: Path | None = None, evaluation_seconds: int = 5
) -> Iterator[str]:
    """Run Prometheus over the blocks in `directory`/data, and yield its URL; it scrapes nothing."""
    configuration = {
        "global": {"evaluation_interval": f"{evaluation_seconds}s"},
        "rule_files": [] if rules is None else [str(rules)],
        # The blocks may reach beyond now, and what the rules record comes before their end.
        "storage": {"tsdb": {"out_of_order_time_window": "6h"}},
    }
    # What a server keeps apart from its log is removed when it ends; the blocks are to stay.
    own = directory / "server"
    own.mkdir(exist_ok=True)
    configuration_file = own / "prometheus.yaml"
    configuration_file.write_text(yaml.safe_dump(configuration))
    arguments = [
        f"--config.file={configuration_file}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--storage.tsdb.retention.time=10y",
    ]
    with serving(binary, arguments, own / "prometheus.log") as url:
        yield url
