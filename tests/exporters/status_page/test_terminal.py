"""A run in a terminal has what the page has, and shows names as they are."""

import re
from dataclasses import replace
from io import StringIO
from typing import Any, Literal

import pytest
from rich.console import Console, RenderableType

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.exporters.status_page.report import StepHistory, snapshot_report
from mp_agent.exporters.status_page.terminal import Curves, run_panel
from mp_agent.records.health import LatestValues
from mp_agent.records.views import FirstNonfinite
from tests.agent.node.builders import merged_step
from tests.exporters.status_page.test_report import (
    CONDITION,
    TRACKER,
    broken,
    stretched,
    with_view,
)


def printed(drawn: RenderableType, *, color: bool = False) -> str:
    system: Literal["standard"] | None = "standard" if color else None
    console = Console(file=StringIO(), width=100, force_terminal=color, color_system=system)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


def history(*norms: float, scale: float = 65536.0) -> dict[str, Any]:
    kept = StepHistory()
    for number, norm in enumerate(norms, start=1):
        kept.add(merged_step(number, norm=norm, loss_scale=scale))
    return dict(kept.columns())


def drawn(source: Any, **wanted: Any) -> str:
    (run,) = snapshot_report([source], {}, 12.0)["runs"]
    choice = {"sort": "grad_norm", "layers": 12, "now_unix_seconds": 12.0, **wanted}
    return printed(run_panel(run, history(1.0, 2.0), DEFAULTS, **choice))


def test_verdict_conditions_curves_layers_ranks_and_agent_are_there_in_this_order() -> None:
    text = drawn(with_view(conditions=(CONDITION,)))
    expected = (
        *(
            "critical: the gradients explode",
            "grad norm 2",
            "MpAgentGradientExplosion since step 7",
        ),
        *("The norm was 2000.", "What to do: Clip.", "steps 1 to 2", "1 of 1 layers, by norm"),
        *("ranks of this node", "node agent 0.1.0", "records dropped 0"),
    )
    places = [text.find(part) for part in expected]
    assert -1 not in places, expected[places.index(-1)]
    assert places == sorted(places)


def test_what_the_post_mortem_found_is_said_once_for_all_critical_conditions() -> None:
    found = replace(CONDITION, postmortem="Likely: an explosion.")
    text = drawn(with_view(conditions=(found, replace(found, name="MpAgentLossNonFinite"))))
    assert text.count("What to do: Clip.") == 2
    assert text.count("Post-mortem: Likely: an explosion. /postmortem/llama") == 1
    assert "Post-mortem" not in drawn(with_view(conditions=(CONDITION,)))


def test_stretched_intervals_have_their_reason_and_the_probe_s_time_is_a_share() -> None:
    text = " ".join(drawn(stretched(every=4.0)).replace("│", " ").split())
    assert "layers are measured on every 400 steps instead of 100, since measuring took" in text
    assert "overhead_budget allows; gradients on every 4 steps" in text
    assert ", 0.9 % of the step time," in text
    plain = drawn(with_view())
    assert "layers are measured" not in plain and "of the step time" not in plain


def test_where_the_trackers_show_the_run_is_given_as_text() -> None:
    assert f"in wandb: {TRACKER.name}, {TRACKER.url}" in drawn(with_view(trackers=(TRACKER,)))
    nowhere = drawn(with_view(trackers=(replace(TRACKER, name="x", url=""),)))
    assert "in wandb: x" in nowhere and "x," not in nowhere


def test_where_numbers_first_went_wrong_and_which_ranks_are_missing_is_shown() -> None:
    first = FirstNonfinite(step=9, rank="1", layer="w", phase="backward")
    four_of_six = replace(merged_step(9), world_size=6, present_ranks=frozenset((0, 1, 3, 4)))
    text = drawn(with_view(first_nonfinite=first, latest=LatestValues(step=four_of_six)))
    assert "first non-finite value: step 9, backward, rank 1, w" in text
    assert "missing ranks: 2, 5" in text


