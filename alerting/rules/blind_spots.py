"""What the numbers of a site would make the rules miss: refused where nothing is left to see."""

from collections.abc import Mapping

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.duration_text import prometheus_duration
from mp_agent.alerting.durations import DURATIONS, SCRAPE_GAP, Duration
from mp_agent.alerting.expressions.nodes import walk
from mp_agent.alerting.expressions.predicates import Gone, Silent, Unreachable
from mp_agent.alerting.expressions.signals import Count, Series
from mp_agent.alerting.values import Values
from mp_agent.errors import SettingError

SHORTEST_SECONDS = 1.0
"""No window is shorter: Prometheus itself scrapes no more often in earnest."""


def windows() -> Mapping[Duration, tuple[str, ...]]:
    """Return the durations over which samples are looked at, with the alerts that do."""
    found: dict[Duration, dict[str, None]] = {SCRAPE_GAP: {}}
    for condition in CONDITIONS:
        for node in (node for level in condition.levels for node in walk(level.when)):
            match node:
                case Count(window=window) | Series(over=(_, window)):
                    found.setdefault(window, {})[condition.name] = None
                case Gone(window=window) | Silent(window=window) | Unreachable(window=window):
                    found.setdefault(window, {})[condition.name] = None
    return {window: tuple(names) for window, names in found.items()}


def check_windows(values: Values) -> None:
    """Refuse values with which a window holds no two samples, however often is scraped."""
    for window in windows():
        seconds = values.seconds[window.name]
        if seconds < SHORTEST_SECONDS:
            scaled = "" if values.time_scale == 1 else f" with the time scale {values.time_scale:g}"
            raise SettingError(
                f"{window.name} is {seconds:g} s{scaled}: a window shorter than "
                f"{SHORTEST_SECONDS:g} s holds no two scrapes, and {_alerts(window)} would see "
                "nothing"
            )


def blind_spots(values: Values, scrape_seconds: float) -> list[str]:
    """Return, in whole sentences, what rules with these values miss at a scrape interval."""
    short = [window for window in windows() if values.seconds[window.name] < 2 * scrape_seconds]
    return [
        f"{window.name} is {prometheus_duration(values.seconds[window.name])}, less than two "
        f"scrapes of {prometheus_duration(scrape_seconds)}: {_consequence(window)}"
        for window in sorted(short, key=DURATIONS.index)
    ]


def _consequence(window: Duration) -> str:
    if window is SCRAPE_GAP:
        return "every alert loses its hold with each scrape that fails, and may never fire."
    return f"{_alerts(window)} may see one sample or none, and never fire."


def _alerts(window: Duration) -> str:
    return ", ".join(windows()[window]) or "every alert"
