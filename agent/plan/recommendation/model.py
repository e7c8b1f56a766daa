"""A plan of precision as a report: texts, JSON, and Python to paste."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from mp_agent.plan.precision_plan import AUTOCAST, DEFAULT_BETA2, Environment, PrecisionPlan
from mp_agent.report.content import plain, written

LOSS = "(loss)"
"""What the comparison calls the loss function among the modules to keep in FP32."""

_HELPERS = '''
def in_fp32(value):
    """Return a value with its 16-bit tensors in FP32; gradients go through."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, in_fp32(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value)(in_fp32(item) for item in value)
    return value
'''
_KEEP = '''
def keep_in_fp32(module):
    """Let a module, and all within it, run without autocast."""
    forward = module.forward

    @functools.wraps(forward)
    def kept(*args, **kwargs):
        with torch.autocast("{device}", enabled=False):
            return forward(*in_fp32(args), **in_fp32(kwargs))

    module.forward = kept
'''
_LOW = '''
def autocast_model_only(model):
    """Let the loss function run in FP32: autocast ends with the model."""
    forward = model.forward

    @functools.wraps(forward)
    def low(*args, **kwargs):
        with torch.autocast("{device}", dtype=torch.{dtype}):
            outputs = forward(*args, **kwargs)
        return in_fp32(outputs)

    model.forward = low