def test_of_many_missing_ranks_the_first_are_shown_and_all_are_counted() -> None:
    one_of_many = replace(merged_step(9), world_size=1000, present_ranks=frozenset((3,)))
    text = drawn(with_view(latest=LatestValues(step=one_of_many)))
    assert "missing ranks: 0, 1, 2, 4" in text
    assert "15, 16 and 983 more" in " ".join(text.split())


def test_a_node_without_rank_0_shows_its_ranks_and_its_agent() -> None:
    text = drawn(replace(with_view(), view=None, layers=[]))
    assert "root agent" in text
    assert "ranks of this node" in text


@pytest.mark.parametrize("name", ["[red]llama[/red]", "a[/b]"])
def test_a_name_with_markup_is_shown_as_it_is(name: str) -> None:
    assert name in drawn(replace(with_view(), run=name))


def test_no_layers_are_shown_where_none_are_wanted() -> None:
    assert "layers, by" not in drawn(with_view(), layers=0)


def test_a_curve_rises_with_its_values_and_names_its_ends() -> None:
    text = printed(Curves(history(0.5, 1.0, 2.0, 4.0), DEFAULTS))
    (line,) = (line for line in text.splitlines() if "grad norm" in line)
    assert "▁▃▆█" in line
    assert line.split()[-3:] == ["0.5", "4", "4"]


def test_a_curve_of_many_steps_keeps_the_one_that_stands_out() -> None:
    norms = [1.0] * 1000
    norms[431] = 5000.0
    text = printed(Curves(history(*norms), DEFAULTS), color=True)
    (line,) = (line for line in text.splitlines() if "grad norm" in line)
    # Above the limit of a critical alert it is red.
    assert "\x1b[1;31m█" in line
    assert line.count("\x1b[") == 2
    assert line.count("▁") == 51
    assert "…" not in line


def test_a_constant_curve_and_one_of_a_single_step_are_drawn() -> None:
    assert "▅" in printed(Curves(history(1.0), DEFAULTS))
    assert "▅▅" in printed(Curves(history(1.0, 1.0), DEFAULTS))


def test_a_run_with_nan_shows_no_earlier_value_as_the_present_one() -> None:
    text = drawn(broken())
    assert "loss NaN or Inf since step 584 (last 0.0732)" in " ".join(text.split())
    assert "grad norm NaN or Inf since step 584 (last 2)" in " ".join(
        text.replace("│", " ").split()
    )


def test_the_layer_with_the_first_nan_is_on_top_and_norms_have_their_step() -> None:
    lines = drawn(broken(), layers=1).splitlines()
    (head,) = (at for at, line in enumerate(lines) if "1 of 2 layers" in line)
    assert "norm of step" in lines[head + 1]
    assert re.search(r"\bb\b.*\b704\b.*\b580\b", lines[head + 2])


def test_the_present_value_of_a_curve_that_ended_in_nan_is_none() -> None:
    kept = StepHistory()
    for number in range(1, 9):
        bad = float(number > 5)
        kept.add(merged_step(number, loss=1.0, norm=2.0, loss_nonfinite=bad, nan_elements=bad))
    lines = printed(Curves(dict(kept.columns()), DEFAULTS)).splitlines()
    ends = [line for line in lines if line.startswith(("loss", "grad norm"))]
    assert len(ends) == 2 and all(line.rstrip().endswith("NaN, Inf") for line in ends)


def test_an_answer_of_an_older_agent_is_drawn() -> None:
    (run,) = snapshot_report([with_view()], {}, 12.0)["runs"]
    added = re.compile(r"_step$|^first_nonfinite$|^step$")
    older = {
        **run,
        "summary": {k: v for k, v in run["summary"].items() if k == "step" or not added.search(k)},
        "layers": [{k: v for k, v in row.items() if not added.search(k)} for row in run["layers"]],
    }
    older["summary"]["first_nonfinite"] = None
    kept = {k: v for k, v in history(1.0, 2.0).items() if not k.endswith("_nonfinite")}
    panel = run_panel(older, kept, DEFAULTS, sort="grad_norm", layers=3, now_unix_seconds=12.0)
    assert "grad norm 2" in printed(panel)
