"""A real node agent that sends a run to real trackers, offline."""

import json
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.readers.find import read_logs
from mp_agent.ring import locations
from mp_agent.ring.locations import AgentStatus
from tests import waiting
from tests.agent.node.agent_process import StartAgent, scrape, starting_agents

wait_until = partial(waiting.wait_until, seconds=240)
"""The trackers' packages take long to import."""

STEPS = 5
LOSS, NORM = "mp_agent/loss", "mp_agent/grad_norm"
COLUMNS = {"step": "mp_agent/step", "loss": LOSS, "grad_norm": NORM}

Track = Callable[[str], dict[str, float]]

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def start(run_dir, settings) -> Iterator[StartAgent]:
    with starting_agents(settings, run_dir) as start_:
        yield start_


@pytest.fixture
def track(start, start_rank, run_dir) -> Track:
    """Have an agent send a run to a tracker; return what it exported of the run meanwhile."""

    def track_(tracker: str) -> dict[str, float]:
        start_rank().steps(STEPS, gradients={"sum_sq": 4.0}, loss=2.5)
        agent = start(trackers=(tracker,))
        status = status_of(run_dir, agent.pid)
        wait_until(lambda: sent(status, tracker), what=f"the first numbers at {tracker}")
        exported = scrape(status)
        agent.send_signal(signal.SIGTERM)
        agent.wait()
        assert (exported["step"], exported["loss"]) == (STEPS, 2.5)
        return exported

    return track_


def status_of(run_dir: Path, pid: int) -> AgentStatus:
    def current() -> AgentStatus | None:
        status = locations.read_status(run_dir)
        return status if status is not None and status.pid == pid and status.url else None

    return wait_until(current, what="the node agent's status")


def sent(status: AgentStatus, tracker: str) -> bool:
    found = scrape(status)
    assert not found[f"export_failures_total{{{tracker},0}}"], "the tracker refused something"
    return f"export_last_success_timestamp_seconds{{{tracker},0}}" in found


def shown_at(exported: dict[str, float], tracker: str) -> tuple[str, str]:
    """Return the name and the address of the run in a tracker, as they were scraped."""
    (key,) = (key for key in exported if key.startswith("tracker_info"))
    assert exported[key] == 1.0
    name, known, url = key.removeprefix("tracker_info{").removesuffix("}").split(",")
    assert known == tracker
    return name, url


def test_tensorboard_holds_what_is_scraped(track, settings):
    pytest.importorskip("tensorboardX")
    exported = track("tensorboard")
    source = settings.log_dir / "tensorboard" / "llama"
    assert shown_at(exported, "tensorboard") == ("llama", source.as_uri())
    (log,) = read_logs(str(source), ReadOptions(columns={**COLUMNS, "step": "step"}))
    last = log.points[-1]
    assert (last.step, last.loss) == (STEPS, exported["loss"])
    assert last.grad_norm == pytest.approx(exported["grad_norm"])


def test_wandb_holds_what_is_scraped(track, settings, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_RUN_ID", "the-script")  # which stays the script's alone
    exported = track("wandb")
    (source,) = settings.log_dir.glob("wandb/offline-run-*/*.wandb")
    assert "the-script" not in source.name
    assert shown_at(exported, "wandb") == ("llama (mp_agent)", source.parent.as_uri())
    (log,) = read_logs(str(source), ReadOptions(columns=COLUMNS))
    last = log.points[-1]
    assert (last.step, last.loss) == (STEPS, exported["loss"])
    assert last.grad_norm == pytest.approx(exported["grad_norm"])


def test_mlflow_holds_what_is_scraped(track, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    exported = track("mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mp_agent")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "llama"
    files = tmp_path / "mlruns" / experiment.experiment_id / run.info.run_id
    assert shown_at(exported, "mlflow") == ("llama", (files / "artifacts").as_uri())
    assert run.data.metrics[LOSS] == exported["loss"]
    (found,) = client.get_metric_history(run.info.run_id, NORM)
    assert (found.step, found.value) == (STEPS, pytest.approx(exported["grad_norm"]))


def test_comet_holds_what_is_scraped(track, settings, monkeypatch):
    pytest.importorskip("comet_ml")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    script = "a" * 32
    monkeypatch.setenv("COMET_EXPERIMENT_KEY", script)  # which stays the script's alone
    exported = track("comet")
    (archive,) = (settings.log_dir / "comet").glob("*.zip")
    assert archive.stem != script
    assert shown_at(exported, "comet") == ("llama (mp_agent)", archive.as_uri())
    with zipfile.ZipFile(archive) as opened:
        lines = opened.read("messages.json").decode().splitlines()
    messages = [json.loads(line) for line in lines]
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    last = {metric["metricName"]: metric for metric in metrics}
    assert (last[LOSS]["step"], last[LOSS]["metricValue"]) == (STEPS, exported["loss"])
    assert last[NORM]["metricValue"] == pytest.approx(exported["grad_norm"])


@pytest.fixture
def silent_server() -> Iterator[tuple[str, list[socket.socket]]]:
    """The address of a server that takes connections and never answers, and these."""
    taken: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def take() -> None:
        with suppress(OSError):
            while True:
                taken.append(listener.accept()[0])

    thread = Thread(target=take)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for each in taken:
        each.close()


def _environment(exporter: str, url: str) -> dict[str, str]:
    """Return the variables that send what an exporter sends to a server."""
    return {
        "wandb": {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "WANDB_MODE": "online"},
        "mlflow": {"MLFLOW_TRACKING_URI": url},
        "comet": {"COMET_URL_OVERRIDE": url, "COMET_API_KEY": "a" * 25, "COMET_START_ONLINE": "1"},
        "otlp": {"OTEL_EXPORTER_OTLP_ENDPOINT": url},
    }[exporter]


@pytest.mark.parametrize("exporter", ["wandb", "mlflow", "comet", "otlp"])
def test_a_server_that_does_not_answer_keeps_no_agent_after_the_linger(
    start, start_rank, monkeypatch, silent_server, exporter
):
    url, taken = silent_server
    for name, value in _environment(exporter, url).items():
        monkeypatch.setenv(name, value)
    rank = start_rank()
    rank.steps(STEPS, gradients={"sum_sq": 4.0}, loss=2.5)
    chosen = {"exporters": ("otlp",)} if exporter == "otlp" else {"trackers": (exporter,)}
    agent = start(linger_seconds=0.5, **chosen)
    wait_until(lambda: taken, what="the first connection")
    rank.end()
    waiting.wait_until(lambda: agent.poll() is not None, seconds=12, what="the end of the agent")


def test_without_a_tracker_no_package_of_one_is_imported(start, start_rank, run_dir):
    start_rank().steps(1)
    status = status_of(run_dir, start().pid)
    maps = Path(f"/proc/{status.pid}/maps").read_text()
    assert not [name for name in ("wandb", "mlflow", "comet_ml") if name in maps]
    unwanted = ("export_failures", "tracker_info")
    assert not [name for name in scrape(status) if name.startswith(unwanted)]
