import numpy as np
import pytest
from pydantic import TypeAdapter

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.layer_health import (
    EARLY_SAMPLES,
    LAYERS_AT_MOST,
    NAMED_AT_MOST,
    LayerHealth,
    LayerHealthState,
)
from mp_agent.records.health import TroubledLayers
from mp_agent.records.views import LayerView
from tests.agent.node.builders import NO_GRADIENTS

THRESHOLDS = resolve({})


def view(
    abs_max: float = 0.1,
    zeros: float = 0.0,
    *,
    name: str = "w",
    elements: float = 1000.0,
    judged: bool = True,
) -> LayerView:
    values = {**NO_GRADIENTS, "abs_max": abs_max, "elements": elements}
    values["zero_elements"] = elements if abs_max == 0.0 else zeros * elements
    return LayerView(name=name, values=values, judged=judged)


def watched(*samples: LayerView | list[LayerView]) -> TroubledLayers:
    watch = LayerHealth(LayerHealthState())
    for sample in samples:
        watch.fold(sample if isinstance(sample, list) else [sample], THRESHOLDS)
    return watch.troubled(THRESHOLDS)


class TestDead:
    @pytest.mark.parametrize("abs_max", [9e-11, 1e-300, 0.0])
    def test_a_layer_is_dead_after_three_samples_in_a_row(self, abs_max):
        alive = [view()] * EARLY_SAMPLES
        assert watched(*alive, *[view(abs_max)] * 2).dead == 0
        found = watched(*alive, *[view(abs_max)] * 3)
        assert (found.dead, found.dead_names) == (1, ("w",))

    def test_one_healthy_sample_restarts_the_count(self):
        assert watched(view(), view(1e-11), view(1e-11), view(), view(1e-11)).dead == 0

    @pytest.mark.parametrize(("weight", "dead"), [(0.1, 0), (1e-12, 2), (None, 1)])
    def test_a_bias_counts_unless_its_weight_has_a_gradient(self, weight, dead):
        """That of a Wasserstein critic cancels between real and fake once both are far apart."""
        samples = [
            [view(bias, name="model.2.bias")]
            + ([] if weight is None else [view(size or 0.1, name="model.2.weight")])
            for bias, size in [(0.1, None)] * EARLY_SAMPLES + [(0.0, weight)] * 3
        ]
        assert watched(*samples).dead == dead

    def test_at_the_limit_itself_it_lives(self):
        assert watched(*[view(1e-10)] * 5).dead == 0

    def test_samples_that_do_not_count_neither_count_nor_interrupt(self):
        skipped = view(5.0, judged=False)

        assert watched(view(), view(1e-11), skipped, view(1e-11), skipped).dead == 0
        assert watched(view(), view(1e-11), skipped, view(1e-11), skipped, view(1e-11)).dead == 1

    def test_parameters_without_gradient_are_passed_over(self):
        """Frozen and unused ones have no elements, or zeros alone from the first sample on."""
        assert watched(*[view(0.0, elements=0.0)] * 9).dead == 0
        assert watched(*[view(0.0)] * 9).dead == 0

    @pytest.mark.parametrize("name", ["moe.experts.3.w1", "block.expert.up", "experts.w2"])
    def test_an_idle_expert_is_passed_over(self, name):
        assert watched(view(name=name), *[view(0.0, name=name)] * 9).dead == 0

    def test_an_expert_whose_gradient_is_all_but_zero_is_not(self):
        name = "moe.experts.3.w1"

        assert watched(view(name=name), *[view(1e-12, name=name)] * 3).dead == 1

    def test_what_comes_and_goes_is_used_now_and_then(self):
        assert watched(view(), view(0.0), view(), *[view(0.0)] * 9).dead == 0

    def test_what_was_dead_for_long_and_came_back_can_die_again(self):
        assert watched(view(), *[view(1e-12)] * 3, view(), *[view(1e-12)] * 3).dead == 1

    def test_the_head_of_a_detector_which_few_batches_use_is_not(self):
        """A batch without objects of its size gives it gradients of exactly 0."""
        used, unused = view(), view(0.0)
        first, later = [used, *[unused] * 9], [used] * 2 + [unused] * 12

        assert watched(*first).dead == 0
        assert watched(*first, *later).dead == 0
        assert watched(*[used] * EARLY_SAMPLES, unused, unused, *later).dead == 0
        assert watched(*[used] * EARLY_SAMPLES, unused, unused).underflowing_share == 0.0

    def test_of_few_samples_exact_zeros_count_after_many(self):
        assert watched(view(), *[view(0.0)] * 15).dead == 0
        assert watched(view(), *[view(0.0)] * 16).dead == 1

    def test_many_are_counted_and_some_are_named_in_module_order(self):
        names = [f"layer.{index}" for index in range(40)]
        found = watched(
            [view(name=name) for name in names],
            *[[view(1e-12, name=name) for name in names]] * 3,
        )

        assert found.dead == 40
        assert found.dead_names == tuple(names[:NAMED_AT_MOST])


