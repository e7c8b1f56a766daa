"""How long the dashboards and the rules take over a large run, as markdown tables.

Run: python -m benchmarks.dashboards_at_scale [--store victoria-metrics] [--ranks 4096 16384 100000]
[--runs 1] [--layers 1000] [--hours 6]

A synthetic run, or several, is back-filled into a store of Prometheus' own, or into
VictoriaMetrics, with what the rules would have recorded of it; then every panel is asked as Grafana
asks it, its queries one after the other, and the rules evaluate every minute.
"""

import argparse
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from benchmarks.machine import describe, markdown
from mp_agent.alerting.rules import render_rules
from mp_agent.alerting.values import values_in_force
from tools.panel_queries import Asking, every_panel
from tools.servers import binaries
from tools.servers.running import read_json
from tools.servers.victoria import replay, victoria_metrics, vmalert
from tools.synthetic_store import RUN, Size, fill, json_lines, prometheus_over, record

PANEL_SECONDS = 2.0
GROUP_SECONDS = 1.0
_EVALUATION_SECONDS = 60
"""As servers do by default: more often, groups of 100 000 ranks wait for each other."""
_EVALUATIONS = 3
_ROUNDS = 3
_AHEAD_SECONDS = 1800
"""So far beyond now the data goes, so that the rules see it while this measures."""
_SLOWEST = 12


def panel_seconds(asking: Asking) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the least wall and processor time of every panel, by dashboard and title.

    The least of some rounds: this measures Prometheus, not what else the machine is doing.
    """
    found = {}
    for board, panel in every_panel():
        rounds = []
        for _ in range(_ROUNDS):
            before = _processor_seconds(asking.url)
            wall = asking.measured(panel)
            rounds.append((wall, _processor_seconds(asking.url) - before))
        walls, processors = zip(*rounds, strict=True)
        found[board.title.partition(" / ")[2], panel.title] = min(walls), min(processors)
    return found


def _processor_seconds(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith("process_cpu_seconds_total "))
    return float(line.split()[1])


def group_seconds(url: str, evaluations: int = _EVALUATIONS) -> dict[str, float]:
    """Return the longest of some evaluations of every rule group."""
    longest: dict[str, float] = {}
    seen: dict[str, set[str]] = {}
    while not seen or min(len(times) for times in seen.values()) < evaluations:
        for group in read_json(f"{url}/api/v1/rules")["data"]["groups"]:
            name, at = group["name"], group["lastEvaluation"]
            times = seen.setdefault(name, set())
            if not at.startswith("0001"):
                times.add(at)
                # vmalert says it of each rule; they come one after the other.
                took = sum(rule["evaluationTime"] for rule in group["rules"])
                longest[name] = max(longest.get(name, 0.0), group.get("evaluationTime", took))
            for rule in group["rules"]:
                if rule["health"] == "err":
                    raise SystemExit(f"{rule['name']}: {rule['lastError']}")
        time.sleep(0.5)
    return longest


def rules_text(*, alerts: bool = True) -> str:
    """Return the rules of this code; without alerts, those alone that record."""
    groups = yaml.safe_load(render_rules(values_in_force()))["groups"]
    for group in groups:
        group["rules"] = [rule for rule in group["rules"] if alerts or "record" in rule]
    return yaml.safe_dump({"groups": [group for group in groups if group["rules"]]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How long the panels and the rule groups of one store take, and how much it holds."""

    series: int
    store_bytes: int
    """Of all samples on disk, without what was recorded or asked afterwards."""
    panels: Mapping[tuple[str, str], tuple[float, float]]
    groups: Mapping[str, float]


def _asking(url: str, size: Size, end: int) -> Asking:
    return Asking(
        url=url,
        run=RUN if size.runs == 1 else ".+",
        start_unix_seconds=end - size.hours * 3600,
        end_unix_seconds=end,
        scrape_interval_seconds=size.interval_seconds,
    )


