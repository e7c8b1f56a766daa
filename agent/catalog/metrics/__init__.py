"""The metrics catalog: all records, in the order in which they are exposed."""

from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics.activations import (
    ACTIVATION_LAYER_METRICS,
    ACTIVATION_METRICS,
    ATTENTION_LAYER_METRICS,
    ATTENTION_METRICS,
    OUTPUT_LOGIT_METRICS,
)
from mp_agent.catalog.metrics.agent import (
    AGENT_METRICS,
    EXPORT_METRICS,
    FLIGHT_METRICS,
    TRANSPORT_METRICS,
)
from mp_agent.catalog.metrics.baseline import BASELINE_METRICS
from mp_agent.catalog.metrics.batches import BATCH_METRICS
from mp_agent.catalog.metrics.distribution import (
    COLLECTION_METRICS,
    DISTRIBUTION_LAYER_METRICS,
    DISTRIBUTION_METRICS,
)
from mp_agent.catalog.metrics.fp8 import FP8_LAYER_METRICS, FP8_METRICS
from mp_agent.catalog.metrics.gradient_layers import (
    LAYER_METRICS,
    LAYER_TROUBLE_METRICS,
    NORM_METRICS,
    RANK_LOCAL_GRADIENT_METRICS,
    REPLICA_METRICS,
)
from mp_agent.catalog.metrics.gradients import GRADIENT_METRICS
from mp_agent.catalog.metrics.optimizer import (
    PARAMETER_METRICS,
    UPDATE_LAYER_METRICS,
    UPDATE_METRICS,
)
from mp_agent.catalog.metrics.ranks import RANK_LOSS_METRICS, RANK_METRICS, WAITING_METRICS
from mp_agent.catalog.metrics.reinforcement import LOGPROB_METRICS
from mp_agent.catalog.metrics.routers import ROUTER_LAYER_METRICS, ROUTER_METRICS
from mp_agent.catalog.metrics.run import (
    CODE_METRICS,
    CONDITION_METRICS,
    RANK_STEP_PART_METRICS,
    RUN_METRICS,
    STEP_PART_METRICS,
    TRACKER_METRICS,
)
from mp_agent.catalog.metrics.tensors import TENSOR_METRICS
from mp_agent.catalog.metrics.training import (
    GUARD_METRICS,
    LEARNING_METRICS,
    LOSS_METRICS,
    LOSS_SCALE_METRICS,
)
from mp_agent.errors import CatalogError

METRICS: tuple[Metric, ...] = (
    *RUN_METRICS,
    *LOSS_METRICS,
    *WAITING_METRICS,
    *STEP_PART_METRICS,
    *GRADIENT_METRICS,
    *NORM_METRICS,
    *LEARNING_METRICS,
    *GUARD_METRICS,
    *LOSS_SCALE_METRICS,
    *REPLICA_METRICS,
    *LAYER_TROUBLE_METRICS,
    *UPDATE_METRICS,
    *PARAMETER_METRICS,
    *DISTRIBUTION_METRICS,
    *CONDITION_METRICS,
    *CODE_METRICS,
    *TRACKER_METRICS,
    *LAYER_METRICS,
    *UPDATE_LAYER_METRICS,
    *DISTRIBUTION_LAYER_METRICS,
    *RANK_METRICS,
    *RANK_STEP_PART_METRICS,
    *RANK_LOCAL_GRADIENT_METRICS,
    *AGENT_METRICS,
    *EXPORT_METRICS,
    *FLIGHT_METRICS,
    *TRANSPORT_METRICS,
    *ACTIVATION_METRICS,
    *ACTIVATION_LAYER_METRICS,
    *ATTENTION_METRICS,
    *OUTPUT_LOGIT_METRICS,
    *ATTENTION_LAYER_METRICS,
    *ROUTER_METRICS,
    *ROUTER_LAYER_METRICS,
    *FP8_METRICS,
    *FP8_LAYER_METRICS,
    *LOGPROB_METRICS,
    *TENSOR_METRICS,
    *COLLECTION_METRICS,
    *BATCH_METRICS,
    *RANK_LOSS_METRICS,
    *BASELINE_METRICS,
)

BY_PROMETHEUS_NAME = {metric.prometheus_name: metric for metric in METRICS}
if len(BY_PROMETHEUS_NAME) != len(METRICS):
    raise CatalogError("two metrics share a Prometheus name")

__all__ = ["BY_PROMETHEUS_NAME", "METRICS", "Kind", "Metric", "Scope"]
