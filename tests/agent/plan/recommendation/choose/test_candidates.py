"""What hardware rules out."""

import pytest

from mp_agent.plan.precision_plan import Hardware, formats_of_cpu, gpu_of_capability
from mp_agent.plan.recommendation.choose import candidates_for, ruled_out


def usable(goal, hardware):
    return [one for one in candidates_for(goal) if not ruled_out(one, goal, hardware)]


@pytest.mark.parametrize(
    ("capability", "speed", "stability"),
    [
        ((6, 1), ["fp32"], ["fp32"]),
        ((7, 0), ["fp16-autocast", "fp32"], ["fp32"]),
        ((7, 5), ["fp16-autocast", "fp32"], ["fp32"]),
        (
            (8, 0),
            ["bf16-autocast", "fp16-autocast", "tf32", "fp32"],
            ["bf16-autocast", "tf32", "fp32"],
        ),
    ],
)
def test_gpus_get_what_their_tensor_cores_multiply(capability, speed, stability):
    hardware = gpu_of_capability(capability)
    assert usable("speed", hardware) == speed
    assert usable("stability", hardware) == stability


def test_a_gpu_of_which_nothing_is_known_gets_fp32():
    formats = dict.fromkeys(("fp16", "bf16", "tf32", "fp8"), None)
    hardware = Hardware(kind="cuda", name="a GPU", formats=formats)
    assert usable("speed", hardware) == ["fp32"]
    assert "is not known" in ruled_out("bf16-autocast", "speed", hardware)


@pytest.mark.parametrize(
    ("flags", "speed"),
    [
        (frozenset({"avx2"}), ["fp32"]),
        (frozenset({"avx512_bf16"}), ["bf16-autocast", "fp32"]),
        (None, ["fp32"]),
    ],
)
def test_processors_get_bf16_for_speed_only_with_instructions_for_it(flags, speed):
    hardware = Hardware(kind="cpu", name="a processor", formats=formats_of_cpu(flags))
    assert usable("speed", hardware) == speed
    assert usable("memory", hardware) == ["bf16", "bf16-autocast", "fp32"]
