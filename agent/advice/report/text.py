"""Numbers and facts as texts."""

from collections.abc import Iterator

from mp_agent.advice.environment import Environment


def size_text(size: int) -> str:
    """Return a number of bytes with its unit."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def environment_facts(environment: Environment) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the hardware and software; what is not there is left out."""
    hardware = environment.hardware
    detected = "" if hardware.detected else " (given, not detected)"
    yield ("GPU" if hardware.kind == "cuda" else "processor"), hardware.name + detected
    if hardware.kind == "cuda" and hardware.detected:
        yield "GPUs", str(hardware.devices)
    if hardware.compute_capability is not None:
        yield "compute capability", ".".join(map(str, hardware.compute_capability))
    if hardware.tensor_cores is not None:
        yield "tensor cores", "yes" if hardware.tensor_cores else "no"
    known = {True: "yes", False: "no", None: "not known"}
    yield "multiplies", ", ".join(f"{n.upper()}: {known[v]}" for n, v in hardware.formats.items())
    if hardware.memory_bytes is not None:
        free = hardware.memory_free_bytes
        yield (
            "memory",
            size_text(hardware.memory_bytes) + (f", {size_text(free)} free" if free else ""),
        )
    for name, version in environment.versions.items():
        if version is not None:
            yield name, version
    yield "products", ", ".join(f"{name} = {value}" for name, value in environment.products.items())