def of_prometheus(size: Size, directory: Path, end: int) -> Measured:
    """Measure a Prometheus."""
    promtool, prometheus = binaries_of("promtool", "prometheus")
    rules, recording = directory / "rules.yaml", directory / "recording.yaml"
    series = fill(promtool, directory / "data", size, end)
    store_bytes = _bytes_in(directory / "data")
    record((promtool, prometheus), directory, recording, size, end)
    with prometheus_over(
        prometheus, directory, rules=rules, evaluation_seconds=_EVALUATION_SECONDS
    ) as url:
        groups = group_seconds(url)
    with prometheus_over(prometheus, directory) as url:
        panels = panel_seconds(_asking(url, size, end))
    return Measured(series=series, store_bytes=store_bytes, panels=panels, groups=groups)


def of_victoria_metrics(size: Size, directory: Path, end: int) -> Measured:
    """Measure a VictoriaMetrics, and the vmalert that asks it."""
    server, alerting = binaries_of("victoria-metrics", "vmalert")
    rules, recording = directory / "rules.yaml", directory / "recording.yaml"
    start = int(end - size.hours * 3600)
    with victoria_metrics(server, directory / "store", memory="6GB") as store:
        series = store.send_lines(json_lines(size, end))
        store_bytes = _bytes_in(directory / "store" / "data")
        replay(alerting, recording, store.url, start, end)
        with vmalert(
            alerting,
            directory / "vmalert",
            rules=rules,
            datasource_url=store.url,
            alertmanager_url="http://127.0.0.1:9",
            interval_seconds=_EVALUATION_SECONDS,
        ) as url:
            groups = group_seconds(url)
        panels = panel_seconds(_asking(store.url, size, end))
    return Measured(series=series, store_bytes=store_bytes, panels=panels, groups=groups)


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def binaries_of(*names: str) -> tuple[Path, ...]:
    """Return these servers. Raises SystemExit where one is missing."""
    found = {name: binaries.find(name) for name in names}
    if missing := [name for name, path in found.items() if path is None]:
        raise SystemExit(f"{', '.join(missing)}: neither on PATH nor available from apt")
    return tuple(path for path in found.values() if path is not None)


_STORES = {"prometheus": of_prometheus, "victoria-metrics": of_victoria_metrics}


def main() -> int:
    """Print the tables; return 1 if something is too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=_STORES, default="prometheus")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4096])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=6)
    parser.add_argument("--interval-seconds", type=int, default=60)
    options = vars(parser.parse_args())
    measure, sizes = _STORES[options.pop("store")], options.pop("ranks")
    print(describe(torch.device("cpu")))
    slow = False
    for ranks in sizes:
        size = Size(ranks=ranks, **options)
        with tempfile.TemporaryDirectory(prefix="mp_agent-scale-") as place:
            directory = Path(place)
            (directory / "rules.yaml").write_text(rules_text())
            (directory / "recording.yaml").write_text(rules_text(alerts=False))
            measured = measure(size, directory, int(time.time()) + _AHEAD_SECONDS)
        samples = measured.series * size.hours * 3600 / size.interval_seconds
        per_sample = measured.store_bytes / samples
        print(f"\n{measured.series:,} series, {size}, {per_sample:.2f} bytes a sample\n")
        print_tables(measured.panels, measured.groups)
        sys.stdout.flush()
        slow |= max(wall for wall, _ in measured.panels.values()) > PANEL_SECONDS
        slow |= max(measured.groups.values()) > GROUP_SECONDS
    return int(slow)


def print_tables(
    panels: Mapping[tuple[str, str], tuple[float, float]], groups: Mapping[str, float]
) -> None:
    """Print dashboards as wholes, the slowest panels, and the rule groups."""
    boards: dict[str, list[float]] = {}
    for (board, _), (wall, _) in panels.items():
        boards.setdefault(board, []).append(wall)
    print(
        markdown(
            ("dashboard", "panels", "slowest panel", "all panels, one after the other"),
            (
                (board, str(len(times)), _text(max(times)), _text(sum(times)))
                for board, times in boards.items()
            ),
        ),
        end="\n\n",
    )
    slowest = sorted(panels.items(), key=lambda item: -item[1][0])[:_SLOWEST]
    print(
        markdown(
            ("slowest panels", "dashboard", "time", "processor"),
            (
                (title, board, _text(wall), _text(processor))
                for (board, title), (wall, processor) in slowest
            ),
        ),
        end="\n\n",
    )
    print(
        markdown(
            ("rule group", "evaluation"), ((name, _text(took)) for name, took in groups.items())
        )
    )


def _text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
