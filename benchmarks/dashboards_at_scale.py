"""How long the dashboards and the rules take over a large run, as markdown tables.

Run: python -m benchmarks.dashboards_at_scale [--ranks 4096] [--layers 1000] [--hours 6]

A synthetic run is back-filled into a store of Prometheus' own; then every panel is asked as
Grafana asks it, its queries one after the other, and the rules evaluate every few seconds.
"""

import argparse
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.machine import describe, markdown
from mp_agent.alerting.rules.rule_file import rendered_files
from tools.panel_queries import Asking, every_panel
from tools.servers import binaries
from tools.servers.running import read_json
from tools.synthetic_store import RUN, Size, fill, prometheus_over

PANEL_SECONDS = 2.0
GROUP_SECONDS = 1.0
_EVALUATION_SECONDS = 10
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
                longest[name] = max(longest.get(name, 0.0), group["evaluationTime"])
            for rule in group["rules"]:
                if rule["health"] == "err":
                    raise SystemExit(f"{rule['name']}: {rule['lastError']}")
        time.sleep(0.5)
    return longest


def rules_text() -> str:
    """Return the committed rules."""
    (text,) = (text for path, text in rendered_files().items() if path.endswith("rules.yaml"))
    return text


def main() -> int:
    """Print the tables; return 1 if something is too slow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=6)
    parser.add_argument("--interval-seconds", type=int, default=60)
    options = vars(parser.parse_args())
    prometheus, promtool = binaries.find("prometheus"), binaries.find("promtool")
    if prometheus is None or promtool is None:
        raise SystemExit("prometheus and promtool are neither on PATH nor available from apt")
    size = Size(**options)
    with tempfile.TemporaryDirectory(prefix="mp_agent-scale-") as place:
        directory = Path(place)
        rules = directory / "rules.yaml"
        rules.write_text(rules_text(), encoding="utf-8")
        end = int(time.time()) + _AHEAD_SECONDS
        count = fill(promtool, directory / "data", size, end)
        with prometheus_over(
            prometheus, directory, rules=rules, evaluation_seconds=_EVALUATION_SECONDS
        ) as url:
            groups = group_seconds(url)
        with prometheus_over(prometheus, directory) as url:
            asking = Asking(
                url=url,
                run=RUN,
                start_unix_seconds=end - size.hours * 3600,
                end_unix_seconds=end,
                scrape_interval_seconds=size.interval_seconds,
            )
            panels = panel_seconds(asking)
    print(describe(torch.device("cpu")))
    print(f"\n{count:,} series, {size}\n")
    print_tables(panels, groups)
    slowest_panel = max(wall for wall, _ in panels.values())
    return int(slowest_panel > PANEL_SECONDS or max(groups.values()) > GROUP_SECONDS)


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
