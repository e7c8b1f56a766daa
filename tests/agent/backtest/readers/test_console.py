"""Consoles of trainers, in excerpts: which lines count, and for which step."""

from math import isnan
from pathlib import Path

import pytest

from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.find import expand, read_logs
from mp_agent.errors import LogError


def read(directory: Path, text: str, name: str = "train.log", **options) -> TrainingLog:
    path = directory / name
    path.write_text(text)
    (log,) = read_logs(str(path), ReadOptions(**options))
    return log


def bar(step: int, total: int = 6000) -> str:
    return f"\r {step // 60:3d}%|█▏        | {step}/{total} [02:08<1:26:53,  2.01s/it]"


def test_steps_of_trainer_are_those_of_the_bar_that_it_draws_after_a_dict(tmp_path: Path):
    late = "".join(
        f"{bar(step - 3)}\n{{'loss': 2.5, 'grad_norm': nan, 'learning_rate': 5e-05, "
        "'epoch': 0.1}\n"
        f"{bar(step)}{bar(1, 20)}{bar(20, 20)}\n{{'eval_loss': 3.0, 'epoch': 0.1}}\n"
        for step in (10, 20, 30)
    )
    log = read(tmp_path, late)
    assert log.format == "transformers-console"
    assert [point.step for point in log.points] == [10, 20, 30]
    assert all(isnan(point.grad_norm or 0.0) for point in log.points)
    assert [point.loss for point in log.points] == [2.5] * 3
    assert [point.step_seconds for point in log.points] == [2.01] * 3


def test_dicts_that_no_bar_tells_apart_are_counted_and_that_is_noted(tmp_path: Path):
    dicts = "{'loss': '2.5', 'grad_norm': '1.5', 'epoch': '0.1'}\n" * 4
    log = read(tmp_path, bar(100) + dicts + bar(400))
    assert [point.step for point in log.points] == [1, 2, 3, 4]
    assert any("rows are counted as steps" in note for note in log.notes)


def test_a_bar_that_comes_after_other_text_is_not_that_of_the_dict(tmp_path: Path):
    """As W&B keeps a console: it writes down a bar once a second or so."""
    text = "".join(
        f"{bar(step)}Saving model\n{{'loss': 2.5, 'grad_norm': 1.5, 'epoch': 0.1}}\n"
        f"Model saved\n{bar(step + 25)}"
        for step in (50, 150, 250)
    )
    assert [point.step for point in read(tmp_path, text).points] == [50, 150, 250]


def test_torchtitan_is_read_through_colours_and_of_one_rank(tmp_path: Path):
    lines = "".join(
        f"[rank{rank}]:[titan] 2025-05-01 10:00:{step:02d},123 - root - INFO - "
        f"\x1b[31mstep: {step:2}  "
        f"\x1b[32mloss:  8.{step:04d}  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[36mmemory:  "
        f"1.05GiB(1.30%)  \x1b[34mtps: 6,012  \x1b[35mmfu: 0.13%\x1b[39m\n"
        for step in (1, 10, 20)
        for rank in (0, 1)
    )
    log = read(tmp_path, lines)
    assert log.format == "torchtitan"
    assert [(p.step, p.loss, p.grad_norm) for p in log.points] == [
        (1, 8.0001, 1.5),
        (10, 8.001, 1.5),
        (20, 8.002, 1.5),
    ]
    first, second, _ = (point.time_seconds or 0.0 for point in log.points)
    assert second == first + 9.0
    assert "lines of 1 other ranks are left out" in log.notes


