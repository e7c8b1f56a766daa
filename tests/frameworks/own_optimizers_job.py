"""Trains by a library whose optimizers are not torch's; writes what that library itself computes.

Started with LIBRARY, DIRECTORY and VARIANT…, by torchrun for several ranks: each variant is
trained without the probe, and then with it. Without variants it trains once, and leaves mp_agent
to MP_AGENT_ATTACH.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE, BATCHES, BATCH = 6, 6, 4
CLIP = 0.05
RATE = 2.0**-7  # exact in FP32, as which Keras keeps it


def norm_of(gradients: Iterable[torch.Tensor]) -> float:
    return float(sum((each.detach().double() ** 2).sum() for each in gradients) ** 0.5)


def digest_of(weights: Iterable[torch.Tensor]) -> str:
    return sha256(b"".join(each.detach().numpy().tobytes() for each in weights)).hexdigest()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCHES * BATCH, SIZE)
    return inputs, inputs @ torch.randn(SIZE, 1)


def fastai(variant: str) -> dict[str, Any]:
    from fastai.basics import Callback, DataLoader, DataLoaders, Learner, MSELossFlat, OptimWrapper
    from fastai.callback import fp16
    from fastai.callback.training import GradientAccumulation, GradientClip
    from fastai.optimizer import Adam, Lookahead

    pairs = torch.utils.data.TensorDataset(*data())
    loaders = DataLoaders(DataLoader(pairs, bs=BATCH), DataLoader(pairs, bs=BATCH), device="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    seen: dict[str, Any] = {"norms": [], "losses": []}

    class Record(Callback):
        order = fp16.MixedPrecision.order - 1

        def after_loss(self) -> None:
            if self.training:
                seen["losses"].append(float(self.loss))

        def before_step(self) -> None:
            scale = 1.0 if "fp16" not in variant else self.scaler.get_scale()
            seen["norms"].append(norm_of(p.grad for p in self.model.parameters()) / scale)

    callbacks: list[Callback] = [Record()]
    if "clip" in variant:
        callbacks.append(GradientClip(CLIP))
    if "accumulate" in variant:
        callbacks.append(GradientAccumulation(2 * BATCH))
    if "fp16" in variant:
        # Its callback asks for CUDA. At 2^127 the first scaled losses are Inf in FP32.
        fp16.autocast = lambda _, dtype: torch.autocast("cpu", dtype=torch.bfloat16)
        fp16.GradScaler = lambda _, **arguments: torch.amp.GradScaler("cpu", **arguments)
        callbacks.append(fp16.MixedPrecision(init_scale=2.0 ** (127 if "skips" in variant else 10)))

    def make(parameters: Any, lr: float) -> Any:
        if "wrapped" in variant:
            return OptimWrapper(parameters, torch.optim.Adam, lr=lr)
        made = Adam(parameters, lr=lr)
        return Lookahead(made) if "lookahead" in variant else made

    learner = Learner(loaders, model, loss_func=MSELossFlat(), opt_func=make, cbs=callbacks)
    with learner.no_bar(), learner.no_logging():
        learner.fit(2, RATE)
    return {**seen, "weights": digest_of(model.parameters())}


def keras(variant: str) -> dict[str, Any]:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16" if "fp16" in variant else "float32")
    model = keras.Sequential(
        [
            keras.Input((SIZE,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    arguments: dict[str, Any] = {}
    if "global_clip" in variant:
        arguments["global_clipnorm"] = CLIP
    elif "clip" in variant:
        arguments["clipnorm"] = CLIP
    if "accumulate" in variant:
        arguments["gradient_accumulation_steps"] = 2
    if "static" in variant:
        arguments["loss_scale_factor"] = 64.0
    optimizer = keras.optimizers.Adam(RATE, **arguments)
    if "fp16" in variant:
        initial = 2.0 ** (40 if "skips" in variant else 8)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=initial)
    seen: dict[str, Any] = {"norms": [], "losses": []}

    class Record(keras.callbacks.Callback):
        """What is logged is the mean of the epoch so far; there is one batch per epoch."""

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            scale = 64.0 if "static" in variant else 1.0
            if "fp16" in variant:
                scale = 2.0**8
            gradients = [each.value.grad for each in self.model.trainable_weights]
            seen["norms"].append(norm_of(gradients) / scale)
            seen["losses"].append(logs["loss"])

    inputs, target = data()
    if "apply_gradients" in variant:
        loss_of = keras.losses.MeanSquaredError()
        for x, y in zip(inputs.split(BATCH), target.split(BATCH), strict=True):
            model.zero_grad()
            loss = loss_of(y, model(x, training=True))
            loss.backward()
            variables = model.trainable_weights
            changed = [each.value.grad * 3.0 for each in variables]
            seen["norms"].append(norm_of(changed))
            seen["losses"].append(loss.item())
            with torch.no_grad():
                optimizer.apply_gradients(zip(changed, variables, strict=True))
    else:
        model.compile(optimizer=optimizer, loss="mse", jit_compile="compiled" in variant)
        record = Record()
        for x, y in zip(inputs.split(BATCH), target.split(BATCH), strict=True):
            if "repeat" in variant:
                x, y = inputs[:BATCH], target[:BATCH]
            model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[record])
    return {**seen, "weights": digest_of(model.parameters())}


def keras_ranks(variant: str) -> dict[str, Any]:
    """Train a model of Keras under DDP, each rank with data of its own."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(1)])
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = keras.optimizers.Adam(RATE, global_clipnorm=CLIP)
    seen: dict[str, Any] = {"norms": [], "losses": []}
    torch.manual_seed(dist.get_rank())
    inputs, target = data()
    for x, y in zip(inputs.split(BATCH), target.split(BATCH), strict=True):
        model.zero_grad()
        loss = torch.nn.functional.mse_loss(wrapped(x), y)
        loss.backward()
        gradients = [each.value.grad for each in model.trainable_weights]
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        seen["norms"].append(norm_of(gradients))
        seen["losses"].append(float(mean))
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)
    return {**seen, "weights": digest_of(model.parameters())}


JOBS: dict[str, Callable[[str], dict[str, Any]]] = {
    "fastai": fastai,
    "keras": keras,
    "keras_ranks": keras_ranks,
}


def train(library: str, variant: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return JOBS[library](variant)


def main(library: str, directory: Path, variants: Sequence[str]) -> None:
    if not variants:
        (directory / "seen.json").write_text(json.dumps(train(library, "")))
        return
    from mp_agent.probe.probe import Probe
    from mp_agent.ring.writer import RingWriter
    from mp_agent.settings import Settings
    from tests.agent.probe.rings import make_identity
    from tests.gloo import end_process_group

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        directory = directory / str(rank)
    for variant in variants:
        without = train(library, variant)
        place = directory / variant
        place.mkdir(parents=True)
        writer = RingWriter.create(place / f"rank{rank}.ring", make_identity(rank, ranks))
        probe = Probe(
            lambda ring=writer: ring,  # type: ignore[misc]
            Settings(layer_interval=2),
            ranks_in_run=lambda: ranks,
        )
        probe.attach()
        seen = train(library, variant)
        probe.flush()
        probe.detach()
        writer.close()
        (place / "seen.json").write_text(json.dumps({**seen, "without": without["weights"]}))
    if ranks > 1:
        end_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
