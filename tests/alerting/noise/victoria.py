"""Puts recorded runs through the same rules in vmalert, over a VictoriaMetrics that holds them."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from tests.alerting.noise.judge import Verdict, verdict_of
from tests.alerting.noise.replay import RULES, SCRAPE_SECONDS, Recording
from tools.servers.victoria import victoria_metrics

_FIRST_FIRED = (
    'min by (run, alertname, severity) (tfirst_over_time(ALERTS{alertstate="firing"}[%ds]))'
)


def judge_by_vmalert(
    recordings: Sequence[Recording], find: Callable[[str], Path], directory: Path
) -> list[Verdict]:
    """Return what the rules say of each run, as VictoriaMetrics reads them."""
    seconds = max(recording.scrapes for recording in recordings) * SCRAPE_SECONDS
    start = int(time.time()) // SCRAPE_SECONDS * SCRAPE_SECONDS - seconds
    rules = directory / "vmalert.rules.yaml"
    rules.write_text(_for_replay(RULES))
    with victoria_metrics(find("victoria-metrics"), directory / "victoria") as database:
        database.send_text("".join(_lines(recordings, start)))
        done = subprocess.run(
            [
                find("vmalert"),
                f"-rule={rules}",
                f"-datasource.url={database.url}",
                f"-remoteWrite.url={database.url}",
                f"-replay.timeFrom={_time(start)}",
                f"-replay.timeTo={_time(start + seconds)}",
                f"-evaluationInterval={SCRAPE_SECONDS}s",
                "-replay.maxDatapointsPerQuery=100000",
                "-replay.rulesDelay=0s",
                "-replay.disableProgressBar",
                "-disableAlertgroupLabel",
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = database.query(_FIRST_FIRED % (seconds + SCRAPE_SECONDS), start + seconds)
    fired: dict[str, dict[str, dict[str, float]]] = {}
    for row in found:
        labels = row["metric"]
        alerts = fired.setdefault(labels.get("run", ""), {})
        at = float(row["value"][1]) - start
        alerts.setdefault(labels["alertname"], {})[labels["severity"]] = at
    return [verdict_of(r, fired.get(r.scenario.name, {})) for r in recordings]


def _for_replay(rules: str) -> str:
    """Return the rules as a replay can evaluate them.

    It cannot fill templates that query, and would have to wait after each recording rule until
    VictoriaMetrics shows what was recorded: what is recorded stands in the alerts themselves.
    """
    document = yaml.safe_load(rules)
    for group in document["groups"]:
        recorded = {r["record"]: r["expr"] for r in group["rules"] if "record" in r}
        group["rules"] = [rule for rule in group["rules"] if "record" not in rule]
        for rule in group["rules"]:
            rule.pop("annotations", None)
            for name, expression in recorded.items():
                rule["expr"] = rule["expr"].replace(name, f"({expression})")
    return yaml.safe_dump(document)


def _lines(recordings: Sequence[Recording], start: int) -> Iterator[str]:
    for recording in recordings:
        for (name, labels), values in recording.samples.items():
            series = ",".join(f'{key}="{value}"' for key, value in (*labels, ("namespace", "ml")))
            for tick, value in enumerate(values):
                if value is not None:
                    milliseconds = (start + tick * SCRAPE_SECONDS) * 1000
                    yield f"{name}{{{series}}} {value!r} {milliseconds}\n"


def _time(unix_seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_seconds))
