"""Programs that never mention mp_agent, started by launchers that know nothing of it either."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader

pytestmark = pytest.mark.long

_SPAWNED = """
import time, torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    time.sleep(0.3)  # as in tests/gloo.py
    dist.destroy_process_group()

if __name__ == "__main__":
    import sys
    mp.spawn(train, (sys.argv[1],), nprocs=2)
"""

_LIGHTNING = """
import lightning, torch

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=1.0,
    )
    trainer.fit(Module(), loader)
"""

_ACCELERATE = """
import torch
from accelerate import Accelerator, debug_launcher

def train():
    accelerator = Accelerator(cpu=True)  # gives each process RANK=0, whatever its group says
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(2, 4)).sum())
        optimizer.step()

if __name__ == "__main__":
    debug_launcher(train, num_processes=2)
"""


_TRAINED_BY_ACCELERATE = """
import torch
from accelerate import Accelerator

def train(*ignored):
    accelerator = Accelerator(cpu=True)
    model, data = torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.randn(32, 4), 4)
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data
    )
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
    accelerator.print("trained by", accelerator.num_processes)
"""

_ACCELERATE_LAUNCH = (
    _TRAINED_BY_ACCELERATE
    + """
if __name__ == "__main__":
    train()
"""
)

_NOTEBOOK_LAUNCHER = (
    _TRAINED_BY_ACCELERATE
    + """
