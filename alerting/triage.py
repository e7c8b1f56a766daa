"""The first line of a critical alert: what happened, since when, the weights, what to do now."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mp_agent.alerting import metrics

NAN_UPDATES = "MpAgentNonFiniteUpdate"
"""The condition whose start proves that the weights were updated with NaN or Inf."""

_SINCE = metrics.CONDITION_SINCE_STEP.prometheus_name
_RUN_IDENTITY = ("cluster", "namespace", "job", "run")
_MATCHERS = ",".join(f"{label}=%q" for label in _RUN_IDENTITY)
_ARGUMENTS = " ".join(f"$labels.{label}" for label in _RUN_IDENTITY)
_REMEMBERED = "1h"
"""A run that has ended takes the series along before its alert fires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What someone who is woken needs first. Phrases without a full stop.

    weights: whether they are damaged. weights_updated: the same, where NaN or Inf has reached them
    for certain. now: the one thing to do.
    `{since}` stands for the step at which it began, and `{rank}` for the alert's rank.
    """

    weights: str
    now: str
    weights_updated: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All phrases."""
        return tuple(filter(None, (self.weights, self.now, self.weights_updated)))


ROLL_BACK = "stop, and resume from the last checkpoint before {since}"


def since_step_template(condition: str) -> str:
    """Return a template of Prometheus: the step at which a condition began, or nothing.

    It is the node agent's detectors that know it, since they see every step.
    """
    return f"{_since_variable(condition)}{{{{ $since }}}}"


def headline_template(condition: str, summary: str, triage: Triage) -> str:
    """Return the first line as a template of Prometheus."""
    known = "{{ with $since }}step {{ . }}{{ else }}it began{{ end }}"
    weights = _template(triage.weights, known)
    if triage.weights_updated:
        updated = f'printf "{_SINCE}{{condition=\\"{NAN_UPDATES}\\",{_MATCHERS}}}" {_ARGUMENTS}'
        damaged = _template(triage.weights_updated, known)
        weights = f"{{{{ if {updated} | query }}}}{damaged}{{{{ else }}}}{weights}{{{{ end }}}}"
    since = "{{ with $since }}, since step {{ . }}{{ end }}"
    now = _template(triage.now, known)
    return _since_variable(condition) + _line(summary, since, weights, now)


def headline(
    summary: str,
    triage: Triage,
    *,
    since_step: int,
    labels: Mapping[str, str],
    active: Collection[str],
) -> str:
    """Return the first line of an alert.

    since_step: 0 if it is not known. active: names of the run's active conditions.
    """
    updated = bool(triage.weights_updated) and NAN_UPDATES in active
    weights = triage.weights_updated if updated else triage.weights
    known = f"step {since_step}" if since_step else "it began"
    weights, now = (
        text.replace("{since}", known).replace("{rank}", labels.get("rank", ""))
        for text in (weights, triage.now)
    )
    return _line(summary, f", since step {since_step}" if since_step else "", weights, now)


def _line(summary: str, since: str, weights: str, now: str) -> str:
    return f"{summary.removesuffix('.')}{since}. Weights: {weights}. Now: {now}."


def _template(text: str, since: str) -> str:
    return text.replace("{since}", since).replace("{rank}", "{{ $labels.rank }}")


def _since_variable(condition: str) -> str:
    """Return a template that writes nothing and sets $since to a step, or to nothing."""
    matchers = ",".join(f"{label}=%[{place}]q" for place, label in enumerate(_RUN_IDENTITY, 1))
    series = f'{_SINCE}{{condition=\\"{condition}\\",{matchers}}}'
    query = (
        f'printf "min({series}) or min(last_over_time({series}[{_REMEMBERED}]))" '
        f"{_ARGUMENTS} | query"
    )
    return (
        '{{ $since := "" }}'
        f'{{{{ with {query} }}}}{{{{ $since = . | first | value | printf "%.0f" }}}}{{{{ end }}}}'
    )
