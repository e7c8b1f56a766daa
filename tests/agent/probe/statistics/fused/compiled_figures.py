"""Compiles the kernels for GPUs that need not be there, and prints figures of the machine code.

Run by `test_compiled` in a separate process, in which Triton does not interpret:

    python -m tests.agent.probe.statistics.fused.compiled_figures

prints JSON: by target and variant the registers and spilled bytes of a thread, and for NVIDIA GPUs
the instructions of the innermost loop per element.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mp_agent.probe.statistics.fused import distribution_kernels as of_distribution
from mp_agent.probe.statistics.fused import kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KINDS = {"fp32": kernels.FP32, "bf16": kernels.BF16, "fp16": kernels.FP16}

_MEASURE = {"pointers": "*i64", "chunks": "*i64", "chunk_numbers": "*i32", "sums": "*fp64"}
_MEASURE |= {"counts": "*i32", "KIND": "constexpr", "ABS_SUM": "constexpr", "R": "constexpr"}
_FOLD = {"sums": "*fp64", "counts": "*i32", "groups": "*i64", "inverse_scale": "*fp64"}
_FOLD |= {"table": "*fp64", "ABS_SUM": "constexpr", "B": "constexpr"}

_COUNT = {"pointers": "*i64", "chunks": "*i64", "chunk_numbers": "*i32", "edges": "*i32"}
_COUNT |= {"counts": "*i32", "sums": "*fp64", "KIND": "constexpr", "R": "constexpr"}
_EDGES = {"table": "*fp64", "inverse_scale": "*fp64", "loss_scale": "*fp64", "edges": "*i32"}
_FOLD_LAYERS = {"counts": "*i32", "sums": "*fp64", "layers": "*i64", "spans": "*i32"}
_FOLD_LAYERS |= {"inverse_scale": "*fp64", "loss_scale": "*fp64", "table": "*fp64"}
_FOLD_LAYERS |= {"B": "constexpr"}

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def figures() -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of all variants for all targets."""
    return {name: dict(_of_target(target)) for name, target in TARGETS.items()}


def _of_target(target: GPUTarget) -> Iterator[tuple[str, dict[str, float]]]:
    yield from _of_gradients(target)
    yield from _of_distribution(target)


def _of_gradients(target: GPUTarget) -> Iterator[tuple[str, dict[str, float]]]:
    for abs_sum in (False, True) if target.arch == 90 else (True,):
        for name, kind in KINDS.items():
            constants = {"KIND": kind, "ABS_SUM": abs_sum, "R": kernels.ROWS}
            compiled = _compiled(target, kernels.measure_chunks, _MEASURE, constants, kernels.WARPS)
            found = _resources(target, compiled)
            if target.backend == "cuda":
                elements = 4 if kind == kernels.FP32 else 8
                found["instructions_per_element"] = (
                    _in_loop(compiled.asm["cubin"], ".128") / elements
                )
            yield (f"{name} of layers" if abs_sum else name), found
    if target.arch not in (90, "gfx942"):
        return
    constants = {"ABS_SUM": True, "B": kernels.FOLD_BLOCK}
    yield (
        "fold",
        _resources(
            target, _compiled(target, kernels.fold_groups, _FOLD, constants, kernels.FOLD_WARPS)
        ),
    )


def _of_distribution(target: GPUTarget) -> Iterator[tuple[str, dict[str, float]]]:
    for name, kind in KINDS.items():
        constants = {"KIND": kind, "R": of_distribution.ROWS}
        compiled = _compiled(
            target, of_distribution.count_chunks, _COUNT, constants, of_distribution.WARPS
        )
        found = _resources(target, compiled)
        if target.backend == "cuda":
            found["instructions_per_element"] = _in_loop(compiled.asm["cubin"], "")
        yield f"{name} distribution", found
    compiled = _compiled(target, of_distribution.find_edges, _EDGES, {}, 1)
    yield "edges", _resources(target, compiled)
    constants = {"B": of_distribution.FOLD_BLOCK}
    compiled = _compiled(
        target,
        of_distribution.fold_layers,
        _FOLD_LAYERS,
        constants,
        of_distribution.FOLD_WARPS,
    )
    yield "distribution fold", _resources(target, compiled)


def _compiled(target, kernel, signature, constants: Mapping[str, int], warps: int):
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def _resources(target: GPUTarget, compiled) -> dict[str, float]:
    if target.backend == "hip":
        code = compiled.asm["amdgcn"]
        return {
            "registers": _number(r"\.vgpr_count:\s+(\d+)", code),
            "spilled_bytes": _number(r"\.vgpr_spill_count:\s+(\d+)", code)
            + _number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        }
    with _file(compiled.asm["cubin"]) as cubin:
        usage = _run("cuobjdump", "--dump-resource-usage", cubin)
    return {
        "registers": _number(r"REG:(\d+)", usage),
        "spilled_bytes": _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
    }


def _in_loop(cubin: bytes, width: str) -> float:
    """Return the instructions of the shortest loop with several loads of a width, per such load."""
    with _file(cubin) as file:
        lines = _run("nvdisasm", "-c", file).splitlines()
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in lines:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(found[1])
    per_load: list[float] = []
    for end, instruction in enumerate(code):
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        if target and (start := labels.get(target[1], end)) < end:
            body = code[start : end + 1]
            loads = sum("LDG" in each and width in each for each in body)
            if loads > 1:
                per_load.append(len(body) / loads)
    return min(per_load)


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        yield file.name


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / tool, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise LookupError(f"{pattern} is not in what the compiler says")
    return int(found[1])


if __name__ == "__main__":
    print(json.dumps(figures()))
