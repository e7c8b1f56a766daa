"""The same run as every format writes it: 40 steps, of which the last ten are NaN."""

import csv
import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from math import isnan
from pathlib import Path
from shutil import copy
from typing import Any

from tests.agent.backtest.data.make import rows as made_rows

DATA = Path(__file__).parents[1] / "data"
ROWS = [{name.removeprefix("train/"): value for name, value in row.items()} for row in made_rows()]
Write = Callable[[Path], Path]


def transformers(directory: Path) -> Path:
    history = [{**row, "step": row["global_step"], "epoch": 0.1} for row in ROWS]
    summary = {"train_runtime": 80.0, "train_steps_per_second": 0.5, "step": 40, "train_loss": 1.0}
    evaluation = {"step": 40, "eval_loss": 9.0}
    state = {"global_step": 40, "log_history": [*history, evaluation, summary]}
    path = directory / "trainer_state.json"
    path.write_text(json.dumps(state, indent=2))
    return path


def csv_table(directory: Path) -> Path:
    path = directory / "metrics.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def csv_with_commas(directory: Path) -> Path:
    """Write a table as where the decimal point is a comma, its newest row first."""
    path = directory / "metrics.csv"
    cells = [[str(cell).replace(".", ",") for cell in row.values()] for row in ROWS]
    lines = [";".join(row) for row in (list(ROWS[0]), *reversed(cells))]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def json_lines(directory: Path) -> Path:
    path = directory / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


def json_table(directory: Path) -> Path:
    path = directory / "table.json"
    path.write_text(json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}))
    return path


def tensorboard(directory: Path) -> Path:
    run = directory / "events"
    run.mkdir()
    copy(DATA / "events.out.tfevents.run", run)
    return run


def wandb(directory: Path) -> Path:
    return Path(copy(DATA / "run.wandb", directory))


def mlflow_directory(directory: Path) -> Path:
    run = directory / "mlruns" / "0" / "0123abcd"
    (run / "metrics" / "train").mkdir(parents=True)
    (run / "tags").mkdir()
    (run / "tags" / "mlflow.runName").write_text("my-run")
    (run / "meta.yaml").write_text("run_id: 0123abcd\n")
    for name in ("loss", "grad_norm", "learning_rate"):
        lines = (
            f"{1_700_000_000_000 + 1000 * row['global_step']} {row[name]} {row['global_step']}\n"
            for row in ROWS
        )
        (run / "metrics" / "train" / name).write_text("".join(lines))
    return run


def mlflow_database(directory: Path) -> Path:
    path = directory / "mlflow.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table runs (run_uuid text, name text)")
        database.execute(
            "create table metrics (key text, value real, timestamp integer, run_uuid text, "
            "step integer, is_nan integer)"
        )
        database.execute("insert into runs values ('u1', 'my-run')")
        for row in ROWS:
            for name in ("loss", "grad_norm", "learning_rate"):
                value, is_nan = (0.0, 1) if isnan(row[name]) else (row[name], 0)
                at = 1_700_000_000_000 + 1000 * row["global_step"]
                values = (name, value, at, "u1", row["global_step"], is_nan)
                database.execute("insert into metrics values (?, ?, ?, ?, ?, ?)", values)
        database.commit()
    return path


def megatron(directory: Path) -> Path:
    path = directory / "megatron.log"
    path.write_text(
        "using world size: 8, data-parallel-size: 8\n"
        + "".join(
            f" [2026-01-01 10:00:{row['global_step']:02d}] iteration {row['global_step']:8d}/"
            f"     500 | consumed samples: {64 * row['global_step']} | elapsed time per iteration "
            f"(ms): 1000.0 | learning rate: {row['learning_rate']:.6E} | global batch size:    64 "
            f"| lm loss: {row['loss']:.6E} | loss scale: 1.0 | grad norm: {row['grad_norm']:.3f} | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
            for row in ROWS
        )
    )
    return path


def fairseq(directory: Path) -> Path:
    path = directory / "hydra_train.log"
    path.write_text(
        "2026-01-01 10:00:00 | INFO | fairseq_cli.train | task: translation\n"
        + "".join(
            f"2026-01-01 10:00:{row['global_step']:02d} | INFO | train_inner | epoch 001: "
            f"{row['global_step']:6d} / 500 loss={row['loss']}, ppl=7.1, wps=1, ups=1, wpb=1, "
            f"bsz=1, num_updates={row['global_step']}, lr={row['learning_rate']}, "
            f"gnorm={row['grad_norm']}, clip=0, train_wall=1, gb_free=1, wall=1\n"
            for row in ROWS
        )
    )
    return path


def fairseq_json(directory: Path) -> Path:
    path = directory / "train.log"
    names = {"global_step": "num_updates", "grad_norm": "gnorm", "learning_rate": "lr"}
    path.write_text(
        "".join(
            f"[2026-01-01 10:00:{row['global_step']:02d},123][train_inner][INFO] - "
            + json.dumps({names.get(name, name): str(value) for name, value in row.items()})
            + "\n"
            for row in ROWS
        )
    )
    return path


