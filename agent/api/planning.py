"""Functions for the time before a training: checks of code, comparisons and plans of precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mp_agent.lint.finding import CheckReport
    from mp_agent.plan.comparison.model import PrecisionReport
    from mp_agent.plan.evaluation.model import PlanEvaluation
    from mp_agent.plan.precision_plan import PrecisionPlan
    from mp_agent.plan.recommendation.model import Recommendation


def check(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    jobs: int = 1,
) -> CheckReport:
    """Find mistakes in training code without running it, as `mp-agent check` does.

    `paths` are Python files, notebooks, and folders of them; `select` and `ignore` codes of rules,
    or their beginnings, on top of the settings in pyproject.toml. The report has `findings` (path,
    span, code, message), the files that were `skipped`, and `counts()` by rule. Any process, before
    or without `init()`; with `jobs` above 1, processes of its own share the files.

    Raises SettingError, naming the path, the code or the setting that is wrong.
    """
    from mp_agent.lint.runner import check_paths

    return check_paths(paths, select=select, ignore=ignore, jobs=jobs)


def compare_precision(
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[[nn.Module, Any], Tensor] | None,
    *,
    dtypes: Iterable[str | torch.dtype] = (
        "fp16-autocast",
        "bf16-autocast",
        "fp16",
        "bf16",
        "tf32",
        "fp8-e4m3",
        "fp8-e5m2",
    ),
    reference: str | torch.dtype = "fp32",
    tolerance: float = 0.05,
    loss_scale: float = 1.0,
    search_trials: int = 40,
    progress: bool | None = None,
) -> PrecisionReport:
    """Compare one forward and backward pass in several precisions with FP32, module by module.

    Reports where error begins, where it is amplified and where it is only handed on, and which
    modules have to stay in FP32 for a precision to pass. Independent of `init`, in one process.

    `batch` is what `loss(model, batch)` gets, which returns a loss of one element. A loss module is
    called with `model(inputs)` and `target` of a pair `(inputs, target)`; None stands for the loss
    that `model(**batch)`, `model(*batch)` or `model(batch)` returns, itself or as `.loss`. Of a
    DataLoader or an iterator it is the first. `dtypes` are names (`fp8-e4m3-autocast` and
    `fp8-e5m2-autocast` exist besides the default) or torch dtypes, each of which stands for its
    precisions with and without autocast. `reference` is `fp32` or `fp64`. A precision passes if the
    mean absolute difference of the model's outputs is below `tolerance` times their RMS, as for
    `recommend`, and nothing is NaN or Inf that is finite in the reference. `loss_scale` is the
    factor of its loss in the backward pass. `search_trials` bounds the runs, per precision that
    fails, that search what to keep in FP32; 0 searches nothing. `progress` shows a bar on standard
    error; by default on terminals.

    The model itself is never run: its weights, gradients, buffers, mode, and all random number
    generators are as before, also after an exception. Both sides
    hold their activations at the same time; a reference in FP64 needs twice the bytes of FP32.

    Raises CompareError (a ValueError), naming the argument or the module, for what cannot be
    compared, such as sharded models, and whatever the reference's own run raises.
    """
    from mp_agent.plan.comparison.api import compare
    from mp_agent.plan.target import progress_bar

    with progress_bar(progress) as bar:
        return compare(
            model,
            batch,
            loss,
            dtypes=dtypes,
            reference=reference,
            tolerance=tolerance,
            loss_scale=loss_scale,
            search_trials=search_trials,
            progress=bar,
        )


def recommend(
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    goal: str = "speed",
    capability: str | None = None,
    memory_bytes: int | None = None,
    reinforcement: bool = False,
    evaluations: Iterable[PlanEvaluation] = (),
    steps: int = 8,
    learning_rate: float = 1e-4,
    tolerance: float = 0.05,
    search_trials: int = 40,
    progress: bool | None = None,
) -> Recommendation:
    """Recommend a precision for a model on this hardware, with the reason for each part.

    The result has `plan` (precision, initial loss scale, modules to keep in FP32, Adam's epsilon,
    the norm to clip at, and `settings` for `init`), `reasons`, `considered`, what was measured,
    estimates of speed and memory, `code()` to paste and `as_json()`. Independent of `init`, in one
    process.

    `batch` and `loss` are those of `compare_precision`; a DataLoader or an iterator in place of the
    batch gives one batch per step. `goal` is `speed`, `memory` or `stability`. `capability`, such
    as "8.0", plans for a GPU that is not here. A precision with which a training step needs more
    memory than there is, or than `memory_bytes`, is not taken. `reinforcement` advises against
    BF16, for reinforcement learning. Nor is a precision taken that did not hold in one of the
    `evaluations` of this model. Gradients are measured in `steps` steps in FP32 with AdamW at
    `learning_rate`. A precision passes if the mean absolute difference of the model's
    outputs is below `tolerance` times their RMS, and nothing is NaN or Inf that is finite in FP32;
    `search_trials` bounds the search for what to keep in FP32. `progress` shows a bar on standard
    error; by default on terminals.

    The model itself is never run or changed. Needs the memory of several copies: weights, gradients
    and Adam's state in FP32.

    Raises AdviceError (a ValueError), naming the argument, for wrong ones, for a model whose loss
    or gradients are not finite in FP32, and where no precision fits the memory; CompareError for
    models that cannot be copied.
    """
    from mp_agent.plan.recommendation.api import recommend_plan
    from mp_agent.plan.target import progress_bar

    with progress_bar(progress) as bar:
        return recommend_plan(
            model,
            batch,
            loss,
            goal=goal,
            capability=capability,
            memory_bytes=memory_bytes,
            reinforcement=reinforcement,
            excluded={k: v for one in evaluations for k, v in one.excluded(goal).items()},
            steps=steps,
            learning_rate=learning_rate,
            tolerance=tolerance,
            search_trials=search_trials,
            progress=bar,
        )


def evaluate_plan(
    model: nn.Module,
    batch: Any,
    loss: nn.Module | Callable[[nn.Module, Any], Tensor] | None,
    plan: PrecisionPlan,
    *,
    steps: int = 50,
    warmup_steps: int = 5,
    learning_rate: float = 1e-4,
    progress: bool | None = None,
) -> PlanEvaluation:
    """Measure a precision plan against FP32: speed-up, memory saved, difference of the loss.

    `plan` is that of `recommend(…).plan`; model, batch and loss are those of `recommend`. Copies of
    the model are trained by turns with AdamW, from the same weights, batches and random numbers, in
    FP32 and by the plan; a third one, in FP32 from weights that differ in their last bit, shows
    what a difference of the loss means. The first `warmup_steps` of `steps` do not count for speed.
    The result has `targets` with what was measured, `missed`, the losses and times of all steps,
    `as_json()` and `as_html()`. Independent of `init`, in one process; the model is never run.

    Raises AdviceError (a ValueError), naming the argument, for wrong ones; CompareError for models
    that cannot be copied; and whatever the training itself raises.
    """
    from mp_agent.plan.evaluation.api import measure_plan
    from mp_agent.plan.target import progress_bar

    with progress_bar(progress) as bar:
        return measure_plan(
            model,
            batch,
            loss,
            plan,
            steps=steps,
            warmup_steps=warmup_steps,
            learning_rate=learning_rate,
            progress=bar,
        )
