"""Bars of layers: their lengths, and what stands behind them."""

from mp_agent.flight.postmortem.analysis import LayerSummary
from mp_agent.flight.report_page import layer_bars


def summary(name: str, norm: float = 0.0, nonfinite: float = 0.0) -> LayerSummary:
    return LayerSummary(
        name=name, norm=norm, abs_max=norm, nonfinite_elements=nonfinite, elements=8.0
    )


def test_norms_are_logarithmic_and_nonfinite_elements_a_share():
    norms = {"large": 100.0, "middle": 10.0, "small": 1.0, "zero": 0.0}
    found = layer_bars([summary("lost", 1.0, 2.0), *(summary(*item) for item in norms.items())])
    assert [(bar.percent, bar.kind, bar.text) for bar in found] == [
        (25.0, "bad", "2 of 8 NaN/Inf"),
        (100.0, "fine", "100"),
        (57.5, "fine", "10"),
        (15.0, "fine", "1"),
        (0.0, "fine", "0"),
    ]


def test_equal_norms_are_all_full_bars():
    assert [bar.percent for bar in layer_bars([summary("a", 2.0), summary("b", 2.0)])] == [100, 100]