def test_nanogpt_gives_losses_of_training_and_the_time_of_a_step(tmp_path: Path):
    log = read(
        tmp_path,
        "number of parameters: 123.59M\nstep 0: train loss 10.9876, val loss 10.9865\n"
        "iter 0: loss 10.9897, time 40000.50ms, mfu -100.00%\n"
        "iter 10: loss 9.5000, time 133.12ms, mfu 3.00%\n"
        "step 20: train loss 9.0001, val loss 9.1\niter 20: loss nan, time 133.12ms, mfu 3.00%\n",
    )
    assert log.format == "nanogpt"
    assert [(p.step, p.loss) for p in log.points[:2]] == [(0, 10.9897), (10, 9.5)]
    assert log.points[2].step == 20 and isnan(log.points[2].loss or 0.0)
    assert log.points[1].step_seconds == pytest.approx(0.13312)


def test_icefall_gives_the_loss_of_the_batch_and_steps_across_epochs(tmp_path: Path):
    line = (
        "2023-01-01 10:00:{at:02d},123 INFO [train.py:895] (0/8) Epoch {epoch}, batch {batch}, "
        "loss[loss=1.{batch:03d}, simple_loss=0.3, pruned_loss=0.2, over 12345.00 frames. ], "
        "tot_loss[loss=9.5, simple_loss=0.3, over 234.5 frames. ], batch size: 85, lr: 2.25e-02, "
        "grad_scale: 2.0\n"
    )
    validation = (
        "2023-01-01 10:00:30,123 INFO [train.py:929] (0/8) Epoch 1, validation: loss=0.2345, "
        "simple_loss=0.3, over 944034.00 frames. \n"
    )
    places = [(1, 0), (1, 50), (1, 100), (2, 0), (2, 50)]
    lines = [line.format(at=at, epoch=e, batch=b) for at, (e, b) in enumerate(places)]
    log = read(tmp_path, "".join([*lines[:3], validation, *lines[3:]]))
    assert log.format == "icefall"
    assert [point.step for point in log.points] == [0, 50, 100, 150, 200]
    assert [point.loss for point in log.points] == [1.0, 1.05, 1.1, 1.0, 1.05]
    assert {(p.loss_scale, p.learning_rate) for p in log.points} == {(2.0, 0.0225)}


