"""The memory of a comparison of precisions, as a multiple of one forward and backward pass.

Each case runs in a separate process, and what it adds to the resident memory at its peak is
counted: both include the weights, which are made before. The peak of a process never falls, so that
every temporary tensor is in it.

    python -m benchmarks.compare_memory [--width N] [--layers N] [--tokens N] [--dtype NAME …]
"""

import argparse
import json
import resource
import subprocess
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.machine import describe, markdown
from mp_agent.plan.precision_plan import DEFAULT_NAMES

_HEADER = ("precision", "parameters", "forward + backward", "comparison", "ratio")
_VOCABULARY = 1024


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, -1, 64).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        mlp: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + mlp


class Transformer(nn.Module):
    """A decoder whose head has its own weights."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross entropy of the next token."""
    logits = model(tokens)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def measure(width: int, layers: int, tokens: int, dtype: str) -> tuple[int, int]:
    """Return parameters and peak bytes; dtype: empty for a plain forward and backward pass."""
    torch.manual_seed(0)
    # What is loaded on first use is not counted.
    _step(Transformer(64, 1), torch.randint(0, _VOCABULARY, (1, 8)), dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Transformer(width, layers)
    _step(model, torch.randint(0, _VOCABULARY, (2, tokens)), dtype)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return sum(parameter.numel() for parameter in model.parameters()), (peak - before) * 1024


def _step(model: nn.Module, tokens: Tensor, dtype: str) -> None:
    if not dtype:
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        return
    from mp_agent.plan.comparison.api import compare

    compare(model, tokens, loss_of, dtypes=[dtype], search_trials=0)


def _measured(arguments: argparse.Namespace, dtype: str) -> tuple[int, int]:
    """Measure in a separate process."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("width", "layers", "tokens")]
    command = [sys.executable, "-m", "benchmarks.compare_memory", *sizes, "--one", dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    parameters, peak = json.loads(done.stdout)
    return parameters, peak


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256, help="per sequence, of two")
    parser.add_argument("--dtype", dest="dtypes", action="append", help="default: all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one is not None:
        sizes = arguments.width, arguments.layers, arguments.tokens
        print(json.dumps(measure(*sizes, arguments.one)))
        return
    parameters, plain = _measured(arguments, "")
    rows = []
    for dtype in arguments.dtypes or DEFAULT_NAMES:
        _, compared = _measured(arguments, dtype)
        cells = (f"{plain / 2**20:.0f} MiB", f"{compared / 2**20:.0f} MiB")
        rows.append((dtype, f"{parameters:,}", *cells, f"**{compared / plain:.2f}**"))
    print(f"{describe(torch.device('cpu'))}\n\n{markdown(_HEADER, rows)}")


if __name__ == "__main__":
    main()