'''


def code_of(plan: PrecisionPlan) -> str:
    """Return a module with `prepare(model)`, `make_optimizer` and `train_step`."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: PrecisionPlan) -> Iterator[str]:
    modules = tuple(name for name in plan.keep_fp32 if name != LOSS)
    if plan.keep_fp32:
        yield "import functools"
        yield ""
    yield from ("import torch", "", "import mp_agent", "")
    yield from _init(plan)
    yield from _products(plan)
    if plan.keep_fp32:
        yield _HELPERS
        if modules:
            yield _KEEP.format(device=plan.device)
        if LOSS in plan.keep_fp32:
            yield _LOW.format(device=plan.device, dtype=AUTOCAST[plan.precision])
    yield from _prepare(plan, modules)
    yield from _optimizer(plan)
    yield from _step(plan)


def _init(plan: PrecisionPlan) -> Iterator[str]:
    if not plan.settings:
        yield "mp_agent.init()"
        return
    yield "mp_agent.init("
    for name, value in plan.settings.items():
        if not isinstance(value, Mapping):
            yield f"    {name}={value!r},"
            continue
        yield f"    {name}={{"
        yield from (f"        {json.dumps(key)}: {one!r}," for key, one in value.items())
        yield "    },"
    yield ")"


def _products(plan: PrecisionPlan) -> Iterator[str]:
    if plan.device != "cuda":
        return
    if plan.precision == "tf32":
        yield 'torch.set_float32_matmul_precision("high")  # TF32'
        yield "torch.backends.cudnn.allow_tf32 = True"
    elif plan.keep_fp32 or plan.precision == "fp32":
        yield 'torch.set_float32_matmul_precision("highest")  # FP32 stays FP32'
        yield "torch.backends.cudnn.allow_tf32 = False"


def _prepare(plan: PrecisionPlan, modules: tuple[str, ...]) -> Iterator[str]:
    yield from ("", "", "def prepare(model):")
    yield '    """Call once, before the model is wrapped (DDP, FSDP) or compiled."""'
    if plan.precision == "bf16":
        yield "    model.to(torch.bfloat16)"
    for name in modules:
        yield f'    keep_in_fp32(model.get_submodule("{name}"))'
    if LOSS in plan.keep_fp32:
        yield "    autocast_model_only(model)"
    yield "    return model"


def _optimizer(plan: PrecisionPlan) -> Iterator[str]:
    yield from ("", "", "def make_optimizer(model, learning_rate):")
    yield "    trained = [p for p in model.parameters() if p.requires_grad]"
    betas = "" if plan.adam_beta2 == DEFAULT_BETA2 else f", betas=(0.9, {plan.adam_beta2!r})"
    yield (
        f"    return torch.optim.AdamW(trained, lr=learning_rate, eps={plan.adam_epsilon!r}{betas})"
    )
    yield ""
    if plan.loss_scale is not None:
        scale = f"init_scale={plan.loss_scale!r}"
        yield from ("", f'scaler = torch.amp.GradScaler("{plan.device}", {scale})', "")


def _step(plan: PrecisionPlan) -> Iterator[str]:
    dtype = AUTOCAST.get(plan.precision)
    scaled = plan.loss_scale is not None
    yield from ("", "def train_step(model, batch, compute_loss, optimizer):")
    if dtype is None or LOSS in plan.keep_fp32:
        yield "    loss = compute_loss(model, batch)"
    else:
        yield f'    with torch.autocast("{plan.device}", dtype=torch.{dtype}):'
        yield "        loss = compute_loss(model, batch)"
    yield "    scaler.scale(loss).backward()" if scaled else "    loss.backward()"
    if scaled and plan.clip_norm is not None:
        yield "    scaler.unscale_(optimizer)  # clipping needs the real gradients"
    if plan.clip_norm is not None:
        clip = f"max_norm={plan.clip_norm!r}"
        yield f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})"
    if scaled:
        yield from ("    scaler.step(optimizer)", "    scaler.update()")
    else:
        yield "    optimizer.step()"
    yield "    optimizer.zero_grad(set_to_none=True)"
    yield "    return loss.detach()"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReason:
    """Why a part of the plan is as it is."""

    subject: str
    """Such as `dtype`, `loss scale`, `keep in FP32`, `Adam epsilon`, `clip norm`."""
    value: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsideredPrecision:
    """A precision that was tried, in the order of the goal."""

    precision: str
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """The products, convolutions among them, of one call within a module's forward."""

    module: str
    operation: str
    dimensions: tuple[int, ...]
    """Those that tensor cores split into tiles: m, n and k of a product, channels per group of a
    convolution."""
    flops: int
    """Two for each multiplication and addition."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Dimensions that are no multiple of 8, the tile of 16-bit tensor cores."""
        return tuple(dict.fromkeys(one for one in self.dimensions if one % 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class OddModule:
    """A module with dimensions that tensor cores pad or cannot use."""

    module: str
    dimensions: tuple[int, ...]
    flops_ratio: float
    """Share of the model's products that it computes with these dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFacts:
    """What the gradients of the measured FP32 steps showed."""

    steps: int
    norms: tuple[float, ...]
    """L2 norm over all parameters, per step."""
    losses: tuple[float, ...]
    abs_max: float
    """Largest magnitude of any gradient, of parameters or module outputs."""
    smallest_exponent: int | None
    """floor(log2) of the smallest magnitude that is not zero, of parameters; None for none."""
    zero_ratio: float
    """Share of elements of the parameters' gradients that are zero in FP32 already."""
    fp16_lost_ratio: float
    """Share of the others that become zero in FP16 without a loss scale."""
    fp16_lost_scaled_ratio: float | None
    """The same with the loss scale that was computed; None where there is none."""
    activation_lost_scaled_ratio: float | None
    """The same for the gradients of module outputs."""
    bf16_stale_ratio: float | None
    """Share of updates of AdamW that vanish where weights are in BF16; None if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes that a training step needs, by what they hold."""

    weights_bytes: int
    casts_bytes: int
    """Copies of weights in 16 bits that autocast keeps during a forward pass."""
    gradients_bytes: int
    optimizer_bytes: int
    """Bytes of the two moments of Adam."""
    activations_bytes: int
    """What the forward pass saves for the backward pass, measured on this batch."""

    @property
    def total_bytes(self) -> int:
        """Return the sum."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """An expected speed-up over FP32: an estimate, not a measurement."""

    least_ratio: float
    most_ratio: float
    eligible_ratio: float
    """Share of the products' operations that 16-bit tensor cores can use as they are."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The result of `mp_agent.recommend`."""

    plan: PrecisionPlan
    goal: str
    model: str
    """Name of its class."""
    parameters: int
    environment: Environment
    reasons: tuple[PlanReason, ...]
    considered: tuple[ConsideredPrecision, ...]
    gradients: GradientFacts
    odd_modules: tuple[OddModule, ...]
    memory_fp32: TrainingMemory
    memory_planned: TrainingMemory
    speed: SpeedEstimate | None
    """None where nothing is known to expect; the reasons say why."""
    notes: tuple[str, ...] = ()

    def code(self) -> str:
        """Return Python that trains by the plan, to paste."""
        return code_of(self.plan)

    def as_json(self) -> str:
        """Return the recommendation as JSON; docs/recommend.md describes it."""
        plain_self = plain(self)
        for name in ("memory_fp32", "memory_planned"):
            plain_self[name]["total_bytes"] = getattr(self, name).total_bytes
        return written(
            {
                "format": "mp_agent recommendation",
                "version": 1,
                **plain_self,
                "plan": self.plan.as_dict(),
                "code": self.code(),
            }
        )