class TestUnderflow:
    def test_zeros_above_the_layers_own_early_share_are_underflow(self):
        early = [view(zeros=0.5)] * EARLY_SAMPLES

        assert watched(*early, view(zeros=0.69)).underflowing_share == 0.0
        assert watched(*early, view(zeros=0.71)).underflowing_share == 1.0
        assert watched(*early, view(zeros=0.71), view(zeros=0.5)).underflowing_share == 0.0

    def test_the_early_share_is_the_median_of_the_first_samples(self):
        shares = [1.0, 0.1, 0.2, 0.9, 0.3]
        usual = float(np.median(shares))
        early = [view(zeros=share) for share in shares]

        assert watched(*early, view(zeros=usual + 0.19)).underflowing_share == 0.0
        assert watched(*early, view(zeros=usual + 0.21)).underflowing_share == 1.0

    @pytest.mark.parametrize("usual", [0.0, 0.9, 0.99])
    def test_untouched_rows_and_zeros_of_relu_are_a_layers_own(self, usual):
        assert watched(*[view(zeros=usual)] * 30).underflowing_share == 0.0

    def test_a_gradient_that_underflows_altogether_counts(self):
        assert watched(*[view()] * EARLY_SAMPLES, *[view(0.0)] * 3).underflowing_share == 1.0

    def test_an_idle_expert_does_not(self):
        name = "experts.3.w1"
        early = [view(name=name)] * EARLY_SAMPLES

        assert watched(*early, view(0.0, name=name)).underflowing_share == 0.0

    def test_before_the_first_samples_are_there_nothing_is_known(self):
        assert watched(*[view()] * (EARLY_SAMPLES - 1)).underflowing_share is None
        assert watched(*[view()] * EARLY_SAMPLES).underflowing_share == 0.0

    def test_of_few_elements_a_zero_says_nothing(self):
        found = watched(*[view(elements=4.0)] * EARLY_SAMPLES, view(zeros=0.75, elements=4.0))

        assert found.underflowing_share is None

    @pytest.mark.parametrize(("flushed", "underflows"), [(310.0, False), (311.0, True)])
    def test_so_are_most_elements_below_the_smallest_number_of_fp16(self, flushed, underflows):
        watch = LayerHealth(LayerHealthState())
        watch.fold([view(name="a"), view(name="b")], THRESHOLDS)
        spread = {"elements": 1000.0, "flushed_elements": flushed}
        healthy = {"elements": 1000.0, "flushed_elements": 0.0}
        watch.fold_flushed(
            [
                LayerView(name="a", values=spread, judged=True, family="distribution"),
                LayerView(name="b", values=healthy, judged=True, family="distribution"),
                LayerView(name="unknown", values=spread, judged=True, family="distribution"),
            ],
            THRESHOLDS,
        )
        found = watch.troubled(THRESHOLDS)
        assert found.underflowing_share == (0.5 if underflows else 0.0)
        assert found.underflowing_names == (("a",) if underflows else ())

    def test_without_a_loss_scale_nothing_is_below_it(self):
        watch = LayerHealth(LayerHealthState())
        watch.fold([view()], THRESHOLDS)
        spread = LayerView(name="w", values={"elements": 1000.0}, judged=True)
        watch.fold_flushed([spread], THRESHOLDS)
        assert watch.troubled(THRESHOLDS).underflowing_share is None

    def test_the_share_is_of_the_layers_that_are_judged(self):
        names = [f"layer.{index}" for index in range(20)]
        early = [[view(name=name) for name in names]] * EARLY_SAMPLES
        late = [view(zeros=0.3 if index < 3 else 0.0, name=n) for index, n in enumerate(names)]
        found = watched(*early, late)

        assert found.underflowing_share == pytest.approx(3 / 20)
        assert found.underflowing_names == tuple(names[:3])


