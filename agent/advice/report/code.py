"""A plan as Python to paste: set-up, optimizer, and a training step."""

from collections.abc import Iterator

from mp_agent.advice.plan import AUTOCAST, PrecisionPlan

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
    arguments = ", ".join(f"{name}={value!r}" for name, value in plan.settings.items())
    yield f"mp_agent.init({arguments})"
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
    yield f"    return torch.optim.AdamW(trained, lr=learning_rate, eps={plan.adam_epsilon!r})"
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