if __name__ == "__main__":
    import socket
    from accelerate import notebook_launcher
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    notebook_launcher(train, num_processes=2, use_port=str(port))
"""
)

_LAUNCHED = ("--num_processes", "2", "--multi_gpu", "--main_process_port", "0")


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _ranks(
    script: str, directory: Path, command: Sequence[str] = (sys.executable,), expects: str = ""
) -> list[RingReader]:
    """Run a script with the variable set; return the rings of its only run, by rank."""
    path = directory / "train.py"
    path.write_text(script)
    environment = {
        **os.environ,
        "MP_AGENT_ATTACH": "1",
        "MP_AGENT_DIR": str(directory / "shm"),
        "MP_AGENT_NODE_AGENT": "none",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
        "HF_HUB_OFFLINE": "1",
    }
    called = [*command, str(path), str(directory / "meeting")] if script else list(command)
    result = subprocess.run(called, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert expects in result.stdout
    (run_dir,) = locations.find_runs(directory / "shm")
    return [RingReader.open(ring) for ring in locations.find_rings(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [_SPAWNED, _LIGHTNING, _LIGHTNING.replace('"ddp"', '"ddp_spawn"')],
    ids=["mp.spawn", "lightning", "ddp_spawn"],
)
def test_every_rank_is_watched_and_no_other_process(framework, tmp_path, script):
    if script is not _SPAWNED:
        framework("lightning")
    readers = _ranks(script, tmp_path)
    seen = [
        (
            reader.identity.rank,
            reader.identity.world_size,
            reader.identity.local_rank,
            reader.state.committed_sequence,
            reader.state.end_reason,
        )
        for reader in readers
    ]
    for reader in readers:
        reader.close()
    assert seen == [(rank, 2, rank, 4, EndReason.COMPLETED) for rank in (0, 1)]


@pytest.mark.slow
def test_ranks_that_accelerate_forks_are_watched_under_the_numbers_of_their_group(
    framework, tmp_path
):
    framework("accelerate")
    readers = _ranks(_ACCELERATE, tmp_path)
    seen = [
        (reader.identity.rank, reader.identity.world_size, reader.state.committed_sequence)
        for reader in readers
    ]
    for reader in readers:
        reader.close()
    assert seen == [(0, 2, 4), (1, 2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate launch", "notebook_launcher"])
def test_every_rank_of_accelerate_s_launchers_is_watched(framework, tmp_path, launcher):
    framework("accelerate")
    if launcher == "notebook_launcher":
        readers = _ranks(_NOTEBOOK_LAUNCHER, tmp_path, expects="trained by 2")
    else:
        command = (_program("accelerate"), "launch", *_LAUNCHED)
        readers = _ranks(_ACCELERATE_LAUNCH, tmp_path, command, expects="trained by 2")
    _assert_watched(readers, steps=4)


@pytest.mark.slow
def test_every_rank_of_a_console_program_is_watched(framework, tmp_path):
    framework("trl")
    framework("tokenizers")
    model, data = tmp_path / "model", tmp_path / "data"
    _write_model(model)
    data.mkdir()
    row = json.dumps({"text": "one two one two"}) + "\n"
    (data / "train.jsonl").write_text(row * 16)
    arguments = {
        "--model_name_or_path": str(model),
        "--dataset_name": str(data),
        "--output_dir": str(tmp_path / "trained"),
        "--max_steps": "4",
        "--per_device_train_batch_size": "2",
        "--max_length": "8",
        "--bf16": "false",
        "--gradient_checkpointing": "false",
        "--save_strategy": "no",
        "--report_to": "none",
    }
    given = [word for pair in arguments.items() for word in pair]
    readers = _ranks("", tmp_path, [_program("trl"), "sft", "--use_cpu", *_LAUNCHED, *given])
    _assert_watched(readers, steps=4)
    assert (tmp_path / "trained" / "model.safetensors").exists()


def _assert_watched(readers: list[RingReader], *, steps: int) -> None:
    seen = [
        (
            reader.identity.rank,
            reader.identity.world_size,
            reader.state.committed_sequence,
            reader.state.end_reason,
        )
        for reader in readers
    ]
    for reader in readers:
        reader.close()
    assert seen == [(rank, 2, steps, EndReason.COMPLETED) for rank in (0, 1)]


def _write_model(directory: Path) -> None:
    """Write a language model of two words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = ("<eos>", "one", "two")
    numbered = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    )
    fast.save_pretrained(directory)
    config = GPT2Config(
        vocab_size=3,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(directory)


_BY_HAND = """
import sys, torch
import mp_agent.probe.api as api

model = torch.nn.Linear(4, 1)
for step in range(int(sys.argv[2])):
    model.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
"""


def _train_by_hand(directory: Path, backwards: int) -> tuple[str, list[RingReader]]:
    path = directory / "train.py"
    path.write_text(_BY_HAND)
    environment = {
        **os.environ,
        "MP_AGENT_ATTACH": "1",
        "MP_AGENT_DIR": str(directory / "shm"),
        "MP_AGENT_NODE_AGENT": "none",
    }
    command = [sys.executable, str(path), "", str(backwards)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    runs = locations.find_runs(directory / "shm")
    rings = [ring for run in runs for ring in locations.find_rings(run)]
    return done.stderr, [RingReader.open(ring) for ring in rings]


def test_twenty_backwards_without_a_known_optimizer_are_said_to_be_unmeasured(tmp_path):
    log, (reader,) = _train_by_hand(tmp_path, 20)
    unsupported = reader.state.unsupported
    reader.close()
    assert unsupported == ("training without an optimizer that mp_agent knows",)
    assert log.count("without an optimizer that mp_agent knows") == 1


def test_a_process_that_goes_backward_now_and_then_is_no_training(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_VERSION")  # triton reports what a last collection would have freed
    log, readers = _train_by_hand(tmp_path, 19)
    assert readers == []
    assert log == ""


_WRAPPED = """
import torch

original = torch.optim.Optimizer.__init__

made = []

def counted(self, *args, **kwargs):
    made.append(self)
    original(self, *args, **kwargs)

torch.optim.Optimizer.__init__ = counted
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
third = torch.optim.SGD(model.parameters(), lr=0.1)
assert made == [optimizer, second, third], "the wrapper goes on being called, once each"
"""


@pytest.mark.parametrize("replaces", [False, True])
def test_an_optimizer_whose_constructor_another_has_wrapped_is_watched(tmp_path, replaces):
    script = _WRAPPED
    if replaces:  # with one that never calls what was there before
        script = script.replace("original = torch.optim.Optimizer.__init__", _UNWRAPPED.strip())
    (reader,) = _ranks(script, tmp_path)
    seen = reader.state.committed_sequence, reader.state.unsupported
    reader.close()
    assert seen == (4, ())


_UNWRAPPED = """
original = torch.optim.Optimizer.__init__
while hasattr(original, "__wrapped__"):
    original = original.__wrapped__
"""


def test_an_interpreter_without_the_variable_or_without_torch_is_left_as_it_is():
    script = (
        "import sys; names = [n for n in sys.modules if 'mp_agent' in n and 'editable' not in n]\n"
        "print(names, [f for f in sys.meta_path if 'Torch' in type(f).__name__])"
    )

    def seen(**environ: str) -> str:
        kept = {name: value for name, value in os.environ.items() if name != "MP_AGENT_ATTACH"}
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, env={**kept, **environ}, capture_output=True, text=True, check=True
        ).stdout

    assert seen() == "[] []\n"
    assert seen(MP_AGENT_ATTACH="0") == "['mp_agent_attach'] []\n"
    assert seen(MP_AGENT_ATTACH="1").startswith("['mp_agent_attach'] [<mp_agent_attach._Torch")