def test_what_is_usual_outlives_the_ledger_and_an_attempt_samples_in_a_row_do_not():
    watch = LayerHealth(LayerHealthState())
    for sample in [view(zeros=0.5)] * EARLY_SAMPLES + [view(1e-12)] * 2:
        watch.fold([sample], THRESHOLDS)
    adapter = TypeAdapter(LayerHealthState)
    again = LayerHealth(adapter.validate_json(adapter.dump_json(watch.memory)))
    assert again.memory == watch.memory

    again.fold([view(1e-12, zeros=0.75)], THRESHOLDS)
    assert again.troubled(THRESHOLDS) == TroubledLayers(
        dead=1, dead_names=("w",), underflowing_share=1.0, underflowing_names=("w",)
    )
    again = again.next_attempt()
    again.fold([view(1e-12, zeros=0.75)], THRESHOLDS)
    assert again.troubled(THRESHOLDS).dead == 0
    assert again.troubled(THRESHOLDS).underflowing_share == 1.0


def test_a_name_that_stands_for_no_layer_any_more_is_in_no_trouble():
    watch = LayerHealth(LayerHealthState())
    for sample in [view()] * EARLY_SAMPLES + [view(1e-12, zeros=0.75)] * 3:
        watch.fold([sample], THRESHOLDS)
    assert watch.troubled(THRESHOLDS).dead == 1

    watch.retire(["w", "never seen"])
    assert watch.troubled(THRESHOLDS) == TroubledLayers(
        dead=0, dead_names=(), underflowing_share=None, underflowing_names=()
    )


def test_memory_is_bounded():
    watch = LayerHealth(LayerHealthState(names=["n"] * LAYERS_AT_MOST))
    watch._index = {str(index): index for index in range(LAYERS_AT_MOST)}
    watch.fold([view(name="one too many")], THRESHOLDS)

    assert len(watch.memory.names) == LAYERS_AT_MOST


def attention(bias: float, *, others: float = 0.01) -> list[LayerView]:
    return [
        view(bias, name="encoder.layer.0.attention.self.key.bias", elements=64.0),
        *(view(others, name=f"encoder.layer.{i}.output.dense.weight") for i in range(6)),
    ]


