"""Analyses for tests, given by their steps and names."""

from pathlib import Path

from mp_agent.flight.postmortem.analysis import Analysis, analyse
from mp_agent.flight.record.evidence import Evidence
from tests.agent.flight.builders import calm, history_of, layers, make_log, make_segment
from tests.agent.node.builders import merged_step
from tests.agent.records.samples import make_condition

EVIL = "</script><script>alert(1)</script>&\"'\u2028"


def analysis_of(
    *steps, tables=(), run="llama", name="weight", ranks=1, conditions=(), history=None
) -> Analysis:
    """Return what is said of steps. history: what is judged of them, where that is known."""
    table = layers(63, {name: {"sum_squares": 4.0, "elements": 9.0}, "b": {"nan_elements": 1.0}})
    logs = (
        make_log(rank, segments=(make_segment(),), run=run, host=name, world_size=ranks)
        for rank in range(ranks)
    )
    evidence = Evidence(
        source=Path(f"/records/{run}"),
        ranks=tuple(logs),
        read_unix_seconds=0.0,
        reasons=(run,),
        conditions=tuple(conditions),
        notes=(name,),
    )
    if history is None:
        history = history_of(steps, tables or (table,), evidence.values)
    return analyse(evidence, history)


def exploding(**names: str) -> Analysis:
    growing = [merged_step(61 + i, norm=50.0 * 2.0**i, loss=2.0 + i) for i in range(8)]
    run, name = names.get("run", "llama"), names.get("name", "weight")
    active = make_condition(run=run, description=name)
    return analysis_of(*calm(60), *growing, conditions=(active,), **names)
