"""PromQL of the panels. Metrics are named as in the catalog, or importing this fails."""

from mp_agent.alerting.rules import RANK_RECORDS
from mp_agent.catalog.metric import Kind
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME

RUN = ("cluster", "namespace", "job", "run")
"""What a run is known by; every panel aggregates to it, since a metric's targets may change."""

SELECTED = ",".join(f'{label}=~"${label}"' for label in RUN)
"""Matchers of what the dashboard's variables select."""


FIRST_OPTIMIZER = 'optimizer=""'
"""Matcher of the optimizer that sets the step count; others carry a number."""


def series(name: str, matchers: str = "") -> str:
    """Return a selector of one metric for the runs that are selected.

    A name that is not in the catalog raises KeyError; histograms go by their parts' names.
    """
    base = name
    for suffix in ("_bucket", "_sum", "_count"):
        stem = name.removesuffix(suffix)
        if stem != name and stem in BY_PROMETHEUS_NAME:
            base = stem
            if BY_PROMETHEUS_NAME[stem].kind is not Kind.HISTOGRAM:
                raise KeyError(name)
    BY_PROMETHEUS_NAME[base]
    return f"{name}{{{','.join(filter(None, (SELECTED, matchers)))}}}"


def recorded(name: str) -> str:
    """Return a selector of what a rule records of the ranks. An unknown name: KeyError."""
    if name not in RANK_RECORDS:
        raise KeyError(name)
    return f"{name}{{{SELECTED}}}"


def by_run(
    name: str, aggregate: str = "max", *, keep: tuple[str, ...] = (), where: str = ""
) -> str:
    """Return a metric's present value, one per run (and per `keep`)."""
    return aggregated(series(name, where), aggregate, keep=keep)


def nonfinite_since(quantity: str) -> str:
    """Return since which step loss or gradients are NaN or Inf, of the runs where they are."""
    return by_run("mp_agent_nonfinite_since_step", "min", where=f'quantity="{quantity}"')


def while_finite(expression: str, quantity: str) -> str:
    """Return an expression where loss or gradients are finite: gauges keep their last value."""
    return f"({expression}) unless on ({', '.join(RUN)}) {nonfinite_since(quantity)}"


def last_finite(expression: str, quantity: str) -> str:
    """Return the rest of the same: the last value of runs whose present one is NaN or Inf."""
    return f"({expression}) and on ({', '.join(RUN)}) {nonfinite_since(quantity)}"


def of_other_run(expression: str) -> str:
    """Return an expression for the run that a board compares the selected one with."""
    return expression.replace('run=~"$run"', 'run=~"$other_run"')


def rate(name: str, *, keep: tuple[str, ...] = (), where: str = "") -> str:
    """Return how often per second a counter grew, one per run (and per `keep`)."""
    return aggregated(f"rate({series(name, where)}[$__rate_interval])", "sum", keep=keep)


def increase(name: str, *, keep: tuple[str, ...] = (), where: str = "") -> str:
    """Return by how much a counter grew between two points of the graph."""
    return aggregated(f"increase({series(name, where)}[$__rate_interval])", "sum", keep=keep)


def aggregated(expression: str, aggregate: str, *, keep: tuple[str, ...] = ()) -> str:
    """Return an expression aggregated to one series per run (and per `keep`)."""
    return f"{aggregate} by ({', '.join((*RUN, *keep))}) ({expression})"


def share_of_steps(name: str) -> str:
    """Return a counter of steps per attempted step, one per run; nothing while none is made."""
    return f"{rate(name)} / ({rate('mp_agent_steps_total')} > 0)"


def quantile(name: str, level: float) -> str:
    """Return a quantile of a histogram's observations between two points, one per run."""
    buckets = aggregated(f"rate({series(f'{name}_bucket')}[$__rate_interval])", "sum", keep=("le",))
    return f"histogram_quantile({level}, {buckets})"


def worst(name: str, count: int, *, keep: tuple[str, ...], where: str = "") -> str:
    """Return the series with the `count` largest values at this moment."""
    return f"topk({count}, {by_run(name, keep=keep, where=where)})"


def worst_over_range(name: str, count: int, *, keep: tuple[str, ...], where: str = "") -> str:
    """Return the `count` series with the largest values anywhere in the time range.

    The same ones at every point: the largest of each moment can be another each time, which with
    thousands of ranks makes hundreds of series.
    """
    return worst_of(series(name, where), count, keep=keep)


def worst_of(selector: str, count: int, *, keep: tuple[str, ...]) -> str:
    """Return the same of the series that a selector finds."""
    peaks = aggregated(f"max_over_time({selector}[$__range] @ end())", "max", keep=keep)
    found = aggregated(chosen(selector, f"topk({count}, {peaks})", keep=keep), "max", keep=keep)
    return f"topk({count}, {found})"


def chosen(expression: str, choice: str, *, keep: tuple[str, ...]) -> str:
    """Return the series of an expression whose run (and `keep`) is one of a choice.

    It is cheap where it stands inside: what is done with a series is then done with few.
    """
    return f"{expression} and on ({', '.join((*RUN, *keep))}) {choice}"
