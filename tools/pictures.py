"""The pictures of docs/images, taken again from today's pages and boards: `make pictures`.

Status page and boards show one job of the demo (`examples/demo`), the page of a comparison its
model, that of an evaluation a model of `benchmarks/advice`. The boards are drawn by a program that
GRAFANA_RENDERER names, since no Grafana comes with the project: it is run with --dashboard FILE
--prom URL --from SECONDS --to SECONDS --var NAME=VALUE --theme light --out FILE. Without one, their
pictures stay as they are.
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
from tools.browser import chromium_arguments, find_browser
from tools.jobs import ROOT, Job, torchrun_job
from tools.servers import binaries
from tools.servers.running import Prometheus, ServerError, prometheus, read_json

IMAGES = ROOT / "docs" / "images"
BOARDS = ("fleet", "run", "layers", "ranks")
SCENARIO, RUN = "residual", "char-transformer"
FP16_MAX = 65504
_COLORS = 96
_BLANK_BYTES = 20_000
_BOARD_HEIGHT = 1500
"""Of what is kept of a board, its top: what is wrong, and the first curves."""
_WAIT_SECONDS = 240.0
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
        with _watched_job(server, folder) as (job, watching):
            _status_page(browser, job)
            job.process.wait(_WAIT_SECONDS)
            _boards(job, watching, folder)
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
def _watched_job(server: Path, folder: Path) -> Iterator[tuple[Job, Prometheus]]:
    """Run the demo's job under a Prometheus with the rules, minutes as seconds."""
    rules = folder / "rules.yaml"
    write = ("rules", "--time-scale", str(1 / 60), "--output", str(rules))
    subprocess.run([sys.executable, "-m", "mp_agent", *write], check=True, capture_output=True)
    arguments = ("-m", "examples.demo.train", "--scenario", SCENARIO)
    environment = {"MP_AGENT_LAYER_INTERVAL": "10", "MP_AGENT_LINGER_SECONDS": "120"}
    with (
        prometheus(
            server, folder / "data", rules=rules, alertmanager_url="http://127.0.0.1:9"
        ) as at,
        torchrun_job(
            arguments, run=RUN, log_file=folder / "job.log", environment=environment
        ) as job,
    ):
        status = _until(job, lambda: job.agent())
        at.scrape([status.url.removeprefix("http://")])
        yield job, at


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


def _boards(job: Job, watching: Prometheus, folder: Path) -> None:
    """Picture the dashboards over the time of the job."""
    renderer = shlex.split(os.environ.get("GRAFANA_RENDERER", ""))
    if not renderer:
        print("GRAFANA_RENDERER names no program: the pictures of boards stay as they are")
        return
    (steps,) = watching.query(f'min_over_time(timestamp(mp_agent_step{{run="{RUN}"}})[10m:1s])')
    begin, end = float(steps["value"][1]) - 5, time.time()
    for board in BOARDS:
        drawn = folder / f"{board}.png"
        given = {
            "dashboard": ROOT / "grafana" / "dashboards" / f"mp-agent-{board}.json",
            "prom": watching.url,
            "from": int(begin),
            "to": int(end),
            "var": f"run={RUN}",
            "theme": "light",
            "out": drawn,
        }
        options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        subprocess.run([*renderer, *options], check=True, stdout=subprocess.DEVNULL)
        if _keep(drawn.read_bytes(), f"board-{board}", height=_BOARD_HEIGHT) < _BLANK_BYTES:
            raise ServerError(f"the renderer drew no panels of {board}; is the machine busy?")


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