def transformers_console(directory: Path) -> Path:
    """Write what Trainer prints with its standard error: the bar is drawn again after a dict."""
    path = directory / "train.log"
    bars = [f" 50%|█████     | {row['global_step']}/40 [00:01<00:01, 2.01it/s]" for row in ROWS]
    path.write_text(
        "Loading checkpoint shards: 100%|██████████| 2/2 [00:00<00:00, 9.9it/s]\n"
        + "".join(
            f"\r{bar}\r          \r{{'loss': '{row['loss']}', 'grad_norm': '{row['grad_norm']}', "
            f"'learning_rate': '{row['learning_rate']}', 'epoch': '0.1'}}\n\r{bar}"
            for bar, row in zip(bars, ROWS, strict=True)
        )
        + "{'eval_loss': '9.0', 'eval_runtime': '1.0', 'epoch': '1'}\n"
        + "{'train_runtime': '80', 'train_steps_per_second': '0.5', 'train_loss': '1', "
        "'epoch': '1'}\n"
    )
    return path


def epochs(directory: Path) -> Path:
    """Write two epochs of 20 iterations, counted from 0, as MAE, BEiT and DeiT print them."""
    path = directory / "slurm-1.out"
    lines = [
        f"Epoch: [{(row['global_step']) // 20}]  [{row['global_step'] % 20:4d}/20]  eta: 0:30:00  "
        f"lr: {row['learning_rate']}  loss: {row['loss']} (7.0)  grad_norm: {row['grad_norm']} "
        "(1.0)  time: 0.5  data: 0.0001  max mem: 19152"
        for row in ROWS
    ]
    other = [
        "Averaged stats: lr: 1.0  loss: 7.0 (7.0)",
        "Test:  [ 0/196]  eta: 0:01:00  loss: 0.5 (0.5)",
    ]
    path.write_text("\n".join([*lines, *other]) + "\n")
    return path


def console(directory: Path) -> Path:
    path = directory / "stdout.txt"
    path.write_text(
        "".join(
            f"INFO step {row['global_step']}/500 | loss: {row['loss']} | aux loss: 9.0 | "
            f"grad-norm={row['grad_norm']} | lr {row['learning_rate']}\n"
            for row in ROWS
        )
    )
    return path


def notebook_of_lines(directory: Path) -> Path:
    log = console(directory)
    printed = log.read_text().splitlines(keepends=True)
    log.unlink()
    return notebook(directory, {"output_type": "stream", "name": "stdout", "text": printed})


def notebook_of_tables(directory: Path) -> Path:
    names = ("Step", "Training Loss", "Grad Norm", "Learning Rate")
    cells = [[f"<th>{name}</th>" for name in names]]
    cells += [[f"<td>{value}</td>" for value in values_of(row)] for row in ROWS]
    page = "".join(f'<tr style="text-align: left;">{"".join(row)}</tr>' for row in cells)
    shown = {"text/html": [f"<table border=1>{page}</table>"], "text/plain": ["<HTML object>"]}
    return notebook(directory, {"output_type": "display_data", "data": shown})


def notebook(directory: Path, output: Mapping[str, Any]) -> Path:
    path = directory / "training.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["step 1, loss 7.0\n"]},
        {"cell_type": "code", "source": ["train()"], "outputs": [output]},
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    return path


def values_of(row: Mapping[str, Any]) -> list[Any]:
    return [row[name] for name in ("global_step", "loss", "grad_norm", "learning_rate")]


def between_spaces(directory: Path) -> Path:
    path = directory / "table.txt"
    lines = ["step      loss                  grad_norm             learning_rate  time   "]
    lines += [
        f"{step:<10}{loss:<22}{norm:<22}{rate:<15}00:12  "
        for step, loss, norm, rate in map(values_of, ROWS)
    ]
    path.write_text("\n".join(lines))
    return path


FORMATS: Mapping[str, Write] = {
    "transformers": transformers,
    "csv": csv_table,
    "csv with commas": csv_with_commas,
    "jsonl": json_lines,
    "json": json_table,
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow_directory,
    "mlflow database": mlflow_database,
    "megatron": megatron,
    "fairseq": fairseq,
    "fairseq json": fairseq_json,
    "transformers-console": transformers_console,
    "epochs": epochs,
    "console": console,
    "console notebook": notebook_of_lines,
    "console notebook table": notebook_of_tables,
    "console spaces": between_spaces,
}


def deepspeed(directory: Path) -> Path:
    """Write what DeepSpeed says of a run that overflows thrice after step 10, in its own words."""
    path = directory / "deepspeed.log"
    head = "[2026-01-01 10:00:{second:02d},500] [INFO] "
    lines = [
        head.format(second=10)
        + "[logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001, 0.001], mom=[]",
        "steps: 10 loss: 2.5000 iter time (s): 1.000 samples/sec: 8.000",
        *(
            head.format(second=10 + number)
            + "[loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
            f"Attempted loss scale: {2**scale}, reducing to {2 ** (scale - 1)}"
            for number, scale in ((1, 16), (2, 15), (3, 14))
        ),
        head.format(second=20)
        + "[logging.py:96:log_dist] [Rank 0] step=20, skipped=3, lr=[0.002, 0.002], mom=[]",
        "steps: 20 loss: 2.2500 iter time (s): 1.000 samples/sec: 8.000",
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
