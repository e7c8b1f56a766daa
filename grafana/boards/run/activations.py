"""Outputs of modules, where they are measured."""

from grafana.panel import Panel, Query, Row, above, below, between, help_of
from grafana.queries import by_run, increase
from mp_agent.alerting.conditions.activations import (
    ACTIVATION_NEAR_OVERFLOW,
    ATTENTION_LOGIT_GROWTH,
    FP8_SATURATION,
    OUTPUT_LOGIT_DIVERGENCE,
    ROUTER_COLLAPSE,
)
from mp_agent.alerting.conditions.nonfinite import ACTIVATION_NONFINITE

ACTIVATIONS = Row(
    title="Activations",
    panels=(
        Panel(
            id=50,
            title="Size of activations",
            description=help_of("mp_agent_activation_abs_max")
            + " A standard deviation that keeps growing comes before an overflow. Measured only "
            "if the setting measure_activations is on.",
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
            nothing="Needs measure_activations",
            queries=(
                Query(by_run("mp_agent_activation_abs_max"), "largest", optional=True),
                Query(by_run("mp_agent_activation_std"), "standard deviation", optional=True),
            ),
            runbooks=(ACTIVATION_NEAR_OVERFLOW,),
        ),
        Panel(
            id=51,
            title="Non-finite activations",
            description="NaN and Inf elements in outputs of modules, and elements of FP16 outputs "
            "close to its largest number, in the steps that were sampled.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_activation_nonfinite_elements_total"), "NaN or Inf"),
                Query(
                    increase("mp_agent_activation_near_overflow_elements_total"), "near overflow"
                ),
            ),
            runbooks=(ACTIVATION_NONFINITE,),
        ),
        Panel(
            id=52,
            title="Attention logits",
            description=help_of("mp_agent_attention_logit_max")
            + " Growth to a multiple, above <attention_logit_high>, comes before many divergences. "
            "Measured only if the setting measure_attention is on.",
            nothing="Needs measure_attention",
            queries=(Query(by_run("mp_agent_attention_logit_max"), "largest", optional=True),),
            steps=above(attention_logit_high="orange"),
            lines=True,
            runbooks=(ATTENTION_LOGIT_GROWTH,),
        ),
        Panel(
            id=53,
            title="Log-sum-exp of output logits",
            description="Largest, mean and smallest log-sum-exp of a few rows of the logits that "
            "cross_entropy was given. A drift far away from zero costs precision. Measured only if "
            "the setting measure_attention is on.",
            nothing="Needs measure_attention",
            queries=(
                Query(by_run("mp_agent_output_logsumexp_max"), "largest", optional=True),
                Query(by_run("mp_agent_output_logsumexp_mean"), "mean", optional=True),
                Query(by_run("mp_agent_output_logsumexp_min"), "smallest", optional=True),
            ),
            runbooks=(OUTPUT_LOGIT_DIVERGENCE,),
        ),
        Panel(
            id=54,
            title="Load of experts",
            description=help_of("mp_agent_router_load_max")
            + " Measured only if the setting measure_routers is on.",
            minimum=0,
            nothing="Needs measure_routers, and known routers",
            queries=(Query(by_run("mp_agent_router_load_max"), "most loaded", optional=True),),
            runbooks=(ROUTER_COLLAPSE,),
        ),
        Panel(
            id=55,
            title="Entropy of routers",
            description="Smallest mean entropy of a router (1 is undecided, 0 a single expert), "
            "the largest share of a router's experts that get no token, and the share of choices "
            "that are dropped for lack of capacity, where routers show it. Measured only if the "
            "setting measure_routers is on.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            nothing="Needs measure_routers, and known routers",
            queries=(
                Query(by_run("mp_agent_router_entropy_min_ratio"), "entropy", optional=True),
                Query(
                    by_run("mp_agent_router_unused_experts_ratio"), "unused experts", optional=True
                ),
                Query(by_run("mp_agent_router_dropped_ratio"), "dropped", optional=True),
            ),
            runbooks=(ROUTER_COLLAPSE,),
        ),
        Panel(
            id=56,
            title="Flushed to zero by FP8",
            description=help_of("mp_agent_fp8_flushed_ratio")
            + " Measured only if the setting measure_fp8 is on.",
            unit="percentunit",
            minimum=0,
            soft_maximum=0.01,
            nothing="Needs measure_fp8",
            queries=(
                Query(
                    by_run("mp_agent_fp8_flushed_ratio", keep=("operand",)),
                    "{{operand}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=57,
            title="Range used by delayed scaling",
            description="Amax times scale divided by FP8's largest number, of the tensor where it "
            "is largest and where it is smallest: above 1 a tensor was saturated, far below 1 a "
            "scale is out of date. A layer above <fp8_range_used_high> or below "
            "<fp8_range_used_low> sample after sample brings an alert. Measured only if the "
            "setting measure_fp8 is on.",
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
            nothing="Needs measure_fp8 and delayed scaling",
            queries=(
                Query(by_run("mp_agent_fp8_range_used_max"), "largest", optional=True),
                Query(by_run("mp_agent_fp8_range_used_min"), "smallest", optional=True),
            ),
            steps=between(below(fp8_range_used_low="orange"), above(fp8_range_used_high="orange")),
            lines=True,
            runbooks=(FP8_SATURATION,),
        ),
    ),
)
