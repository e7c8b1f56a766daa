"""Every stretch of time that a condition looks over or waits for, declared once.

Thresholds say how much, durations how long: ranges of PromQL, `for` and `keep_firing_for`.
"""

import re
from dataclasses import dataclass

from mp_agent.errors import CatalogError, SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """A default stretch of time with its meaning.

    below: the duration that this one must be shorter than, such as the one of a worse severity.
    """

    name: str
    seconds: float
    meaning: str
    below: str = ""


_MINUTE, _HOUR = 60.0, 3600.0

DURATIONS = (
    Duration(
        name="scrape_gap",
        seconds=3 * _MINUTE,
        meaning="how long a series keeps its last value when scrapes fail: two scrapes at one "
        "minute",
    ),
    Duration(
        name="birth_window",
        seconds=_HOUR,
        meaning="lookback within which an incident that names a rank is not new",
    ),
    Duration(
        name="cause_window",
        seconds=_HOUR,
        meaning="lookback within which a page names the causes of an alert and its first step",
    ),
    Duration(
        name="loss_scale_window",
        seconds=10 * _MINUTE,
        meaning="how long repeated decreases of the loss scale are reported",
    ),
    Duration(
        name="loss_scale_keep",
        seconds=10 * _MINUTE,
        meaning="how long a loss scale alert continues after its condition",
    ),
    Duration(
        name="floor_window",
        seconds=5 * _MINUTE,
        meaning="window in which skips at the loss scale's floor are counted",
    ),
    Duration(
        name="overflow_window",
        seconds=15 * _MINUTE,
        meaning="how long it is reported that too many steps were skipped",
    ),
    Duration(
        name="explosion_window",
        seconds=5 * _MINUTE,
        meaning="how long a step with an exploding gradient is reported",
    ),
    Duration(
        name="layer_keep",
        seconds=10 * _MINUTE,
        meaning="how long an alert on layers continues after the sample that ended it",
    ),
    Duration(
        name="vanishing_keep",
        seconds=10 * _MINUTE,
        meaning="how long an alert on small gradients continues while the loss seems to fall",
    ),
    Duration(
        name="loss_spike_window",
        seconds=5 * _MINUTE,
        meaning="how long a loss spike is reported",
    ),
    Duration(
        name="diverging_keep",
        seconds=10 * _MINUTE,
        meaning="how long the alerts on a loss that rises, or is lost, and on a norm that grows "
        "continue below the limit",
    ),
    Duration(
        name="incident_window",
        seconds=10 * _MINUTE,
        meaning="how long a non-finite loss or update is reported",
    ),
    Duration(
        name="stall_window",
        seconds=10 * _MINUTE,
        meaning="time without a step that is a stall",
        below="long_stall_window",
    ),
    Duration(
        name="long_stall_window",
        seconds=30 * _MINUTE,
        meaning="time without a step that is a long stall",
        below="elsewhere_limit",
    ),
    Duration(
        name="between_steps_window",
        seconds=45 * _MINUTE,
        meaning="time without a step, before the backward of the next one, that is a stall: it may "
        "be a first evaluation or rollout that nothing marks",
        below="elsewhere_limit",
    ),
    Duration(
        name="first_step_window",
        seconds=45 * _MINUTE,
        meaning="time without a first step that is a stall, because the usual step time is unknown",
        below="starting_limit",
    ),
    Duration(
        name="pause_limit",
        seconds=2 * _HOUR,
        meaning="time without a step that is a stall even if the run has recovered from pauses "
        "before",
    ),
    Duration(
        name="starting_limit",
        seconds=_HOUR,
        meaning="time before training starts that is a hang",
    ),
    Duration(
        name="known_phase_limit",
        seconds=_HOUR,
        meaning="time in a phase outside training, if also phase_growth times its longest so "
        "far, that is a hang",
        below="elsewhere_limit",
    ),
    Duration(
        name="elsewhere_limit",
        seconds=3 * _HOUR,
        meaning="time in evaluation, a checkpoint or a user-defined phase that is a hang",
    ),
    Duration(
        name="rank_stall_window",
        seconds=5 * _MINUTE,
        meaning="time without a step after which lagging ranks are named",
    ),
    Duration(
        name="straggler_hold",
        seconds=5 * _MINUTE,
        meaning="how long a run must have a straggler",
    ),
    Duration(
        name="coverage_hold",
        seconds=5 * _MINUTE,
        meaning="how long a rank must be missing from merged steps",
    ),
    Duration(
        name="rank_keep",
        seconds=5 * _MINUTE,
        meaning="how long an alert on ranks continues after its condition",
    ),
    Duration(
        name="telemetry_window",
        seconds=10 * _MINUTE,
        meaning="how long a telemetry error or loss is reported",
    ),
    Duration(
        name="silent_window",
        seconds=30 * _MINUTE,
        meaning="how long a target may be without series, for example while a job starts",
    ),
    Duration(
        name="end_window",
        seconds=5 * _MINUTE,
        meaning="how long a run's end is reported after its series have ended",
        below="failed_window",
    ),
    Duration(
        name="failed_window",
        seconds=4 * _HOUR,
        meaning="how long a failed run is reported without a restart",
    ),
    Duration(
        name="restarts_window",
        seconds=_HOUR,
        meaning="window in which a run's attempts are counted",
    ),
    Duration(
        name="unreachable_window",
        seconds=10 * _MINUTE,
        meaning="how long the target of an active run must fail before the run counts as vanished",
    ),
    Duration(
        name="restart_hold",
        seconds=2 * _MINUTE,
        meaning="time for a launcher to restart a failed run before it counts as failed",
    ),
    Duration(
        name="vanished_window",
        seconds=30 * _MINUTE,
        meaning="lookback for a run whose series ended",
    ),
    Duration(
        name="vanished_hold",
        seconds=2 * _MINUTE,
        meaning="how long a run's series must be absent",
    ),
    Duration(
        name="logprob_window",
        seconds=_HOUR,
        meaning="window in which steps are counted on which trainer and sampler differ",
    ),
)

BY_NAME = {duration.name: duration for duration in DURATIONS}

SCRAPE_GAP = BY_NAME["scrape_gap"]
"""For so long a series that is not scraped stands at its last value, in every condition."""


def duration(name: str) -> Duration:
    """Return the duration called `name`; CatalogError when there is none."""
    if name not in BY_NAME:
        raise CatalogError(f"{name!r} names no duration")
    return BY_NAME[name]


_UNIT_MILLISECONDS = (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_PARTS = re.compile(rf"(?:{_PART.pattern})+")


def prometheus_duration(seconds: float) -> str:
    """Return seconds as Prometheus writes them, to the millisecond: `1h30m`, `10s`, `250ms`."""
    rest = max(1, round(seconds * 1000))
    words = []
    for unit, milliseconds in _UNIT_MILLISECONDS:
        count, rest = divmod(rest, milliseconds)
        if count:
            words.append(f"{count}{unit}")
    return "".join(words)


def parse_seconds(name: str, text: str) -> float:
    """Return the seconds in `90`, `1m30s` or `250ms`; anything else is refused, naming `name`."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _PARTS.fullmatch(text):
        raise SettingError(f"{name} has value {text!r}; give seconds, or 10m, 1m30s, 250ms")
    milliseconds = dict(_UNIT_MILLISECONDS)
    return sum(float(number) * milliseconds[unit] / 1000 for number, unit in _PART.findall(text))
