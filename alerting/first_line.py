"""The first line of a critical alert: what happened, since when, and what to do now."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mp_agent.catalog.metrics import run

_WITHOUT_UPDATE = frozenset(("MpAgentRankNonFinite", "MpAgentActivationNonFinite"))


def causes_with_update(causes: Iterable[str]) -> list[str]:
    """Return the causes that changed the weights, whose steps are those to roll back to.

    The others say where a value was NaN or Inf first, not that an update had it.
    """
    return [name for name in causes if name not in _WITHOUT_UPDATE]


NAN_UPDATES = "MpAgentNonFiniteUpdate"
"""The condition whose start proves that the weights were updated with NaN or Inf."""
NAN_UPDATE_CAUSES = (
    "MpAgentRankNonFinite",
    "MpAgentGradientExplosion",
    "MpAgentLearningRateJump",
)
"""What it follows from."""

_SINCE = run.CONDITION_SINCE_STEP.prometheus_name
_RUN_IDENTITY = ("cluster", "namespace", "job", "run")
_ARGUMENTS = " ".join(f"$labels.{label}" for label in _RUN_IDENTITY)
_REMEMBERED = "<cause_window>"
"""A run that has ended takes its series along before its alert fires, and a cause may be over
before its effect."""
_INCIDENT = "<incident_window>"
"""Weights with NaN count for no longer: a run that was resumed from a checkpoint has others."""
_UNKNOWN = "it began"


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """What someone who is woken needs first. Phrases without a full stop.

    weights: whether they are damaged. now: the one thing to do. updated: both, once NaN or Inf was
    written into the weights, as the count of such updates shows; None if that changes nothing.
    `{since}` stands for the step at which the condition began, `{checkpoint}` for what to go back
    to: the last checkpoint before the first of its causes, or the initial weights where that is
    step 1. `{rank}` stands for the alert's rank. In `updated`, it is the first such update that
    counts, or what led to it.
    """

    weights: str
    now: str
    updated: "Triage | None" = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All phrases."""
        return self.weights, self.now, *(self.updated.texts if self.updated else ())


ROLL_BACK = "stop, and resume from {checkpoint}"
_BEFORE = "the last checkpoint before {}"
INITIAL_WEIGHTS = "the initial weights, since it began with step 1"
NAN_WRITTEN = "damaged, since NaN or Inf was written into them"
NO_NAN_COUNTED = "not known to be damaged, since no update with NaN or Inf was counted"
UPDATED = Triage(weights=NAN_WRITTEN, now=ROLL_BACK)


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
    began = since_step
    if triage.updated is not None and NAN_UPDATES in active:
        triage, began = triage.updated, active[NAN_UPDATES]
        causes = NAN_UPDATE_CAUSES
    harmful = causes_with_update(causes)
    known = [active[name] for name in harmful if 0 < active.get(name, 0) <= began]
    marks = {
        "{since}": _step(since_step),
        "{checkpoint}": _checkpoint(min([*known, began])),
        "{rank}": labels.get("rank", ""),
    }
    return _line(
        summary,
        f", since step {since_step}" if since_step else "",
        _filled(triage.weights, marks),
        _filled(triage.now, marks),
    )


def headline_template(condition: str, summary: str, triage: Triage, causes: Collection[str]) -> str:
    """Return the first line as a template of Prometheus."""
    variables = _variable("$since", _began(condition))
    if any("{checkpoint}" in text for text in (triage.weights, triage.now)):
        variables += _variable("$first", _first(condition, causes))
    weights, now = _template(triage.weights, "$first"), _template(triage.now, "$first")
    if triage.updated is not None:
        causes = NAN_UPDATE_CAUSES
        variables += _variable("$updated", _first(NAN_UPDATES, causes, _INCIDENT))
        weights = _if_updated(_template(triage.updated.weights, "$updated"), weights)
        now = _if_updated(_template(triage.updated.now, "$updated"), now)
    since = "{{ with $since }}, since step {{ . }}{{ end }}"
    return variables + _line(summary, since, weights, now)


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


def _checkpoint(step: int) -> str:
    return INITIAL_WEIGHTS if step == 1 else _BEFORE.format(_step(step))


def _filled(text: str, marks: Mapping[str, str]) -> str:
    for mark, meaning in marks.items():
        text = text.replace(mark, meaning)
    return text


def _template(text: str, first: str) -> str:
    marks = {
        "{since}": _or_unknown("$since"),
        "{checkpoint}": (
            f'{{{{ if eq {first} "1" }}}}{INITIAL_WEIGHTS}{{{{ else }}}}'
            f"{_BEFORE.format(_or_unknown(first))}{{{{ end }}}}"
        ),
        "{rank}": "{{ $labels.rank }}",
    }
    return _filled(text, marks)


def _if_updated(text: str, otherwise: str) -> str:
    if text == otherwise:
        return text
    return f"{{{{ if $updated }}}}{text}{{{{ else }}}}{otherwise}{{{{ end }}}}"


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


def _began(condition: str, remembered: str = _REMEMBERED) -> str:
    series = _series(condition)
    return f"min({series}) or min(last_over_time({series}[{remembered}]))"


def _earlier(condition: str, causes: Collection[str], remembered: str = _REMEMBERED) -> str:
    causes_began = f"min by (condition) (last_over_time({_series(*causes)}[{_REMEMBERED}]))"
    return f"{causes_began} <= scalar({_began(condition, remembered)})"


def _first(condition: str, causes: Collection[str], remembered: str = _REMEMBERED) -> str:
    harmful, began = causes_with_update(causes), _began(condition, remembered)
    return f"min({_earlier(condition, harmful, remembered)}) or {began}" if harmful else began
