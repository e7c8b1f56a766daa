"""Remedies that fit some runs only: whether one does is asked of the run's own series."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import gradients, run

Labels = Mapping[str, str]
Lookup = Callable[[str], Iterable[Labels]]
"""From a metric's exposed name to the labels of the run's present series."""

_RUN_IDENTITY = ("cluster", "namespace", "job", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """That the run has a series of `metric`, whose `label` is `text`; absent: that it has none."""

    metric: Metric
    label: str = ""
    text: str = ""
    absent: bool = False

    def holds(self, lookup: Lookup) -> bool:
        """Return whether it is so of the run whose series `lookup` finds."""
        found = lookup(self.metric.prometheus_name)
        seen = any(not self.label or labels.get(self.label) == self.text for labels in found)
        return seen is not self.absent

    def template(self, text: str) -> str:
        """Return what Prometheus' templates make `text` of where it is so, and nothing else."""
        matchers = "".join(f",{label}=%q" for label in _RUN_IDENTITY)[1:]
        own = f',{self.label}=\\"{self.text}\\"' if self.label else ""
        arguments = " ".join(f"$labels.{label}" for label in _RUN_IDENTITY)
        query = f'printf "{self.metric.prometheus_name}{{{matchers}{own}}}" {arguments} | query'
        otherwise = "{{ else }}" if self.absent else ""
        return f"{{{{ with {query} }}}}{otherwise}{text}{{{{ end }}}}"


FP16 = Fact(metric=run.RUN_INFO, label="precision", text="fp16")
CLIPS = Fact(metric=gradients.CLIP_MAX_NORM)
CLIPS_NOT = Fact(metric=gradients.CLIP_MAX_NORM, absent=True)


class Remedy(str):
    """A remedy for runs of which `fact` is so; to who does not ask, it is the text."""

    fact: Fact

    __slots__ = ("fact",)

    def __new__(cls, text: str, fact: Fact) -> "Remedy":
        """Return the text with its fact."""
        made = super().__new__(cls, text)
        made.fact = fact
        return made


class GoBack(str):
    """A remedy that resumes from before the first bad step, which has to have a step before it."""

    __slots__ = ()


START_AGAIN = "Start again from the initial weights: no step was before it."


def remedy_template(remedies: Iterable[str]) -> str:
    """Return the remedies as one template of Prometheus; the last one is for every run."""
    *others, last = remedies
    return "".join([*map(_template, others), last])


def fitting(remedies: Iterable[str], lookup: Lookup, *, since_step: int = 0) -> list[str]:
    """Return those that fit the run whose series `lookup` finds.

    since_step: first bad step; where it is step 1, nothing is there to go back to.
    """
    return [
        START_AGAIN if isinstance(remedy, GoBack) and since_step == 1 else str(remedy)
        for remedy in remedies
        if not isinstance(remedy, Remedy) or remedy.fact.holds(lookup)
    ]


def facts_of(remedies: Iterable[str]) -> list[Fact]:
    """Return the facts that some of the remedies ask for."""
    return [remedy.fact for remedy in remedies if isinstance(remedy, Remedy)]


def _template(remedy: str) -> str:
    return remedy.fact.template(f"{remedy} ") if isinstance(remedy, Remedy) else f"{remedy} "
