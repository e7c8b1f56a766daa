"""Metrics of routers of mixtures of experts."""

from collections.abc import Callable, Mapping

from mp_agent.catalog.metric import Reading, counter, gauge, info, layer_gauge
from mp_agent.records.columns import ROUTERS
from mp_agent.records.health import RouterBalance
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import LayerView, RunView

Columns = Mapping[str, float]
Quantity = Callable[[Columns], float | None]


def entropy(values: Columns) -> float | None:
    """Return the mean entropy of a token, divided by the logarithm of the number of experts."""
    tokens = values.get("entropy_tokens", 0.0)
    total = values.get("entropy_sum")
    # Rounding may carry an even distribution beyond 1.
    return None if total is None or tokens <= 0.0 else min(total / tokens, 1.0)


def unused_experts(values: Columns) -> float | None:
    """Return the share of the experts that no token was routed to, over the ranks on average."""
    experts = values.get("experts", 0.0)
    return values.get("unused_experts", 0.0) / experts if experts > 0.0 else None


def dropped(values: Columns) -> float | None:
    """Return the share of the choices that were beyond an expert's capacity; None without one."""
    choices = values.get("limited_choices", 0.0)
    return values.get("dropped_choices", 0.0) / choices if choices > 0.0 else None


def _of_run(column: str) -> Callable[[RunView], Reading]:
    return lambda run: run.latest.families.get(ROUTERS.name, {}).get(column)


def _of_worst(read: Callable[[RouterBalance], Reading]) -> Callable[[RunView], Reading]:
    return lambda run: None if run.routers is None else read(run.routers)


def _counted(column: str) -> Callable[[StepTransition], float]:
    return lambda change: change.step.families.get(ROUTERS.name, {}).get(column, 0.0)


ROUTERS_COLLAPSED = gauge(
    "mp_agent.routers.collapsed",
    "{router}",
    thresholds=("router_entropy_low", "router_load_high", "router_collapse_samples"),
    help="Routers whose entropy was below its limit and whose load above its limit in several "
    "consecutive samples.",
    read=_of_worst(lambda routers: float(routers.collapsed)),
)
COLLAPSED_ROUTER = info(
    "mp_agent.collapsed_router.info",
    labels=("layer",),
    help="A router that collapsed: its entropy is too low and its load too high; 10 at most, "
    "those with the largest loads.",
    read=_of_worst(lambda routers: {(name,): 1.0 for name in routers.collapsed_names}),
)

ROUTER_METRICS = (
    gauge(
        "mp_agent.router.load.max",
        "{factor}",
        help="Tokens that the most loaded expert of a router is chosen for, divided by the mean "
        "over its experts (1 is even), before any is dropped; of the router and the rank where it "
        "is largest, in the first forward pass of a sampled step.",
        read=_of_run("load_max"),
    ),
    gauge(
        "mp_agent.router.entropy.min",
        "1",
        help="Mean entropy of softmax over a token's router logits, divided by the logarithm of "
        "the number of experts: 1 is undecided, 0 a single expert. Of the router where it is "
        "smallest; absent where routers show no logits.",
        read=_of_worst(lambda routers: routers.entropy_min),
    ),
    gauge(
        "mp_agent.router.unused_experts",
        "1",
        help="Share of a router's experts that no token of a rank's micro-batch was routed to, on "
        "average over the ranks, of the router where it is largest.",
        read=_of_worst(lambda routers: routers.unused_max),
    ),
    gauge(
        "mp_agent.router.logit.abs_max",
        "{logit}",
        help="Largest magnitude of a finite router logit.",
        read=_of_run("logit_abs_max"),
    ),
    gauge(
        "mp_agent.router.dropped",
        "1",
        help="Share of the choices of an expert by a token that were dropped, since the expert's "
        "capacity was full; of all routers that show it (DeepSpeed, Switch Transformers), absent "
        "without any.",
        read=lambda run: dropped(run.latest.families.get(ROUTERS.name, {})),
    ),
    counter(
        "mp_agent.router.tokens",
        "{token}",
        help="Tokens looked at in routers, once by each, padding among them, in the steps that "
        "were sampled.",
        count=_counted("tokens"),
    ),
    counter(
        "mp_agent.router.nonfinite.tokens",
        "{token}",
        help="Tokens with a NaN or +Inf among their router logits, in the steps that were sampled.",
        count=_counted("nonfinite_tokens"),
    ),
    ROUTERS_COLLAPSED,
    COLLAPSED_ROUTER,
)


def _of_layer(quantity: Quantity) -> Callable[[LayerView], Reading]:
    return lambda layer: quantity(layer.values) if layer.judged else None


ROUTER_LAYER_METRICS = (
    layer_gauge(
        "mp_agent.layer.router.load.max",
        "{factor}",
        family=ROUTERS.name,
        help="Tokens that the most loaded expert of the layer is chosen for, divided by the mean "
        "over its experts (1 is even), before any is dropped; on the rank where it is largest.",
        read=_of_layer(lambda values: values.get("load_max")),
    ),
    layer_gauge(
        "mp_agent.layer.router.entropy",
        "1",
        family=ROUTERS.name,
        help="Mean entropy of softmax over a token's router logits, divided by the logarithm of "
        "the number of experts: 1 is undecided, 0 a single expert.",
        read=_of_layer(entropy),
    ),
    layer_gauge(
        "mp_agent.layer.router.unused_experts",
        "1",
        family=ROUTERS.name,
        help="Share of the layer's experts that no token of a rank's micro-batch was routed to, on "
        "average over the ranks.",
        read=_of_layer(unused_experts),
    ),
    layer_gauge(
        "mp_agent.layer.router.logit.abs_max",
        "{logit}",
        family=ROUTERS.name,
        help="Largest magnitude of a finite router logit of the layer.",
        read=_of_layer(lambda values: values.get("logit_abs_max")),
    ),
    layer_gauge(
        "mp_agent.layer.router.dropped",
        "1",
        family=ROUTERS.name,
        help="Share of the choices of an expert by a token that were dropped, since the expert's "
        "capacity was full; absent where the router shows none.",
        read=_of_layer(dropped),
    ),
)
