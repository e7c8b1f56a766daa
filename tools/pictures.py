"""The pictures of docs/images, taken again from today's pages and boards: `make pictures`.

Status page and boards show a job of the demo (`examples/demo`) that goes wrong, and those of
several runs a healthy one as well; the page of a comparison shows the demo's model, that of an
evaluation a model of `benchmarks/advice`. The boards are drawn by a program that GRAFANA_RENDERER
names, since no Grafana comes with the project: it is run with --dashboard FILE --prom URL
--from SECONDS --to SECONDS --var NAME=VALUE --scrape-interval 1s --theme light --out FILE. Without
one, their pictures stay as they are.
"""

import io
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import mp_agent
from examples.demo.corpus import VOCABULARY_SIZE, batches, load_corpus
from examples.demo.model import CONTEXT, CharTransformer, next_character_loss
from grafana.boards import BOARDS
from grafana.panel import Board
from tools.browser import chromium_arguments, find_browser
from tools.jobs import ROOT, Job, torchrun_job
from tools.servers import binaries
from tools.servers.running import Prometheus, ServerError, prometheus, read_json

IMAGES = ROOT / "docs" / "images"
RUN, HEALTHY_RUN = "char-transformer", "char-transformer-healthy"
_SCENARIOS = {RUN: "residual", HEALTHY_RUN: "healthy"}
FP16_MAX = 65504
_COLORS = 192
_BLANK_BYTES = 20_000
_BOARD_HEIGHT = 1500
"""Of what is kept of a board, its top: what is wrong, and the first curves."""
_WAIT_SECONDS = 900.0
_MORE_STEPS = 25
"""After the first critical condition, so that curves show what it is about."""


def main() -> int:
    """Take all pictures; 1 where a browser or a server is missing."""
    chromium, server = find_browser(), binaries.find("prometheus")
    if chromium is None or server is None:
        print("Chromium or Prometheus is missing", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="mp_agent-pictures-") as directory,
        sync_playwright() as (playwright),
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=chromium_arguments())
        folder = Path(directory)
        _reports(browser, folder)
        with _watched_jobs(server, folder) as (job, watching):
            _status_page(browser, job)
            job.process.wait(_WAIT_SECONDS)
            _boards(watching, folder)
        browser.close()
    return 0


