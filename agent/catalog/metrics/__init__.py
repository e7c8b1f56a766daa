"""The metrics catalog: all records, in the order in which they are exposed."""

from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics.activations.layers import ACTIVATION_LAYER_METRICS
from mp_agent.catalog.metrics.activations.run import ACTIVATION_METRICS
from mp_agent.catalog.metrics.agent.agent import AGENT_METRICS
from mp_agent.catalog.metrics.agent.export import EXPORT_METRICS
from mp_agent.catalog.metrics.agent.flight import FLIGHT_METRICS
from mp_agent.catalog.metrics.agent.transport import TRANSPORT_METRICS
from mp_agent.catalog.metrics.attention.attention import (
    ATTENTION_LAYER_METRICS,
    ATTENTION_METRICS,
)
from mp_agent.catalog.metrics.attention.outputs import OUTPUT_LOGIT_METRICS
from mp_agent.catalog.metrics.fp8.layers import FP8_LAYER_METRICS
from mp_agent.catalog.metrics.fp8.run import FP8_METRICS
from mp_agent.catalog.metrics.gradients.collections import COLLECTION_METRICS
from mp_agent.catalog.metrics.gradients.distribution import (
    DISTRIBUTION_LAYER_METRICS,
    DISTRIBUTION_METRICS,
)
from mp_agent.catalog.metrics.gradients.gradients import GRADIENT_METRICS
from mp_agent.catalog.metrics.gradients.layer_trouble import LAYER_TROUBLE_METRICS
from mp_agent.catalog.metrics.gradients.layers import LAYER_METRICS
from mp_agent.catalog.metrics.gradients.local import RANK_LOCAL_GRADIENT_METRICS
from mp_agent.catalog.metrics.gradients.norms import NORM_METRICS
from mp_agent.catalog.metrics.gradients.replicas import REPLICA_METRICS
from mp_agent.catalog.metrics.optimizer.layers import UPDATE_LAYER_METRICS
from mp_agent.catalog.metrics.optimizer.updates import UPDATE_METRICS
from mp_agent.catalog.metrics.reinforcement.logprobs import LOGPROB_METRICS
from mp_agent.catalog.metrics.routers.layers import ROUTER_LAYER_METRICS
from mp_agent.catalog.metrics.routers.run import ROUTER_METRICS
from mp_agent.catalog.metrics.run.code import CODE_METRICS
from mp_agent.catalog.metrics.run.conditions import CONDITION_METRICS
from mp_agent.catalog.metrics.run.ranks import RANK_METRICS
from mp_agent.catalog.metrics.run.run import RUN_METRICS
from mp_agent.catalog.metrics.run.step_parts import RANK_STEP_PART_METRICS, STEP_PART_METRICS
from mp_agent.catalog.metrics.run.trackers import TRACKER_METRICS
from mp_agent.catalog.metrics.run.waiting import WAITING_METRICS
from mp_agent.catalog.metrics.tensors.run import TENSOR_METRICS
from mp_agent.catalog.metrics.training.guard import GUARD_METRICS
from mp_agent.catalog.metrics.training.learning import LEARNING_METRICS
from mp_agent.catalog.metrics.training.loss import LOSS_METRICS
from mp_agent.catalog.metrics.training.loss_scale import LOSS_SCALE_METRICS
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
)

BY_PROMETHEUS_NAME = {metric.prometheus_name: metric for metric in METRICS}
if len(BY_PROMETHEUS_NAME) != len(METRICS):
    raise CatalogError("two metrics share a Prometheus name")

__all__ = ["BY_PROMETHEUS_NAME", "METRICS", "Kind", "Metric", "Scope"]