class TestWhatIsNoDeath:
    def test_a_bias_that_softmax_cancels_has_rounding_noise_and_is_never_dead(self):
        """Its true gradient is 0; what is measured wanders between 1e-13 and 1e-9."""
        noise = [1e-9, 3e-10, 8e-10, 2e-11, 7e-12, 1e-12, 9e-14, 2e-13, 5e-14, 1e-14]
        assert watched(*[attention(bias) for bias in noise]).dead == 0

    def test_the_same_size_is_death_where_the_layer_had_a_gradient(self):
        samples = [attention(1e-3)] * 5 + [attention(1e-12)] * 3
        assert watched(*samples).dead_names == ("encoder.layer.0.attention.self.key.bias",)

    def test_a_layer_that_shrank_a_little_below_the_limit_has_not_died(self):
        assert watched(*[attention(2e-9)] * 5, *[attention(9e-11)] * 4).dead == 0

    @pytest.mark.parametrize(
        "pattern", ["h.0.moe.experts.{}.w1", "expert{}.up", "layers.2.branch.{}.fc.weight"]
    )
    def test_an_expert_without_tokens_is_idle_whatever_its_name(self, pattern):
        names = [pattern.format(number) for number in range(8)]
        busy = [view(name=name) for name in names]
        idle = [view(0.0, name=name) for name in names[:2]] + busy[2:]
        found = watched(*[busy] * 6, *[idle] * 5)
        assert (found.dead, found.underflowing_share) == (0, 0.0)

    def test_a_block_of_a_model_is_no_expert(self):
        names = [f"blocks.{number}.mlp.weight" for number in range(8)]
        busy = [view(name=name) for name in names]
        dead = [view(0.0, name=names[0]), *busy[1:]]
        assert watched(*[busy] * 6, *[dead] * 3).dead_names == (names[0],)

    def test_an_embedding_that_is_touched_less_does_not_underflow(self):
        assert watched(*[view(zeros=0.7)] * 5, *[view(zeros=0.96)] * 3).underflowing_share == 0.0


def of_norm(norm: float, name: str) -> LayerView:
    values = {**NO_GRADIENTS, "abs_max": norm / 10, "elements": 1000.0, "sum_squares": norm**2}
    return LayerView(name=name, values=values, judged=True)


class TestExplosion:
    NAMES = tuple(f"blocks.{number}.mlp.weight" for number in range(5))

    def sample(self, of_one: float, of_others: float = 0.1) -> list[LayerView]:
        one, *others = self.NAMES
        return [of_norm(of_one, one), *(of_norm(of_others, name) for name in others)]

    def test_one_layer_that_grows_by_itself_is_found_after_three_samples(self):
        usual = [self.sample(0.1)] * 6
        assert watched(*usual, *[self.sample(20.0)] * 2).exploding == 0
        assert watched(*usual, *[self.sample(20.0)] * 3).exploding_names == (self.NAMES[0],)

    def test_so_is_one_of_two_layers(self):
        usual = [self.sample(0.1)[:2]] * 6
        assert watched(*usual, *[self.sample(30.0)[:2]] * 3).exploding_names == (self.NAMES[0],)

    def test_what_all_layers_do_is_not_one_layers_explosion(self):
        assert watched(*[self.sample(0.1)] * 6, *[self.sample(20.0, 20.0)] * 3).exploding == 0

    def test_a_bias_whose_gradient_was_rounding_noise_does_not_explode(self):
        """That of a convolution, once the batch normalization after it no longer subtracts it."""
        usual, of_bias = 0.1, [self.sample(0.05)] * 3
        assert watched(*[self.sample(1e-5 * usual)] * 6, *of_bias).exploding == 0
        assert watched(*[self.sample(1e-4 * usual)] * 6, *of_bias).exploding == 1

    def test_a_layer_that_grows_slowly_with_training_does_not_explode(self):
        samples = [self.sample(0.1 * 1.05**number) for number in range(150)]
        assert watched(*samples).exploding == 0

    def test_it_ends_when_the_norm_is_back(self):
        found = watched(*[self.sample(0.1)] * 6, *[self.sample(20.0)] * 4, self.sample(0.1))
        assert found.exploding == 0


def test_an_account_of_an_earlier_version_is_filled_up():
    memory = LayerHealthState(
        names=["w"],
        early_zero_shares=[[0.0]],
        early_full=[True],
        underflowing=[False],
        dead_samples=[0],
        zero_samples=[0],
        learns=[True],
        sparse=[False],
    )
    watch = LayerHealth(memory)
    for sample in [view()] * 5 + [view(1e-12)] * 3:
        watch.fold([sample], THRESHOLDS)
    assert watch.troubled(THRESHOLDS).dead == 1
