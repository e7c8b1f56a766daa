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
        meaning="how long a series keeps its last value when scrapes fail: two scrapes of a minute",
        below="loss_scale_collapse_hold",
    ),
    Duration(
        name="birth_window",
        seconds=_HOUR,
        meaning="how far back an incident that names a rank is looked for before it is news",
    ),
    Duration(
        name="alive_window",
        seconds=2 * _MINUTE,
        meaning="a run without a step for this long is not judged on its falling loss scale",
    ),
    Duration(
        name="restart_window",
        seconds=30 * _MINUTE,
        meaning="how long a resumed run's scaler may search for its scale anew",
    ),
    Duration(
        name="loss_scale_window",
        seconds=10 * _MINUTE,
        meaning="over which the loss scale's changes are counted",
        below="loss_scale_fall_window",
    ),
    Duration(
        name="loss_scale_fall_window",
        seconds=12 * _HOUR,
        meaning="over which the loss scale may fall slowly",
    ),
    Duration(
        name="loss_scale_keep",
        seconds=10 * _MINUTE,
        meaning="how long a loss scale alert outlasts its condition",
    ),
    Duration(
        name="loss_scale_collapse_hold",
        seconds=4 * _MINUTE,
        meaning="how long a collapsed loss scale must last: more than what is left of an attempt",
    ),
    Duration(
        name="loss_scale_reduced_hold",
        seconds=15 * _MINUTE,
        meaning="how long a loss scale below loss_scale_reduced must last",
    ),
    Duration(
        name="loss_scale_very_low_hold",
        seconds=10 * _MINUTE,
        meaning="how long a loss scale below loss_scale_very_low must last",
    ),
    Duration(
        name="floor_window",
        seconds=5 * _MINUTE,
        meaning="over which skips at the loss scale's floor are counted",
    ),
    Duration(
        name="overflow_window",
        seconds=15 * _MINUTE,
        meaning="over which the share of skipped steps is taken",
        below="overflow_long_window",
    ),
    Duration(
        name="overflow_long_window",
        seconds=2 * _HOUR,
        meaning="over which the share of skipped steps is taken where steps are slow",
    ),
    Duration(
        name="explosion_window",
        seconds=5 * _MINUTE,
        meaning="how long a step with an exploding gradient stays news",
    ),
    Duration(
        name="explosion_hold",
        seconds=15.0,
        meaning="makes a gradient norm that is merely high hold for two evaluations",
    ),
    Duration(
        name="vanishing_low_hold",
        seconds=30 * _MINUTE,
        meaning="how long a norm below grad_norm_low must last",
    ),
    Duration(
        name="vanishing_very_low_hold",
        seconds=10 * _MINUTE,
        meaning="how long a norm below grad_norm_very_low must last",
    ),
    Duration(
        name="vanishing_hold",
        seconds=2 * _MINUTE,
        meaning="how long a norm below grad_norm_vanished must last",
    ),
    Duration(
        name="underflow_hold",
        seconds=5 * _MINUTE,
        meaning="how long too many layers must underflow: some looks at them",
    ),
    Duration(
        name="layer_keep",
        seconds=10 * _MINUTE,
        meaning="how long an alert on layers outlasts the look that ended it",
    ),
    Duration(
        name="loss_trend_window",
        seconds=5 * _MINUTE,
        meaning="whose mean loss is compared with that of the same time before",
    ),
    Duration(
        name="untrained_hold",
        seconds=15 * _MINUTE,
        meaning="how long steps must seem to teach nothing, unless that is certain",
    ),
    Duration(
        name="loss_spike_window",
        seconds=5 * _MINUTE,
        meaning="how long a spike of the loss stays news",
    ),
    Duration(
        name="diverging_keep",
        seconds=10 * _MINUTE,
        meaning="how long a rising loss outlasts its fall below the limit",
    ),
    Duration(
        name="incident_window",
        seconds=10 * _MINUTE,
        meaning="how long a non-finite loss or update stays news",
    ),
    Duration(
        name="stall_window",
        seconds=10 * _MINUTE,
        meaning="without a step: a stall",
        below="long_stall_window",
    ),
    Duration(
        name="long_stall_window",
        seconds=30 * _MINUTE,
        meaning="without a step: a stall that waits for nobody",
        below="elsewhere_limit",
    ),
    Duration(
        name="first_step_window",
        seconds=45 * _MINUTE,
        meaning="without a first step: a stall, since nothing is known yet of how long one takes",
        below="starting_limit",
    ),
    Duration(
        name="pause_limit",
        seconds=2 * _HOUR,
        meaning="without a step: a stall although the run has come back from pauses before",
    ),
    Duration(
        name="starting_limit",
        seconds=_HOUR,
        meaning="before training begins: a start that hangs",
    ),
    Duration(
        name="known_phase_limit",
        seconds=_HOUR,
        meaning="in a phase outside training, and phase_growth times its longest so far: one that "
        "hangs",
        below="elsewhere_limit",
    ),
    Duration(
        name="elsewhere_limit",
        seconds=3 * _HOUR,
        meaning="in evaluation, a checkpoint or a phase of the user's own: one that hangs",
    ),
    Duration(
        name="rank_stall_window",
        seconds=5 * _MINUTE,
        meaning="without a step: ranks that lag are named",
    ),
    Duration(
        name="straggler_hold",
        seconds=5 * _MINUTE,
        meaning="how long the same run must have a straggler",
    ),
    Duration(
        name="coverage_hold",
        seconds=5 * _MINUTE,
        meaning="how long merges must lack a rank",
    ),
    Duration(
        name="rank_keep",
        seconds=5 * _MINUTE,
        meaning="how long an alert on ranks outlasts its condition",
    ),
    Duration(
        name="telemetry_window",
        seconds=10 * _MINUTE,
        meaning="how long an error or a loss of the telemetry stays news",
    ),
    Duration(
        name="silent_window",
        seconds=30 * _MINUTE,
        meaning="how long a target may be without series, as while a job starts",
    ),
    Duration(
        name="end_window",
        seconds=5 * _MINUTE,
        meaning="how long a run's end stays news after its series are gone",
        below="failed_window",
    ),
    Duration(
        name="failed_window",
        seconds=4 * _HOUR,
        meaning="how long a failed run is reported that nobody brings back",
    ),
    Duration(
        name="restarts_window",
        seconds=_HOUR,
        meaning="over which a run's attempts are counted",
    ),
    Duration(
        name="unreachable_window",
        seconds=10 * _MINUTE,
        meaning="how long the target of an active run must fail before the run is missed",
    ),
    Duration(
        name="restart_hold",
        seconds=2 * _MINUTE,
        meaning="time for a launcher to bring a failed run back before it counts as failed",
    ),
    Duration(
        name="vanished_window",
        seconds=30 * _MINUTE,
        meaning="how long a run whose series ended is still looked for",
    ),
    Duration(
        name="vanished_hold",
        seconds=2 * _MINUTE,
        meaning="how long a run's series must be gone",
    ),
)

BY_NAME = {duration.name: duration for duration in DURATIONS}

_UNIT_MILLISECONDS = (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_PARTS = re.compile(rf"(?:{_PART.pattern})+")


SCRAPE_GAP = BY_NAME["scrape_gap"]
"""For so long a series that is not scraped stands at its last value, in every condition."""


def duration(name: str) -> Duration:
    """Return the duration called `name`; CatalogError when there is none."""
    if name not in BY_NAME:
        raise CatalogError(f"{name!r} names no duration")
    return BY_NAME[name]


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
