"""Builds the immutable views of a run that the catalog reads, from the run's state."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.latest import UNSEEN_LOSS
from mp_agent.node.accounting.learning import NEVER_STEPS
from mp_agent.node.accounting.ranks import laggards, stalled
from mp_agent.node.cluster.member import ClusterMember
from mp_agent.node.collect.attempt import LocalAttempt
from mp_agent.node.collect.rank_source import RankSource
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.merge.node_steps import observed_columns
from mp_agent.node.run.launches import FEATURE as NAME_CONFLICT_FEATURE
from mp_agent.node.run.ledger import ProbeTotals
from mp_agent.node.run.state import RunState
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.columns import TENSORS
from mp_agent.records.health import LatestValues, LoopMistakes
from mp_agent.records.steps import OTHER_GRADIENTS, UNUSED_GRADIENTS_AT_MOST, EndReason
from mp_agent.records.tensor_collections import FACT as COLLECTIONS_FACT
from mp_agent.records.tensor_collections import TensorCollection, decode_collections
from mp_agent.records.views import (
    AgentView,
    ExportAccount,
    LayerView,
    RankView,
    RunView,
    TrackerLink,
    TransportView,
)
from mp_agent.version import __version__

SCRIPT_FACT = "script"
"""Path of the main script."""
_INTERNAL = frozenset((SCRIPT_FACT, COLLECTIONS_FACT))
"""Facts that are a matter between the ranks and this node, and never exported."""
BASELINE_FEATURE = "a comparison with the baseline: its file cannot be used"
_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCounts:
    """What the services of the node agent know of a run."""

    scrape_duration_seconds: float | None = None
    transport: TransportView = field(default_factory=TransportView)
    exports: tuple[ExportAccount, ...] = ()
    trackers: tuple[TrackerLink, ...] = ()
    flight_records: int = 0
    flight_errors: int = 0


def run_export(
    state: RunState,
    totals: ProbeTotals,
    *,
    now_seconds: float,
    time_unix_seconds: float,
    services: ServiceCounts,
    superseded: bool,
) -> RunExport:
    """Return all views of a run that was seen; totals: of its probes and of the node agent.

    superseded: another root exports the run; its own scope and the layers' are left out.
    """
    account, attempt, member = state.account, state.attempt, state.member
    view, exported = None, member.is_root and not superseded
    if exported:
        standing_seconds = state.standing_seconds(now_seconds)
        view = run_view(member, account, state.conditions, standing_seconds, time_unix_seconds)
        view = replace(
            view,
            loop=_without_steps(view, attempt),
            latest=_without_unknown_loss(view, state),
            thresholds=state.thresholds,
            attempts=state.attempts,
            script=state.script_findings,
            trackers=services.trackers,
            pages_url=member.url,
            standing_seconds=standing_seconds,
            longest_pause_seconds=state.standstill.longest_pause_seconds(now_seconds),
            longest_phase_seconds=state.standstill.longest_phase_seconds(now_seconds),
        )
    return RunExport(
        run=attempt.identity.run,
        node_rank=attempt.identity.node_rank,
        view=view,
        layers=tuple(_layers(account)) if exported else (),
        ranks=[
            rank_view(source, loss_misread=account.progress.misreadings.scaled)
            for _, source in sorted(attempt.sources.items())
        ],
        faded_ranks=state.departed_ranks.expired(now_seconds),
        named_ranks=state.conditions.named_ranks,
        agent=agent_view(
            attempt,
            totals,
            counting_seconds=_age_seconds(state.begun_unix_ns, time_unix_seconds),
            features=_own_features(state),
            services=services,
        ),
        counters=account.counters,
        layer_budget=state.layer_budget,
    )


def _without_steps(view: RunView, attempt: LocalAttempt) -> LoopMistakes:
    """Return the mistakes of a loop; of one without a step only the ranks' state shows any."""
    if not any(source.state.never_steps for source in attempt.sources.values()):
        return view.loop
    steps = {**view.loop.steps, NEVER_STEPS: UNUSED_GRADIENTS_AT_MOST}
    return replace(view.loop, steps=steps)


def _without_unknown_loss(view: RunView, state: RunState) -> LatestValues:
    """Return the last values; no earlier loss where the last step has none that is known."""
    last, sources = state.account.progress.last, state.attempt.sources.values()
    unknown = any(OTHER_GRADIENTS in each.state.unsupported for each in sources)
    if not unknown or last is None or last.get("loss") is not None:
        return view.latest
    return replace(view.latest, loss=None)


def _own_features(state: RunState) -> tuple[str, ...]:
    """Return what this agent does not measure, in words."""
    conflicts = (NAME_CONFLICT_FEATURE,) if state.name_conflicts.active else ()
    progress = state.account.progress
    unread = (BASELINE_FEATURE,) if state.unread_baseline else ()
    unseen = (UNSEEN_LOSS,) if progress.latest.loss_is_unseen else ()
    last = progress.latest.last
    return (
        *conflicts,
        *(() if last is None else _undecided(last.undecided)),
        *unread,
        *unseen,
        *progress.collections.unmatched,
        *progress.misreadings.features,
    )


