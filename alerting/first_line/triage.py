"""The first line of a critical alert: what happened, since when, the weights, what to do now."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mp_agent.alerting.expressions import metrics

NAN_UPDATES = "MpAgentNonFiniteUpdate"
"""The condition whose start proves that the weights were updated with NaN or Inf."""

_SINCE = metrics.CONDITION_SINCE_STEP.prometheus_name
_RUN_IDENTITY = ("cluster", "namespace", "job", "run")
_ARGUMENTS = " ".join(f"$labels.{label}" for label in _RUN_IDENTITY)
_REMEMBERED = "<cause_window>"
"""A run that has ended takes its series along before its alert fires, and a cause may be over
before its effect."""
_UNKNOWN = "it began"


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What someone who is woken needs first. Phrases without a full stop.

    weights: whether they are damaged. weights_updated: the same, where NaN or Inf has reached them
    for certain. now: the one thing to do.
    `{since}` stands for the step at which the condition began, `{first}` for that at which the
    first of its causes did, and `{rank}` for the alert's rank.
    """

    weights: str
    now: str
    weights_updated: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """All phrases."""
        return tuple(filter(None, (self.weights, self.now, self.weights_updated)))


ROLL_BACK = "stop, and resume from the last checkpoint before {first}"


def headline(
    summary: str,
    triage: Triage,
    *,
    since_step: int,
    labels: Mapping[str, str],
    causes: Collection[str],
    active: Mapping[str, int],
) -> str:
    """Return the first line of an alert.

    since_step: 0 if it is not known. causes: conditions that this one can follow from.
    active: the run's active conditions, with the steps at which they began.
    """
    updated = bool(triage.weights_updated) and NAN_UPDATES in active
    known = [step for name, step in active.items() if name in causes and 0 < step <= since_step]
    marks = {
        "{since}": _step(since_step),
        "{first}": _step(min([*known, since_step])),
        "{rank}": labels.get("rank", ""),
    }
    return _line(
        summary,
        f", since step {since_step}" if since_step else "",
        _filled(triage.weights_updated if updated else triage.weights, marks),
        _filled(triage.now, marks),
    )


def headline_template(condition: str, summary: str, triage: Triage, causes: Collection[str]) -> str:
    """Return the first line as a template of Prometheus."""
    marks = {
        "{since}": _or_unknown("$since"),
        "{first}": _or_unknown("$first"),
        "{rank}": "{{ $labels.rank }}",
    }
    weights = _filled(triage.weights, marks)
    if triage.weights_updated:
        damaged = _filled(triage.weights_updated, marks)
        updated = f'printf "{_series(NAN_UPDATES)}" {_ARGUMENTS} | query'
        weights = f"{{{{ if {updated} }}}}{damaged}{{{{ else }}}}{weights}{{{{ end }}}}"
    since = "{{ with $since }}, since step {{ . }}{{ end }}"
    variables = _variable("$since", _began(condition))
    if any("{first}" in text for text in triage.texts):
        variables += _variable("$first", _first(condition, causes))
    return variables + _line(summary, since, weights, _filled(triage.now, marks))


def since_step_template(condition: str) -> str:
    """Return a template of Prometheus: the step at which a condition began, or nothing.

    It is the node agent's detectors that know it, since they see every step.
    """
    return f"{_variable('$since', _began(condition))}{{{{ $since }}}}"


def causes_template(condition: str, causes: Collection[str]) -> str:
    """Return a template: those of the causes that the run had within the last hour, with steps.

    Only those that began no later than the condition.
    """
    return (
        f'{{{{ range $i, $cause := printf "{_earlier(condition, causes)}" {_ARGUMENTS} | query '
        '| sortByLabel "condition" }}{{ if $i }}, {{ end }}{{ $cause | label "condition" }} '
        'since step {{ $cause | value | printf "%.0f" }}{{ end }}'
    )


def _line(summary: str, since: str, weights: str, now: str) -> str:
    return f"{summary.removesuffix('.')}{since}. Weights: {weights}. Now: {now}."


def _step(step: int) -> str:
    return f"step {step}" if step else _UNKNOWN


def _filled(text: str, marks: Mapping[str, str]) -> str:
    for mark, meaning in marks.items():
        text = text.replace(mark, meaning)
    return text


def _or_unknown(variable: str) -> str:
    return f"{{{{ with {variable} }}}}step {{{{ . }}}}{{{{ else }}}}{_UNKNOWN}{{{{ end }}}}"


def _variable(name: str, query: str) -> str:
    """Return a template that writes nothing and sets a variable to a step, or to nothing."""
    return (
        f'{{{{ {name} := "" }}}}{{{{ with printf "{query}" {_ARGUMENTS} | query }}}}'
        f'{{{{ {name} = . | first | value | printf "%.0f" }}}}{{{{ end }}}}'
    )


def _series(*conditions: str) -> str:
    """Return a selector in a Go string, for printf with the labels of the run."""
    matchers = ",".join(f"{label}=%[{place}]q" for place, label in enumerate(_RUN_IDENTITY, 1))
    operator = "=" if len(conditions) == 1 else "=~"
    return f'{_SINCE}{{condition{operator}\\"{"|".join(conditions)}\\",{matchers}}}'


def _began(condition: str) -> str:
    series = _series(condition)
    return f"min({series}) or min(last_over_time({series}[{_REMEMBERED}]))"


def _earlier(condition: str, causes: Collection[str]) -> str:
    causes_began = f"min by (condition) (last_over_time({_series(*causes)}[{_REMEMBERED}]))"
    return f"{causes_began} <= scalar({_began(condition)})"


def _first(condition: str, causes: Collection[str]) -> str:
    if not causes:
        return _began(condition)
    return f"min({_earlier(condition, causes)}) or {_began(condition)}"
