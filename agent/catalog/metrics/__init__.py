"""The metrics catalog: all records, in the order in which they are exposed."""

from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics.agent import AGENT_METRICS
from mp_agent.catalog.metrics.gradients import GRADIENT_METRICS
from mp_agent.catalog.metrics.layers import LAYER_METRICS
from mp_agent.catalog.metrics.loss_scale import LOSS_SCALE_METRICS
from mp_agent.catalog.metrics.ranks import RANK_METRICS
from mp_agent.catalog.metrics.run import RUN_METRICS
from mp_agent.errors import CatalogError

METRICS: tuple[Metric, ...] = (
    *RUN_METRICS,
    *GRADIENT_METRICS,
    *LOSS_SCALE_METRICS,
    *LAYER_METRICS,
    *RANK_METRICS,
    *AGENT_METRICS,
)

BY_PROMETHEUS_NAME = {metric.prometheus_name: metric for metric in METRICS}
if len(BY_PROMETHEUS_NAME) != len(METRICS):
    raise CatalogError("two metrics share a Prometheus name")

__all__ = ["BY_PROMETHEUS_NAME", "METRICS", "Kind", "Metric", "Scope"]
