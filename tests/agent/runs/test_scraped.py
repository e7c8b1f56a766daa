"""Two runs that a real Prometheus has are compared by their names."""

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.cli import main
from mp_agent.errors import CompareError
from mp_agent.runs.command import read_scraped_run
from tools.synthetic_store import prometheus_over

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRAPES = 200
SCRAPE_SECONDS = 15
STEPS_PER_SCRAPE = 5
PARTS_AT = 600
SKIPS_AT = 800
LAYER_STEPS = 50
"""Layers are measured every so many steps, and their gauges keep the values."""


def scrape(run: str, number: int, offset: int) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of the series at one scrape of a run."""
    step = number * STEPS_PER_SCRAPE + offset
    bf16 = run == "bf16"
    drift = 0.3 * (step - PARTS_AT) / PARTS_AT if bf16 and step >= PARTS_AT else 0.0
    yield "step", "", step
    yield "loss", "", 2.0 - 0.5 * step / 1000 + drift + 0.002 * (number % 3)
    yield "grad_norm", "", 1.0 + 0.02 * (number % 5)
    yield "grad_norm", ',optimizer="1"', 50.0 + 40 * bf16
    yield "learning_rate", "", 1e-3
    yield "skipped_steps_total", "", 3.0 + (bf16 and step >= SKIPS_AT)
    sampled = step // LAYER_STEPS * LAYER_STEPS
    yield "sampled_step", ',family="gradients"', sampled
    for layer in ("embed", "head"):
        odd = bf16 and layer == "head" and sampled >= 700
        yield "layer_grad_norm", f',layer="{layer}"', 3.0 if odd else 1.0
    yield "parameters_trained_ratio", "", 0.012 if bf16 else 0.88
    yield "run_info", f',precision="{run}",strategy="ddp",world_size="2"', 1


@pytest.fixture(scope="module")
def address(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with an fp32 and a bf16 run, whose scrapes saw different steps."""
    directory = tmp_path_factory.mktemp("scraped")
    end = int(time.time()) // SCRAPE_SECONDS * SCRAPE_SECONDS - 600
    lines = [
        f'mp_agent_{name}{{run="{run}",job="train",instance="a:9464"{labels}}} {float(value)} '
        f"{end - SCRAPE_SECONDS * (SCRAPES - number)}\n"
        for run, offset in (("fp32", 0), ("bf16", 2))
        for number in range(SCRAPES)
        for name, labels, value in scrape(run, number, offset)
    ]
    text = directory / "runs.txt"
    # A series at a time, as OpenMetrics has them; the sort keeps the order of time.
    text.write_text("".join(sorted(lines, key=lambda line: line.split(" ")[0])) + "# EOF\n")
    (directory / "data").mkdir()
    command = ["tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    files = [str(text), str(directory / "data")]
    subprocess.run([server("promtool"), *command, *files], check=True, stdout=subprocess.DEVNULL)
    with prometheus_over(server("prometheus"), directory) as url:
        yield url


def compare(address: str, first: str, second: str, *options: str) -> Result:
    arguments = ["compare", first, second, "--prometheus", address, "--start", "1d", *options]
    return CliRunner().invoke(main, arguments)


def test_the_bf16_run_leaves_the_fp32_run_where_it_does(address: str) -> None:
    document = json.loads(compare(address, "fp32", "bf16", "--json").output)
    parted = {one["quantity"]: one for one in document["departures"]}
    assert set(parted) == {"loss", "skipped"}
    # The loss leaves its noise of 0.3 % by the floor of 1 % some 70 steps after the drift begins.
    assert PARTS_AT <= parted["loss"]["step"] <= PARTS_AT + 100
    assert abs(parted["skipped"]["step"] - SKIPS_AT) <= STEPS_PER_SCRAPE
    (layer,) = document["layers"]
    assert (layer["layer"], layer["step"]) == ("head", 700)


def test_it_is_printed_with_the_distance_of_the_scrapes_and_the_facts_that_differ(
    address: str,
) -> None:
    done = compare(address, "fp32", "bf16")
    assert done.exit_code == 0, done.output
    assert "The runs part at step " in done.output
    assert "Steps are matched within 5" in done.output
    assert "precision: fp32 against bf16" in done.output
    assert "88 % of the weights are trained against 1.2 %" in done.output


def test_a_run_agrees_with_itself(address: str) -> None:
    document = json.loads(compare(address, "fp32", "fp32", "--json").output)
    assert document["departures"] == [] and document["layers"] == []


def test_a_run_is_read_as_it_was_scraped(address: str) -> None:
    run = read_scraped_run(address, "bf16", ReadOptions(), time.time())
    assert len(run.steps) == SCRAPES
    assert run.scraped_steps == STEPS_PER_SCRAPE
    assert sorted(run.steps)[:3] == [2, 7, 12]
    assert run.steps[7].values == pytest.approx(
        {"loss": 2.0 - 0.5 * 7 / 1000 + 0.002, "grad_norm": 1.02, "learning_rate": 1e-3}
    )
    marked = [step for step, seen in run.steps.items() if seen.marks]
    assert marked == [802], "what stood before the first scrape marks no step"
    assert run.facts == {
        "precision": "bf16",
        "strategy": "ddp",
        "world_size": "2",
        "trained_ratio": "0.012",
    }
    assert set(run.layers) == {LAYER_STEPS * n for n in range(SCRAPES * STEPS_PER_SCRAPE // 50)}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("fp32", "fp16"), "no run 'fp16' in that time (known: bf16, fp32)"),
        (("fp32", "bf16", "--end", "12h"), "no run 'fp32' in that time (known: none)"),
        (("fp32", "bf16", "--scrape-interval", "0s"), "--scrape-interval"),
    ],
)
def test_what_is_not_there_is_named(address: str, arguments: tuple[str, ...], problem: str) -> None:
    done = compare(address, *arguments)
    assert done.exit_code == 2
    assert problem in " ".join(done.output.split())


def test_an_address_that_is_none_or_does_not_answer_is_named() -> None:
    assert "give http://host:port" in compare("prometheus:9090", "a", "b").output
    with pytest.raises(CompareError, match=r"http://127\.0\.0\.1:9: cannot be asked"):
        read_scraped_run("http://user:secret@127.0.0.1:9", "a", ReadOptions(), time.time())
    one = CliRunner().invoke(main, ["compare", "a", "--prometheus", "http://127.0.0.1:9"])
    assert one.exit_code == 2 and "compares two runs" in one.output
