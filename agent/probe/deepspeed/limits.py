"""Which DeepSpeed engines are not measured: where the numbers are not known to be right."""

from typing import Any


def unsupported_by(engine: Any) -> str:
    """Return why an engine's gradients are left out; empty when they are measured."""
    optimizer = engine.optimizer
    reasons = {
        "DeepSpeed's pipeline parallelism": _has(engine, "pipeline_parallelism"),
        "DeepSpeed's experts": _has(engine, "has_moe_layers"),
        "DeepSpeed with model parallelism": _splits_tensors(engine),
        "DeepSpeed's ZenFlow": _has(engine, "zenflow") or _has(optimizer, "zenflow"),
        "DeepSpeed's SuperOffload": "SuperOffload" in type(optimizer).__name__,
        "DeepSpeed's MiCS": "MiCS" in type(optimizer).__name__,
        "DeepSpeed's offload of gradients to NVMe": _has(optimizer, "swap_optimizer"),
        "DeepSpeed's offload of gradients from an accelerator": _offloads_from_accelerator(engine),
        "DeepSpeed's Muon": _updates_in_place_of_gradients(optimizer),
        "DeepSpeed's DeepCompile": _calls(engine, "is_deepcompile_active"),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _has(owner: Any, name: str) -> bool:
    return bool(getattr(owner, name, False))


def _calls(owner: Any, name: str) -> bool:
    method = getattr(owner, name, None)
    return bool(method()) if callable(method) else False


def _splits_tensors(engine: Any) -> bool:
    """Return whether ranks hold parts of tensors besides ZeRO's: by AutoTP, or a user's `mpu`."""
    sizes = [getattr(engine, "autotp_size", None)]
    sizes.append(getattr(getattr(engine, "mpu", None), "get_model_parallel_world_size", None))
    return any(int(size()) > 1 for size in sizes if callable(size))


def _offloads_from_accelerator(engine: Any) -> bool:
    """Return whether gradients are still on their way to the host when a step begins."""
    optimizer = engine.optimizer
    offloads = _has(optimizer, "cpu_offload") or _has(optimizer, "offload_optimizer")
    return offloads and str(engine.device).split(":")[0] != "cpu"


def _updates_in_place_of_gradients(optimizer: Any) -> bool:
    """Return whether ZeRO puts Muon's orthogonal updates where gradients are kept.

    The optimizer of BF16 weights at stage 1 makes them later.
    """
    basic = getattr(optimizer, "optimizer", None)
    uses = "muon" in type(basic).__name__.lower()
    return uses and not hasattr(optimizer, "fp32_groups_has_gradients")