def _undecided(tensors: Sequence[str]) -> tuple[str, ...]:
    """Return why there is no norm, with the first of the tensors that it waits for."""
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return (f"norms: {tensors[0]}{more} may be copies or parts",) if tensors else ()


def _layers(account: Accumulator) -> Iterator[LayerView]:
    """Yield the layers that have their own metrics; those of tensors are metrics of the run."""
    for family, own in account.layers.items():
        if family != TENSORS.name:
            yield from own.values()


def run_view(
    member: ClusterMember,
    account: Accumulator,
    conditions: ConditionTracker,
    standing_seconds: float | None,
    time_unix_seconds: float,
) -> RunView:
    """Return the state of the run after its last closed step."""
    never_stepped = account.progress.last is None
    run = RunView(
        identity=member.attempt.identity,
        facts={name: fact for name, fact in run_facts(member).items() if name not in _INTERNAL},
        nodes=member.node_count,
        active=member.end is EndReason.RUNNING,
        end_reason=member.end,
        phase_name=member.phase_name,
        conditions=conditions.active,
        conditions_fired=conditions.fired,
        laggards=laggards(member.statuses)
        if never_stepped or stalled(standing_seconds, account.progress.pace.usual_seconds)
        else (),
    )
    return account.view(run, time_unix_seconds)


def rank_view(source: RankSource, *, loss_misread: bool) -> RankView:
    """Return the state of one rank, from its ring; without a loss that is not the script's."""
    last, schema = source.last, source.schema
    values = dict(observed_columns(schema, last)) if schema and last else None
    if values is not None and loss_misread:
        values.pop("loss", None)
    return RankView(
        identity=source.identity,
        facts=dict(schema.facts) if schema else {},
        state=source.state,
        up=source.end is EndReason.RUNNING,
        step=last.step if last else None,
        step_time_unix_seconds=last.time_unix_ns / _NANOSECONDS if last else None,
        values=values,
    )


def agent_view(
    attempt: LocalAttempt,
    totals: ProbeTotals,
    *,
    counting_seconds: float | None,
    features: tuple[str, ...] = (),
    services: ServiceCounts,
) -> AgentView:
    """Return the node agent's account; totals include the current attempt.

    features: what this agent itself does not support, in addition to what the probes report.
    """
    states = [source.state for source in attempt.sources.values()]
    return AgentView(
        version=__version__,
        counting_seconds=counting_seconds,
        probe_seconds=totals.probe_seconds,
        probe_errors=totals.probe_errors,
        setting_errors=totals.setting_errors,
        records_dropped=totals.records_dropped,
        series_dropped=totals.series_dropped,
        scrape_duration_seconds=services.scrape_duration_seconds,
        unsupported=tuple(sorted({*features, *(f for s in states for f in s.unsupported)})),
        exports=services.exports,
        transport=services.transport,
        flight_records=services.flight_records,
        flight_errors=services.flight_errors,
    )


def idle_export(
    services: ServiceCounts, *, setting_errors: int, begun_unix_ns: int, time_unix_seconds: float
) -> RunExport:
    """Return the account of a node agent that has no run: its version and its own counters."""
    return RunExport(
        run="",
        node_rank=None,
        view=None,
        layers=(),
        ranks=(),
        faded_ranks=frozenset(),
        agent=AgentView(
            version=__version__,
            counting_seconds=_age_seconds(begun_unix_ns, time_unix_seconds),
            probe_seconds=0.0,
            probe_errors=0,
            setting_errors=setting_errors,
            records_dropped=0,
            series_dropped=0,
            scrape_duration_seconds=services.scrape_duration_seconds,
            unsupported=(),
            exports=services.exports,
        ),
        counters=CounterStore(),
    )


def _age_seconds(begun_unix_ns: int, time_unix_seconds: float) -> float | None:
    """Return the seconds since a time on this node's clock; None when it is not known."""
    if not begun_unix_ns:
        return None
    return max(time_unix_seconds - begun_unix_ns / _NANOSECONDS, 0.0)


def run_collections(member: ClusterMember) -> tuple[TensorCollection, ...]:
    """Return the tensor collections that the lowest rank with a schema has defined."""
    return decode_collections(run_facts(member).get(COLLECTIONS_FACT, ""))


def run_facts(member: ClusterMember) -> Mapping[str, str]:
    """Return the facts of the lowest rank that has a schema.

    Where no wrapper explains any parameter, `strategy` says what the ranks turned out to hold.
    """
    sources = sorted(member.attempt.sources.values(), key=lambda source: source.identity.rank)
    facts = next((dict(source.schema.facts) for source in sources if source.schema), {})
    if facts.get("strategy") == "none" and member.assumed:
        facts["strategy"] = _held(list(member.assumed.values()))
    return facts


def _held(groups: Sequence[Sequence[Sequence[int]]]) -> str:
    """Return what ranks hold of groups, by the sets of ranks that hold copies of each."""
    if not any(groups):
        return "independent"
    return "replicated" if all(groups) else "mixed"
