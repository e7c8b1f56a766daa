"""A baseline of good trainings finds mistakes, and none in another seed, world or resumed run."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from mp_agent.catalog.thresholds import resolve
from mp_agent.cli import main
from mp_agent.errors import BaselineError, CompareError
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.commands.flight import evidence_at
from mp_agent.node.run.run import Run
from mp_agent.records.baseline import Baseline, read_baseline
from mp_agent.runs.baseline import (
    BaselineComparison,
    baseline_of,
    compare_with_baseline,
    departure_text,
    good_run,
)
from mp_agent.settings import Settings
from tests.agent.node.accounting.test_without_gradient import table as layers_of
from tests.agent.node.builders import merged_step
from tests.agent.runs.trainings import MISTAKES, STEPS, Training, train

pytestmark = [pytest.mark.slow, pytest.mark.long]

WHOLE = Settings(flight_steps=2 * STEPS)
CONDITION = "MpAgentUnlikeBaseline"


@pytest.fixture(autouse=True)
def records_of_whole_runs(monkeypatch):
    monkeypatch.setenv("MP_AGENT_FLIGHT_STEPS", str(WHOLE.flight_steps))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> list[Path]:
    """Return two good runs."""
    base = tmp_path_factory.mktemp("good")
    return [train(Training(seed=seed), base / f"seed{seed}") for seed in (2, 3)]


@pytest.fixture(scope="module")
def baseline(good, tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("baseline") / "good.json"
    runs = [good_run(evidence_at(run, WHOLE)) for run in good]
    path.write_bytes(msgspec.json.encode(baseline_of(runs)))
    return path


def texts(found: BaselineComparison) -> list[str]:
    return [departure_text(one) for one in found.departures]


def live_conditions(run_dir: Path, settings: Settings) -> list[str]:
    """Return the conditions that a node agent finds that reads the run."""
    run = Run(run_dir, settings)
    try:
        for now_seconds in range(3):
            run.poll(float(now_seconds))
        view = run.export(3.0, 3.0).view
        assert view is not None
        return [one.name for one in view.conditions]
    finally:
        run.close()


EXPECTED = {
    "frozen-layer-too-few": (1, "embed.weight: parameter trained (good runs: not trained)"),
    "initialization": (1, "layer_grad_norm"),
    "dropout-doubled": (STEPS, "loss "),
    "loss-divided-twice": (1, "loss "),
}
"""The last step on which each is first seen, and what is different."""
assert set(EXPECTED) == set(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_live_and_in_the_record(mistake, baseline, tmp_path):
    run_dir = train(Training(seed=20, mistake=mistake), tmp_path / mistake)
    found = compare_with_baseline(str(run_dir), baseline)
    step, text = EXPECTED[mistake]
    assert found.departures and found.departures[0].step <= step, found
    assert any(text in one for one in texts(found)), texts(found)
    # Nothing else sees it.
    assert live_conditions(run_dir, Settings(dir=tmp_path)) == []
    (run_dir / "ledger.json").unlink(missing_ok=True)
    assert live_conditions(run_dir, Settings(dir=tmp_path, baseline=baseline)) == [CONDITION]


HEALTHY = {
    "other-seed": Training(seed=11),
    "two-ranks": Training(seed=12, ranks=2),
    "resumed": Training(seed=13, resumed=100, steps=STEPS - 100),
    "longer": Training(seed=14, steps=STEPS + 64),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_may_vary_is_no_difference(name, baseline, tmp_path):
    run_dir = train(HEALTHY[name], tmp_path / name)
    found = compare_with_baseline(str(run_dir), baseline)
    assert not found.departures, texts(found)
    assert found.compared["loss"] > 100 and found.compared["grad_norm"] > 100
    assert live_conditions(run_dir, Settings(dir=tmp_path, baseline=baseline)) == []


def test_a_baseline_of_two_ranks_holds_one_rank(good, tmp_path):
    run_dir = train(Training(seed=15, ranks=2), tmp_path / "two")
    path = tmp_path / "two.json"
    path.write_bytes(msgspec.json.encode(baseline_of([good_run(evidence_at(run_dir, WHOLE))])))
    for run in good:
        assert not texts(compare_with_baseline(str(run), path))


def test_the_commands_save_and_compare(good, tmp_path):
    path, runner = tmp_path / "saved.json", CliRunner()
    done = runner.invoke(main, ["baseline", "save", *map(str, good), "--output", str(path)])
    assert done.exit_code == 0 and "14 trained layers" in done.output, done.output
    done = runner.invoke(main, ["compare", str(good[0]), "--baseline", str(path)])
    assert done.exit_code == 0 and "is like its baseline, steps 1 to" in done.output, done.output
    changed = read_baseline(path)
    layers = {name: count for name, count in changed.layers.items() if name != "head.bias"}
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(changed, layers=layers)))
    done = runner.invoke(main, ["compare", str(good[0]), "--baseline", str(path), "--json"])
    document = json.loads(done.output)
    assert done.exit_code == 1 and document["format"] == "mp_agent baseline comparison"
    (only,) = document["departures"]
    assert (only["layer"], only["value"], only["step"]) == ("head.bias", "trained", 1)
    done = runner.invoke(main, ["compare", str(good[0]), str(good[1]), "--baseline", str(path)])
    assert done.exit_code == 2 and "--baseline compares one run" in done.output
    done = runner.invoke(main, ["baseline", "save", str(tmp_path / "no"), "--output", str(path)])
    assert done.exit_code == 2 and "no: no such file" in done.output


def test_formats_elements_and_limits_are_compared(good, baseline, tmp_path):
    known = read_baseline(baseline)
    other = msgspec.structs.replace(
        known,
        facts={**known.facts, "parameter_format": ("bf16",), "autocast_format": ("bf16",)},
        layers={**known.layers, "head.bias": 16.0},
        bands={
            name: tuple(
                tuple(msgspec.structs.replace(b, low=b.low / 2, high=b.high / 2) for b in bands)
                for bands in own
            )
            for name, own in known.bands.items()
            if name in ("learning_rate", "clip_max_norm")
        },
    )
    path = tmp_path / "other.json"
    path.write_bytes(msgspec.json.encode(other))
    found = texts(compare_with_baseline(str(good[0]), path))
    assert "step 1: parameter_format fp32 (good runs: bf16)" in found
    assert "step 1: autocast_format none (good runs: bf16)" in found
    assert "step 1: head.bias: elements 8 (good runs: 16)" in found
    assert "step 1: clip_max_norm 1 (good runs: 0.5 to 0.5)" in found
    assert any("learning_rate" in text for text in found), found


def test_optimizers_that_take_turns_are_no_difference():
    """Samples that lack what the other optimizer steps; a third one that begins late."""

    def departures(baseline: Baseline, *samples: Sequence[str]) -> list[str]:
        account = Accumulator(
            resolve({}),
            progress=Progress(),
            counters=CounterStore(),
            window_seconds=120.0,
            baseline=baseline,
        )
        for sequence, names in enumerate(samples, 1):
            account.fold_step(merged_step(sequence, norm=1.0))
            table = layers_of(dict.fromkeys(names, True))
            account.fold_layers(sequence, table, step_judged=True)
        return [departure_text(one) for one in account.departures({}) or ()]

    known = Baseline(
        runs=("a",), world_sizes=(1,), layers={"g": 4.0, "d": 4.0}, other_layers=("late",)
    )
    turns = (["g"], ["d"], ["g"], ["d"])
    assert departures(known, *turns, ["g", "late"]) == []
    lacking = "step 1: d: parameter not trained (good runs: trained)"
    assert departures(known, ["g"], ["g"], ["g"]) == [lacking]
    assert departures(known, ["g"], ["g"]) == []
    more = "step 2: x: parameter trained (good runs: not trained)"
    assert departures(known, ["g", "d"], ["g", "x"], ["d", "x"], ["d"], ["g", "x"]) == [more]
    assert departures(known, ["other"], ["other"], ["other"]) == []


GOOD = Baseline(runs=("a",), world_sizes=(1,), layers={"w": 1.0})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b"{}", "format '', version 0; this release reads 'mp_agent baseline', version 1"),
        (b'{"format": "mp_agent baseline", "version": 2}', "version 2; this release reads"),
        (b'{"format": "mp_agent baseline", "version": 1}', "missing required field `runs`"),
        (
            msgspec.json.encode(GOOD).replace(b'"layers":{"w":1.0}', b'"layers":{"w":"x"}'),
            r"Expected `float`, got `str` - at `\$.layers",
        ),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, runs=())), r"runs has value \[\]"),
        (
            msgspec.json.encode(GOOD).replace(
                b'"bands":{}', b'"bands":{"loss":[[[1,8,2.0,1.0]],[]]}'
            ),
            r"bands.loss\[0\]\[0\] has value \[1, 8, 2.0, 1.0\]",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_by_field_and_value(content, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BaselineError, match=message) as refused:
        read_baseline(path)
    assert str(path) in str(refused.value)


def test_a_bad_baseline_costs_a_run_nothing_else(good, tmp_path, caplog):
    path = tmp_path / "bad.json"
    path.write_text("{}")
    for bad in (path, tmp_path / "absent.json", tmp_path):
        run = Run(good[0], Settings(dir=tmp_path, baseline=bad))
        run.poll(0.0)
        export = run.export(0.0, 0.0)
        run.close()
        (good[0] / "ledger.json").unlink(missing_ok=True)
        assert export.view is not None and export.view.departures is None
        assert export.agent.setting_errors == 1
        assert any("baseline" in feature for feature in export.agent.unsupported)
        assert f"baseline has value {bad}" in caplog.text


def test_what_was_not_measured_makes_no_baseline(good):
    run = good_run(evidence_at(good[0], WHOLE))
    empty = replace(run, layers={}, quantities={"loss": {}})
    with pytest.raises(CompareError, match="nothing to compare with"):
        baseline_of([empty])


def test_bands_are_finite_and_hold_the_runs_they_are_of(good):
    runs = [good_run(evidence_at(run, WHOLE)) for run in good]
    made = baseline_of(runs)
    for own in made.bands.values():
        for band in (band for bands in own for band in bands):
            assert -inf < band.low <= band.high < inf and band.first <= band.last
    for run in runs:
        for layer, norms in run.layer_norms.items():
            for step, norm in norms.items():
                held = made.layer_band(layer, step)
                assert held is not None and held.low <= norm <= held.high
