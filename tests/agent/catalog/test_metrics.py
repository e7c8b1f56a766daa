import re

import pytest

from mp_agent.catalog.metric import Kind, Metric, Scope
from mp_agent.catalog.metrics import METRICS
from mp_agent.errors import CatalogError
from tests.every import for_every
from tests.subtests import each

# The names of the design, written down by hand: renaming one breaks other people's dashboards.
CORE_NAMES = """
mp_agent_run_info mp_agent_run_active mp_agent_run_end_info mp_agent_phase_info mp_agent_step
mp_agent_steps_total mp_agent_last_step_timestamp_seconds mp_agent_step_duration_seconds
mp_agent_loss mp_agent_loss_nonfinite_steps_total mp_agent_learning_rate mp_agent_tokens_total
mp_agent_lint_findings mp_agent_lint_files mp_agent_tracker_info
mp_agent_grad_norm mp_agent_grad_abs_max mp_agent_grad_abs_min
mp_agent_grad_zero_ratio mp_agent_grad_finite
mp_agent_grad_norm_window_max mp_agent_grad_norm_window_min
mp_agent_grad_norm_exceeded_steps_total mp_agent_grad_nonfinite_steps_total
mp_agent_grad_nan_elements_total mp_agent_grad_inf_elements_total
mp_agent_nonfinite_since_step mp_agent_nonfinite_updates_total
mp_agent_clip_max_norm mp_agent_clip_coefficient
mp_agent_clipped_steps_total mp_agent_loss_scale mp_agent_loss_scale_initial
mp_agent_loss_scale_increases_total mp_agent_loss_scale_decreases_total
mp_agent_loss_scale_consecutive_decreases mp_agent_loss_scale_floor_skips_total
mp_agent_skipped_steps_total mp_agent_coverage_ratio
mp_agent_ranks_missing mp_agent_missing_rank_info
mp_agent_first_nonfinite_info mp_agent_layer_grad_norm mp_agent_layer_grad_abs_max
mp_agent_layer_grad_abs_min mp_agent_layer_grad_abs_mean
mp_agent_layer_grad_zero_ratio mp_agent_layer_grad_nonfinite_elements_total mp_agent_rank_up
mp_agent_rank_step mp_agent_rank_last_step_timestamp_seconds mp_agent_rank_compute_seconds
mp_agent_layers_interval mp_agent_measuring_interval mp_agent_overhead_ratio
mp_agent_probe_device_seconds_total mp_agent_steps_measured_total
mp_agent_rank_local_grad_norm mp_agent_rank_local_grad_nonfinite_elements_total
mp_agent_rank_loss mp_agent_rank_loss_nonfinite_steps_total mp_agent_rank_phase_info
mp_agent_batch_doubled_pairs mp_agent_batch_repeated_steps mp_agent_repeated_batch_info
mp_agent_batch_shared_steps
mp_agent_shared_batch_info mp_agent_batch_single_row_ranks mp_agent_single_row_batch_info
mp_agent_rank_loss_outlier_steps_total mp_agent_rank_loss_outlier_info
mp_agent_rank_loss_level_steps mp_agent_rank_loss_level_info mp_agent_loss_relapsed_steps
mp_agent_grad_norm_usual_growth mp_agent_grad_norm_growth_info
mp_agent_rank_info mp_agent_build_info mp_agent_probe_seconds_total mp_agent_probe_errors_total
mp_agent_setting_errors_total mp_agent_records_dropped_total mp_agent_series_dropped_total
mp_agent_rank_series_left_out mp_agent_scrape_duration_seconds mp_agent_unsupported_info
mp_agent_export_failures_total mp_agent_export_last_success_timestamp_seconds
mp_agent_export_rejected_total
mp_agent_push_failures_total mp_agent_push_sent_bytes_total
mp_agent_push_last_success_timestamp_seconds mp_agent_reports_dropped_total
mp_agent_rows_received_bytes_total mp_agent_rows_refused_total mp_agent_nodes_known
mp_agent_replica_divergence mp_agent_replica_divergence_steps_total mp_agent_divergent_ranks_info
mp_agent_replica_unreduced_steps mp_agent_replica_unexplained_tensors mp_agent_local_state_info
mp_agent_loss_median mp_agent_loss_deviation mp_agent_loss_spike_bound mp_agent_loss_trend
mp_agent_loss_spike_steps_total mp_agent_loss_nonfinite_unskipped_steps_total
mp_agent_loss_nonfinite_repeated_steps_total mp_agent_grad_norm_unclipped_steps_total
mp_agent_grad_fp16_headroom mp_agent_loss_scale_calibrated mp_agent_loss_scale_floor_stalls_total
mp_agent_sampled_step mp_agent_baseline_departures mp_agent_baseline_departure_info
mp_agent_layers_without_gradient_ratio mp_agent_layer_without_gradient_info
mp_agent_grad_nonfinite_replaced_steps_total
mp_agent_layers_dead mp_agent_dead_layer_info mp_agent_layers_underflowing_ratio
mp_agent_underflowing_layer_info mp_agent_step_usual_seconds mp_agent_straggler_slowdown
mp_agent_straggler_delay_seconds mp_agent_straggler_info mp_agent_ranks_lagging
mp_agent_lagging_rank_info mp_agent_condition_active mp_agent_condition_fired_total
mp_agent_condition_since_step
mp_agent_grad_norm_bound mp_agent_attempt_step mp_agent_run_attempts_total
mp_agent_counting_seconds mp_agent_standing_seconds mp_agent_pause_longest_seconds
mp_agent_phase_longest_seconds
mp_agent_step_part_seconds_total mp_agent_rank_step_part_seconds_total
mp_agent_activation_abs_max mp_agent_activation_mean mp_agent_activation_std
mp_agent_activation_zero_ratio mp_agent_activation_nonfinite_elements_total
mp_agent_activation_near_overflow_elements_total mp_agent_activation_first_nonfinite_info
mp_agent_activation_first_nonfinite_gradient_info
mp_agent_layer_activation_abs_max mp_agent_layer_activation_mean mp_agent_layer_activation_std
mp_agent_layer_activation_zero_ratio mp_agent_layer_activation_nonfinite_elements_total
mp_agent_attention_logit_max mp_agent_attention_logit_growth
mp_agent_attention_nonfinite_logits_total mp_agent_attention_high_layer_info
mp_agent_layer_attention_logit_max mp_agent_output_logit_max mp_agent_output_logsumexp_max
mp_agent_output_logsumexp_min mp_agent_output_logsumexp_mean mp_agent_output_logsumexp_size
mp_agent_output_logsumexp_growth mp_agent_output_nonfinite_rows_total
mp_agent_router_load_max mp_agent_router_entropy_min_ratio mp_agent_router_unused_experts_ratio
mp_agent_router_logit_abs_max mp_agent_router_dropped_ratio mp_agent_router_tokens_total
mp_agent_router_nonfinite_tokens_total mp_agent_routers_collapsed mp_agent_collapsed_router_info
mp_agent_layer_router_load_max mp_agent_layer_router_entropy_ratio
mp_agent_layer_router_unused_experts_ratio mp_agent_layer_router_logit_abs_max
mp_agent_layer_router_dropped_ratio
mp_agent_fp8_flushed_ratio mp_agent_fp8_saturated_ratio mp_agent_fp8_range_used_max
mp_agent_fp8_range_used_min mp_agent_fp8_scale_min mp_agent_fp8_scale_max
mp_agent_fp8_nonfinite_elements_total mp_agent_layer_fp8_input_flushed_ratio
mp_agent_layer_fp8_weight_flushed_ratio mp_agent_layer_fp8_gradient_flushed_ratio
mp_agent_layer_fp8_saturated_ratio mp_agent_layer_fp8_range_used_max mp_agent_layer_fp8_amax
mp_agent_layer_fp8_range_used_min mp_agent_layers_fp8_misscaled
mp_agent_fp8_misscaled_layer_info
mp_agent_logprobs_k1 mp_agent_logprobs_k3 mp_agent_logprobs_delta_max mp_agent_logprobs_delta_p999
mp_agent_logprobs_correlation mp_agent_logprobs_effective_samples_ratio
mp_agent_logprobs_tokens_total mp_agent_logprobs_nonfinite_tokens_total
mp_agent_logprobs_clipped_tokens_total mp_agent_logprobs_refused_calls_total
mp_agent_logprobs_mismatch_steps_total
mp_agent_policy_entropy mp_agent_policy_collapsed_steps
mp_agent_tensor_abs_max mp_agent_tensor_abs_min mp_agent_tensor_dynamic_range
mp_agent_tensor_dynamic_range_p01 mp_agent_tensor_mean
mp_agent_tensor_norm mp_agent_tensor_elements mp_agent_tensor_nonfinite_elements
mp_agent_tensor_swallowed_ratio mp_agent_tensor_reduction_swallowed_ratio
mp_agent_tensor_slice_imbalance mp_agent_tensor_worst_slice mp_agent_imbalanced_tensor_info
mp_agent_tensors_watched mp_agent_tensor_unmeasured_calls_total
mp_agent_flight_errors_total
mp_agent_flight_records_total
mp_agent_clip_scaled_steps mp_agent_exploding_layer_info mp_agent_grad_exploded_steps_total
mp_agent_grad_exploded_unclipped_steps_total mp_agent_grad_nonfinite_repeated_steps_total
mp_agent_grad_norm_below_steps mp_agent_grad_norm_usual mp_agent_grad_norm_usual_peak
mp_agent_layers_exploding mp_agent_learning_rate_jumps_total mp_agent_loss_best
mp_agent_learning_rate_falls_total
mp_agent_loss_lost_steps mp_agent_loss_rising_steps mp_agent_untrained_steps
mp_agent_loop_mistake_steps mp_agent_loop_discarded_backwards
mp_agent_autocast_fp32_ratio mp_agent_autocast_fp32_samples
mp_agent_guard_actions_total
mp_agent_weight_norm mp_agent_update_relative mp_agent_updates_lost_ratio
mp_agent_updates_rounding_loss_ratio
mp_agent_divergent_rates_info mp_agent_parameters_cut_off mp_agent_cut_off_parameters_info
mp_agent_parameters_parted mp_agent_parted_parameters_info mp_agent_resumed_without_state_steps
mp_agent_schedule_behind_steps mp_agent_unmatched_tensors
mp_agent_parameters_unheld mp_agent_unheld_parameters_info mp_agent_parameters_unchanged
mp_agent_unchanged_parameters_info mp_agent_updates_rounded_ratio mp_agent_parameters_trained_ratio
mp_agent_adam_below_epsilon_ratio mp_agent_adam_epsilon_lost_ratio mp_agent_moment_rms
mp_agent_moment_rms_layer_max mp_agent_layers_moment_stale mp_agent_moment_stale_layer_info
mp_agent_learning_rate_max mp_agent_learning_rate_min mp_agent_layer_weight_norm
mp_agent_layer_update_relative mp_agent_layer_updates_lost_ratio mp_agent_layer_moment_rms
mp_agent_layer_learning_rate
mp_agent_grad_mean mp_agent_grad_deviation mp_agent_grad_exponent_elements
mp_agent_grad_fp16_flushed_ratio mp_agent_grad_fp16_subnormal_ratio
mp_agent_grad_fp16_near_overflow_ratio mp_agent_grad_fp16_overflow_at_double_ratio
mp_agent_grad_fp16_headroom_low mp_agent_loss_scale_best mp_agent_layer_grad_deviation
mp_agent_layer_grad_fp16_flushed_ratio
mp_agent_formats_info
mp_agent_collection_layers mp_agent_collection_grad_norm mp_agent_collection_grad_abs_max
mp_agent_collection_grad_abs_min mp_agent_collection_grad_nonfinite_elements
mp_agent_collection_grad_mean mp_agent_collection_grad_deviation
mp_agent_collection_grad_fp16_near_overflow_ratio
mp_agent_fp8_flushed_layer_info mp_agent_fp8_flushed_layer_max_ratio mp_agent_grad_norm_deviation
mp_agent_layers_fp8_flushed mp_agent_loss_fall mp_agent_loss_scale_low_steps
mp_agent_loss_scale_repeated_decreases_total mp_agent_loss_solved mp_agent_pages_info
mp_agent_push_interval_seconds mp_agent_push_put_off_total mp_agent_skipped_excess_steps_total
mp_agent_sustained_steps mp_agent_tensor_sustained_steps mp_agent_zero_epsilon_info
""".split()

