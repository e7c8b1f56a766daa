"""Runs for tests, given by what matters in them."""

from collections.abc import Callable, Mapping

from mp_agent.runs.divergence import RunSeries, RunStep


def run_of(
    count: int = 100,
    *,
    name: str = "a",
    loss: Callable[[int], float | None] = lambda step: 2.0 + 0.01 * (step % 3),
    norm: Callable[[int], float | None] = lambda step: 1.0 + 0.05 * (step % 5),
    marks: Mapping[int, str] | None = None,
    first: int = 1,
    layers: Mapping[int, Mapping[str, float]] | None = None,
    **facts: str,
) -> RunSeries:
    """Return a run of `count` steps."""
    steps = {}
    for step in range(first, first + count):
        values = {"loss": loss(step), "grad_norm": norm(step), "learning_rate": 1e-3}
        known = {key: value for key, value in values.items() if value is not None}
        held = (marks or {}).get(step)
        steps[step] = RunStep(known, frozenset([held] if held else []))
    return RunSeries(
        name=name, source=f"/runs/{name}", steps=steps, layers=layers or {}, facts=facts
    )
