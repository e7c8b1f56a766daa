"""The pages of the planted faults as files, and how they are made."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.alerting.pages.delivery import deliver
from tests.alerting.pages.faults import incidents

GOLDEN = Path(__file__).parent / "golden"


def pages(
    names: Sequence[str], promtool: Path, alertmanager: Path, directory: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield by fault what people get at the first critical alert, and ten minutes later."""
    found = incidents(names, promtool, directory)
    at_once = deliver({i.name: i.at_once for i in found}, alertmanager, directory / "at-once")
    later = {i.name: i.gathered for i in found if _pages(i.gathered)}
    gathered = deliver(later, alertmanager, directory / "gathered")
    for incident in found:
        page = {"what": incident.what, "at_once": at_once[incident.name]}
        if after := gathered.get(incident.name):
            page["ten_minutes_later"] = {k: v for k, v in after.items() if k != "webhook"}
        yield incident.name, page


def _pages(alerts: Sequence[Any]) -> bool:
    return any(alert.labels["severity"] == "critical" for alert in alerts)


def text(page: dict[str, Any]) -> str:
    """Return a page as the text of its file."""
    return json.dumps(page, indent=2, ensure_ascii=False) + "\n"