@pytest.mark.parametrize(
    ("lines", "steps", "losses"),
    [
        pytest.param(
            [
                "Train: 0 [   0/1251 (  0%)]  Loss: 6.950 (6.95)  Time: 0.500s  LR: 1.000e-06",
                "Train: 0 [1250/1251 (100%)]  Loss: 6.900 (6.95)  Time: 0.500s  LR: 1.000e-06",
                "Train: 1 [   0/1251 (  0%)]  Loss: 6.800 (6.95)  Time: 0.500s  LR: 1.000e-06",
                "Test: [   0/48]  Time: 1.0 (1.0)  Loss: 0.5 (0.5)",
            ],
            [0, 1250, 1251],
            [6.95, 6.9, 6.8],
            id="timm",
        ),
        pytest.param(
            [
                "mmengine - INFO - Epoch(train)  [1][ 500/1000]  lr: 1e-2  loss: 3.0  loss_cls: 9",
                "mmengine - INFO - Epoch(train)  [1][1000/1000]  lr: 1e-2  loss: 2.0  loss_cls: 9",
                "mmengine - INFO - Epoch(val) [1][ 50/100]  eta: 0:00:05  loss: 9.0",
                "mmengine - INFO - Epoch(train)  [2][ 500/1000]  lr: 1e-2  loss: 1.0  loss_cls: 9",
            ],
            [500, 1000, 1500],
            [3.0, 2.0, 1.0],
            id="mmengine",
        ),
        pytest.param(
            [
                "Epoch 0:  50%|█████     | 1/2 [00:10<00:33, 11.50it/s, v_num=0, train_loss=3.0]",
                "Epoch 0: 100%|██████████| 2/2 [00:10<00:33, 11.50it/s, v_num=0, train_loss=2.0]",
                "Epoch 1:  50%|█████     | 1/2 [00:10<00:33, 11.50it/s, v_num=0, train_loss=1.0]",
            ],
            [1, 2, 3],
            [3.0, 2.0, 1.0],
            id="lightning",
        ),
        pytest.param(
            [
                "step    1/19560 | loss 3.000000 (+nanz)| norm 1.5 (+nanz)| lr 1e-04 | 300.00 ms",
                "step    2/19560 | loss 2.000000 (+nanz)| norm 1.5 (+nanz)| lr 1e-04 | 300.00 ms",
                "val loss 9.000000",
                "step    3/19560 | loss 1.000000 (+nanz)| norm 1.5 (+nanz)| lr 1e-04 | 300.00 ms",
            ],
            [1, 2, 3],
            [3.0, 2.0, 1.0],
            id="llm.c",
        ),
        pytest.param(
            [
                f"---------------\n| grad_norm | 1.5 |\n| loss | {loss} |\n| step | {step} |"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="tables of guided-diffusion",
        ),
        pytest.param(
            [
                f"INFO [step={step}/7393,epoch=0]\n    optim/total_grad_norm=1.5\n"
                f"    train/CrossEntropyLoss={loss}\n    train/Perplexity=50,123"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="olmo",
        ),
        pytest.param(
            [
                "epoch 0 step 10 train loss 3.0 val loss 9.0",
                "epoch 0 step 20 train loss 2.0 val loss 9.0",
                "epoch 0 step 20 validation: loss 9.0",
                "epoch 0 step 30 train loss 1.0",
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="losses of an evaluation in the same line",
        ),
        pytest.param(
            [
                "s:0 tel:9.0",
                "s:10 trl:3.0 lr:0.000001 norm:1.5",
                "s:20 trl:2.0 lr:0.000002 norm:1.5",
                "s:20 tel:9.0",
                "s:30 trl:1.0 lr:0.000002 norm:1.5",
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="the log file of llm.c",
        ),
        pytest.param(
            ["0 val 9.0", "0 hella 0.24", "0 train 3.0", "1 train 2.0", "2 train 1.0", "2 val 9.0"],
            [0, 1, 2],
            [3.0, 2.0, 1.0],
            id="the log file of build-nanogpt",
        ),
        pytest.param(
            [
                f"Epoch:[1/2]({step}/100), loss: {loss}, aux_loss: 9.0, lr: 1e-4, epoch_time: 4min"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="minimind",
        ),
        pytest.param(
            [
                f"[h:0/8] 2021-01-01 10:00:00,123 (trainer:732) INFO: {epoch}epoch:train:{first}-"
                f"{last}batch: loss_ctc=9.0, loss={loss}, grad_norm=1.5, optim0_lr0=1e-4"
                for epoch, first, last, loss in (
                    (1, 1, 50, 3.0),
                    (1, 51, 100, 2.0),
                    (2, 1, 50, 1.0),
                )
            ]
            + ["(trainer:338) INFO: 2epoch results: [train] loss=2.0, [valid] loss=9.0"],
            [50, 100, 150],
            [3.0, 2.0, 1.0],
            id="espnet",
        ),
        pytest.param(
            [
                f"Epoch 1 | iter {4 * step} step {step} | loss train: {loss}, val: 9.0 | "
                "iter time: 123.45 ms (step)"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="litgpt",
        ),
        pytest.param(
            [
                f"[batch={step}/4800]:\n\t Train time/batch: {step - 1}\n"
                f"\t Train loss/train/total: {loss}\n\t Train l2_norm/grad/global: 1.5"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="composer",
        ),
        pytest.param(
            [
                f"Steps:  {step}%|█         | {step}/100 [01:00<09:00,  1.67it/s, loss={loss}]"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="diffusers",
        ),
        pytest.param(
            [
                f"completed step: {step}, seconds: 1.2, total_weights: 9, loss: {loss}"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="maxtext",
        ),
        pytest.param(
            [
                f"Step {step}: Actor Loss: 9.0, KL Loss: 8.0, Loss: {loss}"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="other losses before the loss",
        ),
        pytest.param(
            [
                f"Epoch {epoch}/40, Train Loss: {loss}, Val Loss: 9.0, Val Acc: 80%"
                for epoch, loss in ((9, 3.0), (10, 2.0), (40, 1.0))
            ],
            [9000, 10_000, 40_000],
            [3.0, 2.0, 1.0],
            id="epoch of a total",
        ),
        pytest.param(
            [
                f"Epoch [{epoch}/40] | Loss: {loss} | Val Loss: 9.0 | Test: 0.5"
                for epoch, loss in ((9, 3.0), (10, 2.0), (11, 1.0))
            ],
            [9000, 10_000, 11_000],
            [3.0, 2.0, 1.0],
            id="epoch in brackets, evaluations behind the loss",
        ),
        pytest.param(
            [
                line
                for epoch, loss in ((0, 3.0), (1, 2.0), (2, 1.0))
                for line in (
                    f"Epoch {epoch}/24",
                    "----------",
                    f"train Loss: {loss} Acc: 0.5",
                    "val Loss: 9.0 Acc: 0.5",
                )
            ],
            [0, 1000, 2000],
            [3.0, 2.0, 1.0],
            id="epochs as headings, as in PyTorch's tutorial",
        ),
        pytest.param(
            [
                line
                for epoch, losses in ((1, (3.0, 2.0)), (2, (1.5, 1.0)))
                for line in (
                    f"Epoch {epoch}/2",
                    f"100/469 [=>......] - ETA: 8s - loss: {losses[0]} - accuracy: 0.5",
                    f"469/469 [========] - 3s 6ms/step - loss: {losses[1]} - val_loss: 9.0",
                )
            ],
            [100, 469, 569, 938],
            [3.0, 2.0, 1.5, 1.0],
            id="Keras",
        ),
        pytest.param(
            [
                f"Epoch {epoch}/3\n469/469 ━━━━━━━━━━ 3s 6ms/step - accuracy: 0.9 - loss: {loss}"
                for epoch, loss in ((1, 3.0), (2, 2.0), (3, 1.0))
            ],
            [469, 938, 1407],
            [3.0, 2.0, 1.0],
            id="Keras 3",
        ),
        pytest.param(
            [
                f"[Train][Epoch {epoch}/10][Iter: {step}/600]lr: 0.0125, CELoss: 9.0, loss: {loss}"
                for epoch, step, loss in ((1, 0, 3.0), (1, 300, 2.0), (10, 0, 1.0))
            ],
            [0, 300, 5400],
            [3.0, 2.0, 1.0],
            id="paddle",
        ),
        pytest.param(
            [
                f"Train Epoch: {epoch} [{samples}/60000 ({samples // 600}%)]\tLoss: {loss}"
                for epoch, samples, loss in ((1, 0, 3.0), (1, 640, 2.0), (2, 0, 1.0))
            ],
            [1, 2, 3],
            [3.0, 2.0, 1.0],
            id="samples of an epoch are no steps",
        ),
        pytest.param(
            [
                f"{{'step': {step}, 'loss': {loss}, 'eval_loss': 9.0}}"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="dicts that a script prints",
        ),
        pytest.param(
            [
                f'2024-01-01 10:00:00 INFO {{"step": {step}, "loss": {loss}}}'
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="JSON behind a time",
        ),
        pytest.param(
            [
                "Step\tTraining Loss\tValidation Loss",
                "10\t3.0\tNo log",
                "20\t2.0\t9.0",
                "30\t1.0\t9.0",
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="the table of a notebook",
        ),
        pytest.param(
            [
                "| Epoch | Train Loss | Train Acc | Val Loss |",
                "|-------|-----------:|-----------|----------|",
                *(
                    f"|     {epoch} | {loss} | 0.11% | 9.0 |"
                    for epoch, loss in enumerate((3.0, 2.0, 1.0))
                ),
            ],
            [0, 1000, 2000],
            [3.0, 2.0, 1.0],
            id="a table in Markdown",
        ),
        pytest.param(
            [
                f"Epoch 1 - Batch loss: {loss}"
                + "\nEpoch 1 - Average Train Loss: 9.0" * (loss == 1.0)
                for loss in (3.0, 2.0, 1.0)
            ],
            [1, 2, 3],
            [3.0, 2.0, 1.0],
            id="averages of an epoch below the losses of its batches",
        ),
        pytest.param(
            [
                f"Training Iteration: {step}  average_loss : 9.0  step_loss : {loss}"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="DLLogger",
        ),
        pytest.param(
            [
                f"[{step:06}/50000] X4K | loss {loss} | GPU 92%"
                for step, loss in ((0, 3.0), (500, 2.0), (1000, 1.0))
            ],
            [0, 500, 1000],
            [3.0, 2.0, 1.0],
            id="step of a total at the beginning",
        ),
        pytest.param(
            [
                f"[{epoch}, {step:5d}] loss: {loss}"
                for epoch, step, loss in ((1, 2000, 3.0), (1, 4000, 2.0), (2, 2000, 1.0))
            ],
            [2000, 4000, 6000],
            [3.0, 2.0, 1.0],
            id="epoch and batch, as in PyTorch's first tutorial",
        ),
        pytest.param(
            [f"step {step} MSE Loss: {loss}" for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="the kind of the loss",
        ),
        pytest.param(
            [
                f"step {step} KL loss: 9.0, total loss: {loss}"
                for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0))
            ],
            [10, 20, 30],
            [3.0, 2.0, 1.0],
            id="a part in capitals before the total",
        ),
    ],
)
def test_the_lines_of_many_trainers_are_read(tmp_path: Path, lines, steps, losses):
    log = read(tmp_path, "\n".join(lines) + "\n")
    assert [point.step for point in log.points] == steps
    assert [point.loss for point in log.points] == losses


def test_of_two_losses_of_a_line_neither_is_the_loss(tmp_path: Path):
    """As those of a discriminator and a generator."""
    with pytest.raises(LogError, match="name a column of its lines by --column loss=NAME"):
        read(tmp_path, "".join(f"step {step} [D loss: 0.3] [G loss: 2.0]\n" for step in (1, 2, 3)))


def test_a_line_of_an_evaluation_is_left_out_wherever_it_says_so(tmp_path: Path):
    lines = (
        "step 1 loss 3.0",
        "Eval step: 1 loss: 9.0",
        "Validation: step 1 loss 9.0",
        "step 2 loss 2.0, val loss 9.0",
        "step 2 loss 9.0 on the test set",
        "step 3 loss 1.0",
    )
    log = read(tmp_path, "\n".join(lines) + "\n")
    assert [point.loss for point in log.points] == [3.0, 2.0, 1.0]


def test_overflows_of_deepspeed_stand_between_the_dicts_of_trainer(tmp_path: Path):
    def overflow(step: int, scale: int) -> str:
        return (
            f"{bar(step)}[2023-06-07 22:16:00,018] [INFO] [loss_scaler.py:181:update_scale] "
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: "
            f"{scale}, reducing to {scale // 2}\n"
        )

    def logged(step: int) -> str:
        return f"{bar(step)}\n{{'loss': 2.5, 'learning_rate': 5e-05, 'epoch': 0.1}}\n{bar(step)}"

    text = logged(10) + overflow(14, 64) + overflow(15, 32) + logged(20) + overflow(20, 16)
    log = read(tmp_path, text + logged(30))
    assert log.format == "transformers-console"
    assert [point.step for point in log.points] == [10, 15, 16, 20, 21, 30]
    assert [point.loss_scale for point in log.points] == [None, 64, 32, None, 16, None]
    assert [point.loss for point in log.points] == [2.5, None, None, 2.5, None, 2.5]
    assert [point.skipped for point in log.points] == [None, True, True, None, True, None]


def test_a_scale_of_logits_is_no_loss_scale(tmp_path: Path):
    """As open_clip prints it."""
    lines = "".join(
        f"Train Epoch: 0 [{step}/128000 (2%)] Batch (t): 0.5 LR: 0.0005 Logit Scale: 14.2 - V4 "
        "CFG Scale: 7.5 Loss: 7.1 (7.2)\n"
        for step in (512, 1024, 1536)
    )
    log = read(tmp_path, lines)
    assert [(point.loss, point.loss_scale) for point in log.points] == [(7.1, None)] * 3


def test_a_rate_that_is_rounded_to_zero_is_not_taken_for_zero(tmp_path: Path):
    lines = "".join(f"s:{step} trl:3.0 lr:0.000000 norm:0.00\n" for step in range(5))
    log = read(tmp_path, lines)
    assert {(point.learning_rate, point.grad_norm) for point in log.points} == {(None, None)}
    assert any(note.startswith("lr is written as 0.000000 in 5 rows") for note in log.notes)
    exact = "".join(f"step {step} loss 3.0 lr 0.0 grad_norm 0\n" for step in range(5))
    points = read(tmp_path, exact).points
    assert {(point.learning_rate, point.grad_norm) for point in points} == {(0.0, 0.0)}


def test_lines_whose_step_cannot_be_read_are_left_out_and_that_is_noted(tmp_path: Path):
    """As LeRobot prints its steps, `2K` after `800`."""
    steps = ("600", "800", "1K", "2K")
    log = read(tmp_path, "".join(f"step:{step} loss:3.0 grdn:1.5\n" for step in steps))
    assert [point.step for point in log.points] == [600, 800]
    assert "2 lines with numbers, but without a step, are left out" in log.notes


def test_code_and_prose_with_a_scale_are_no_log(tmp_path: Path):
    with pytest.raises(LogError, match="is a log of no known format"):
        read(tmp_path, "class Attention:\n    scale = 0.12\n    norm = 2\nstep:1/9 val_loss:3.2\n")


def test_a_name_of_its_own_is_read_where_it_is_given(tmp_path: Path):
    text = "".join(f"step {step} my_ce={step}.5\n" for step in (1, 2, 3))
    with pytest.raises(LogError, match="--column loss=NAME"):
        read(tmp_path, text)
    log = read(tmp_path, text, columns={"loss": "my_ce"})
    assert [point.loss for point in log.points] == [1.5, 2.5, 3.5]


def test_a_console_that_begins_with_many_messages_is_read_where_it_is_named(tmp_path: Path):
    messages = "warning: something else\n" * 6000
    log = read(tmp_path, messages + "step 1 loss 2.0\nstep 2 loss 1.0\n")
    assert [point.step for point in log.points] == [1, 2]


def test_texts_that_speak_of_losses_are_no_logs(tmp_path: Path):
    (tmp_path / "README.txt").write_text("We reached loss 2.0 at step 10 and then loss: 1.5.\n" * 2)
    (tmp_path / "notes.md").write_text("step 1 loss 2\nstep 2 loss 2\nstep 3 loss 2\n")
    assert [source.address for source in expand([str(tmp_path)])] == [str(tmp_path)]


@pytest.mark.parametrize("begin", ["epoch", "Epoch 1", "Epoch 1/2 iter", "| a"])
def test_long_gaps_are_read_once_and_not_in_every_way(tmp_path: Path, begin: str):
    gaps = f"{begin}{' ' * 19_000}x\n"  # by all ways to share it out, hours
    log = read(tmp_path, "step 1 loss 2.0\n" + gaps + "step 2 loss 1.0\nstep 3 loss 0.5\n")
    assert [point.loss for point in log.points] == [2.0, 1.0, 0.5]