FORBIDDEN_LABELS = {"job", "instance", "namespace", "pod", "node", "cluster"}


def test_the_core_set_has_exactly_the_names_of_the_design():
    assert sorted(metric.prometheus_name for metric in METRICS) == sorted(CORE_NAMES)


def otlp_translation(name: str, unit: str, kind: Kind) -> str:
    """Prometheus' rules for OTLP names (otlptranslator, UnderscoreEscapingWithSuffixes)."""
    tokens = [token for token in re.split(r"[^a-zA-Z0-9:]+", name) if token]
    main = "" if "{" in unit else {"s": "seconds", "By": "bytes", "1": ""}.get(unit, unit)
    if main and main not in tokens:
        tokens.append(main)
    if kind is Kind.COUNTER:
        tokens = [token for token in tokens if token != "total"] + ["total"]
    if unit == "1" and kind is Kind.GAUGE:
        tokens = [token for token in tokens if token != "ratio"] + ["ratio"]
    return "_".join(tokens)


@for_every(METRICS, lambda metric: metric.name)
def test_prometheus_name_is_what_an_otlp_backend_makes_of_it(metric):
    assert metric.prometheus_name == otlp_translation(metric.name, metric.unit, metric.kind)


@for_every(METRICS, lambda metric: metric.name)
def test_no_label_belongs_to_the_scraper_and_help_is_a_sentence(metric):
    assert not FORBIDDEN_LABELS & set(metric.label_names)
    assert len(set(metric.label_names)) == len(metric.label_names)
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert metric.help.endswith(".")


_LEANS = re.compile(
    r"^(Such|Those|These|This|That|It|Its|They|Their|Others?|The (same|others?)|Of (those|these))\b"
    r"|\bsuch (?!as\b)|\bthose (outputs|rows)\b"
)


def test_a_help_text_is_understood_without_those_of_other_metrics():
    assert [metric.help for metric in METRICS if _LEANS.search(metric.help)] == []


@each(
    ("change", "message"),
    [
        ({"name": "mp_agent.skip.ratio"}, "total or ratio"),
        ({"name": "other.metric"}, "starts with mp_agent"),
        ({"unit": "ms"}, "unit 'ms'"),
        ({"count": lambda step: 1.0}, "exactly one of read and count"),
        ({"kind": Kind.HISTOGRAM}, "needs bounds"),
        ({"thresholds": ("nap",)}, "nap is no threshold"),
    ],
)
def test_a_contradictory_record_is_refused_by_name(change, message):
    record = {
        "name": "mp_agent.x",
        "unit": "",
        "kind": Kind.GAUGE,
        "scope": Scope.RUN,
        "help": "X.",
        "read": lambda run: 1.0,
    }
    with pytest.raises(CatalogError, match=message):
        Metric(**{**record, **change})
