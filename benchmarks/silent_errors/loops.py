# ruff: noqa: D401 - a docstring is the row of the table, and says what is wrong
"""Silent errors of the order of the loop, its schedules and its modes."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

from benchmarks.silent_errors.base import (
    ONSET_STEP,
    STEPS,
    loss_of,
    make_batch,
    make_model,
    make_replicas,
    make_sgd,
    silent_error,
    steps_of,
    update,
)


@silent_error("loop")
def gradients_never_cleared(wrong: bool) -> None:
    """`zero_grad` is never called."""
    model = make_replicas()
    optimizer = make_sgd(model, 0.005)
    for _ in steps_of():
        if not wrong:
            optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        optimizer.step()


@silent_error("loop", ONSET_STEP)
def micro_batches_cleared(wrong: bool) -> None:
    """`zero_grad` is called before each of four micro-batches, so that three are lost."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of(160):
        optimizer.zero_grad()
        for _ in range(4):
            if wrong and step >= ONSET_STEP:
                optimizer.zero_grad()
            torch.autograd.backward(loss_of(model) / 4)
        optimizer.step()


@silent_error("loop")
def clipped_after_the_step(wrong: bool) -> None:
    """Gradients are clipped after the step that used them."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        if wrong:
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not wrong:
            optimizer.step()


@silent_error("loop")
def stepped_before_backward(wrong: bool) -> None:
    """The step comes between `zero_grad` and backward: it never sees a gradient."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        optimizer.zero_grad()
        if wrong:
            optimizer.step()
        torch.autograd.backward(loss_of(model))
        if not wrong:
            optimizer.step()


@silent_error("loop", 2)
def schedule_per_batch(wrong: bool) -> None:
    """A schedule made for epochs is stepped at every batch: the rate is soon nothing."""
    model = make_replicas()
    optimizer = make_sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in steps_of():
        update(optimizer, loss_of(model))
        if wrong or step % 100 == 0:
            schedule.step()


@silent_error("loop")
def rate_divided_by_integers(wrong: bool) -> None:
    """A schedule divides integers, and its factor is 0 until the warm-up ends."""
    model = make_replicas()
    optimizer = make_sgd(model)

    def factor(step: int) -> float:
        return min(1, step // 1000) if wrong else min(1.0, (step + 1) / 100)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in steps_of():
        update(optimizer, loss_of(model))
        schedule.step()


@silent_error("loop", ONSET_STEP)
def schedule_stepped_twice(wrong: bool) -> None:
    """The schedule is stepped twice per step, and the rate is 0 from half of the steps on."""
    model = make_replicas()
    optimizer = make_sgd(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    for _ in steps_of():
        update(optimizer, loss_of(model))
        for _ in range(2 if wrong else 1):
            schedule.step()


@silent_error("loop")
def loss_rebuilt_from_a_number(wrong: bool) -> None:
    """The loss is rebuilt from its number, so that backward reaches no parameter."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        loss = loss_of(model)
        update(optimizer, loss.new_tensor(loss.item(), requires_grad=True) if wrong else loss)


@silent_error("loop")
def clipped_before_unscaling(wrong: bool) -> None:
    """Gradients are clipped while they are still multiplied by the loss scale."""
    model = make_replicas()
    optimizer = make_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(loss_of(model)))
        if not wrong:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@silent_error("loop")
def stepped_twice(wrong: bool) -> None:
    """The optimizer steps twice with the same gradients."""
    model = make_replicas()
    optimizer = make_sgd(model, 0.02)
    for _ in steps_of():
        update(optimizer, loss_of(model))
        if wrong:
            optimizer.step()


@silent_error("modes", ONSET_STEP)
def evaluation_mode_kept(wrong: bool) -> None:
    """After a validation `train()` is not called: no dropout, running statistics."""
    model = make_replicas(make_model(dropout=0.2, normalized=True))
    optimizer = make_sgd(model)
    for step in steps_of():
        if step == ONSET_STEP:
            model.eval()
            with torch.no_grad():
                loss_of(model)
            if not wrong:
                model.train()  # type: ignore[no-untyped-call]
        update(optimizer, loss_of(model))


@silent_error("modes")
def evaluated_in_training(wrong: bool) -> None:
    """Each validation is in training mode: with dropout, and into the running statistics."""
    model = make_replicas(make_model(dropout=0.2, normalized=True))
    optimizer = make_sgd(model)
    for step in steps_of():
        if step % 25 == 0:
            nn.Module.train(model, wrong)
            with torch.no_grad():
                for _ in range(8):
                    loss_of(model)
            nn.Module.train(model)
        update(optimizer, loss_of(model))


@silent_error("modes")
def model_outside_of_autocast(wrong: bool) -> None:
    """BF16 is asked for, but the model is called in a context that switches autocast off."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        inputs, classes = make_batch()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False) if wrong else nullcontext():
                logits = model(inputs)
            loss = functional.cross_entropy(logits, classes)
        update(optimizer, loss)


@silent_error("modes")
def dropout_doubled(wrong: bool) -> None:
    """Dropout of 0.6 where 0.3 was meant."""
    model = make_replicas(make_model(dropout=0.6 if wrong else 0.3))
    optimizer = make_sgd(model)
    for _ in steps_of():
        update(optimizer, loss_of(model))


@silent_error("loop")
def optimizer_made_again(wrong: bool) -> None:
    """The optimizer is made within the loop, so that each step begins without Adam's averages."""
    model = make_replicas()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in steps_of():
        if wrong:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        update(optimizer, loss_of(model))


@silent_error("loop")
def never_stepped(wrong: bool) -> None:
    """The step is in a branch that is never taken."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for step in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        if not wrong or step > STEPS:
            optimizer.step()


@silent_error("loop")
def one_of_two_never_stepped(wrong: bool) -> None:
    """The last layer has an optimizer of its own, whose step is forgotten."""
    model = make_model()
    replicas = make_replicas(model)
    *others, last = model
    optimizers = [make_sgd(nn.Sequential(*others)), make_sgd(last)]
    for _ in steps_of():
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss_of(replicas))
        for optimizer in optimizers[: 1 if wrong else 2]:
            optimizer.step()


@silent_error("loop")
def clipped_before_backward(wrong: bool) -> None:
    """Gradients are clipped before backward has made them."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of():
        optimizer.zero_grad()
        loss = loss_of(model)
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.autograd.backward(loss)
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@silent_error("loop")
def clipped_to_an_epsilon(wrong: bool) -> None:
    """Gradients are clipped to a norm of 1e-8, which moves no weights."""
    model = make_replicas()
    optimizer = make_sgd(model)
    for _ in steps_of(STEPS + 40):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-8 if wrong else 1.0)
        optimizer.step()


@silent_error("loop")
def gradients_left_scaled(wrong: bool) -> None:
    """The optimizer is stepped, and not by the scaler that has scaled the loss."""
    model = make_replicas()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in steps_of():
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(loss_of(model)))
        if wrong:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@silent_error("modes")
def fp16_without_a_scaler(wrong: bool) -> None:
    """Autocast to FP16 without a GradScaler."""
    model = make_replicas()
    optimizer = make_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=not wrong)
    for _ in steps_of():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