def _reports(browser: Browser, folder: Path) -> None:
    """Picture the pages of a comparison of precisions and of an evaluation of a plan."""
    (folder / "compare.html").write_text(_comparison(), "utf-8")
    model = f"{ROOT / 'benchmarks' / 'advice' / 'models.py'}:odd_mlp"
    evaluate = ("evaluate", model, "--precision", "bf16-autocast", "--steps", "60")
    page = folder / "evaluate.html"
    subprocess.run(
        [sys.executable, "-m", "mp_agent", *evaluate, "--html", str(page)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for name, height in (("compare", 1330), ("evaluate", 1500)):
        shown = _open(browser, (folder / f"{name}.html").as_uri(), width=1080, height=height)
        _keep(shown.screenshot(), f"{name}-light")


def _comparison() -> str:
    """Return the page on the demo's model, whose inputs FP16 cannot hold."""
    torch.manual_seed(0)
    corpus = load_corpus()
    every = batches(corpus, 8, CONTEXT, 0, 1)
    tokens, following, offsets = next(batch for batch in every if batch[2].max() > FP16_MAX)
    model = CharTransformer(VOCABULARY_SIZE, len(corpus), normalised_inputs=False)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return next_character_loss(model(batch[0], batch[2]), batch[1])

    batch = (tokens, following, offsets)
    return mp_agent.compare_precision(
        model, batch, loss, dtypes=["fp16-autocast", "bf16-autocast"]
    ).as_html()


@contextmanager
def _watched_jobs(server: Path, folder: Path) -> Iterator[tuple[Job, Prometheus]]:
    """Run a healthy job to its end, then the one to picture, under a Prometheus with the rules.

    Their minutes are seconds.
    """
    rules = folder / "rules.yaml"
    write = ("rules", "--time-scale", str(1 / 60), "--output", str(rules))
    subprocess.run([sys.executable, "-m", "mp_agent", *write], check=True, capture_output=True)
    with (
        prometheus(
            server, folder / "data", rules=rules, alertmanager_url="http://127.0.0.1:9"
        ) as watching,
        _job(HEALTHY_RUN, folder) as (healthy, first_address),
    ):
        watching.scrape([first_address])
        healthy.process.wait(_WAIT_SECONDS)
        with _job(RUN, folder) as (job, address):
            watching.scrape([first_address, address])
            yield job, watching


@contextmanager
def _job(run: str, folder: Path) -> Iterator[tuple[Job, str]]:
    """Run a job of the demo; its agent, at the address, stays after its end."""
    arguments = ("-m", "examples.demo.train", "--scenario", _SCENARIOS[run])
    environment = {
        "MP_AGENT_LAYER_INTERVAL": "10",
        "MP_AGENT_LINGER_SECONDS": str(_WAIT_SECONDS),
        "MP_AGENT_PORT": "0",
    }
    log_file = folder / f"{run}.log"
    with torchrun_job(arguments, run=run, log_file=log_file, environment=environment) as job:
        status = _until(job, lambda: job.agent())
        yield job, status.url.removeprefix("http://")


def _until(job: Job, look: Any) -> Any:
    """Return the first result of `look` that is not None."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(0.2)
    raise ServerError(f"nothing to picture\n{job.log_tail()}")


def _status_page(browser: Browser, job: Job) -> None:
    """Picture the status page while a critical condition is in force."""
    status = job.agent()
    assert status is not None

    def in_trouble() -> int | None:
        (run,) = read_json(f"{status.url}/api/v1/snapshot")["runs"] or [None]
        critical = (
            [one for one in run["conditions"] if one["severity"] == "critical"] if run else []
        )
        step = run["summary"]["step"] if critical else None
        return step if step and step >= critical[0]["since_step"] + _MORE_STEPS else None

    _until(job, in_trouble)
    looks = (("light", "light", 1280), ("top-dark", "dark", 1280), ("narrow", "dark", 400))
    for name, theme, width in looks:
        page = _open(browser, status.url, theme=theme, width=width, height=1150)
        page.wait_for_selector("#chart-norm canvas, #chart-loss canvas")
        _keep(page.screenshot(full_page=name != "top-dark"), f"status-{name}")


def _boards(watching: Prometheus, folder: Path) -> None:
    """Picture the dashboards as they were in the job's last moment."""
    renderer = shlex.split(os.environ.get("GRAFANA_RENDERER", ""))
    if not renderer:
        print("GRAFANA_RENDERER names no program: the pictures of boards stay as they are")
        return
    begins = {
        run: _moment(watching, f'min_over_time(timestamp(mp_agent_step{{run="{run}"}})')
        for run in _SCENARIOS
    }
    end = _moment(watching, f'max_over_time(timestamp(mp_agent_run_active{{run="{RUN}"}} == 1)')
    for board in BOARDS:
        is_of_one = board.one_run and not board.two_runs
        drawn = folder / f"{board.uid}.png"
        options = {
            "--dashboard": ROOT / "grafana" / "dashboards" / f"{board.uid}.json",
            "--prom": watching.url,
            "--from": int(begins[RUN if is_of_one else HEALTHY_RUN]) - 5,
            "--to": int(end),
            "--scrape-interval": "1s",
            "--theme": "light",
            "--out": drawn,
        }
        words = [str(word) for option in options.items() for word in option]
        subprocess.run([*renderer, *words, *_chosen(board)], check=True, stdout=subprocess.DEVNULL)
        name = board.title.rpartition(" ")[2].lower()
        if _keep(drawn.read_bytes(), f"board-{name}", height=_BOARD_HEIGHT) < _BLANK_BYTES:
            raise ServerError(f"the renderer drew no panels of {name}; is the machine busy?")


def _moment(watching: Prometheus, expression: str) -> float:
    """Return the moment that an expression finds in the last half hour."""
    (found,) = watching.query(f"{expression}[30m:1s])")
    return float(found["value"][1])


def _chosen(board: Board) -> list[str]:
    """Return the renderer's options that say which runs are chosen at the top of a board."""
    chosen = {"run": RUN if board.one_run else "All"}
    if board.two_runs:
        chosen["other_run"] = HEALTHY_RUN
    return [word for name, run in chosen.items() for word in ("--var", f"{name}={run}")]


def _open(browser: Browser, url: str, *, width: int, height: int, theme: Any = "light") -> Page:
    viewport: Any = {"width": width, "height": height}
    page = browser.new_context(viewport=viewport, color_scheme=theme).new_page()
    page.goto(url)
    return page


def _keep(picture: bytes, name: str, *, height: int | None = None) -> int:
    """Write a picture, or so many lines of it, in few colours: a third of the bytes.

    Returns its bytes.
    """
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    few = image.crop((0, 0, image.width, min(height or image.height, image.height)))
    few = few.quantize(_COLORS, dither=Image.Dither.NONE)
    few.save(IMAGES / f"{name}.png", optimize=True)
    size = (IMAGES / f"{name}.png").stat().st_size
    print(f"docs/images/{name}.png: {size} bytes")
    return size


if __name__ == "__main__":
    sys.exit(main())
