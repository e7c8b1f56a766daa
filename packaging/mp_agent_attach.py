"""Attaches mp_agent to the training processes of a job, without changes to their program.

Imported at interpreter start where `MP_AGENT_ATTACH` is set, by `mp_agent_attach.pth`; it waits for
`import torch`, then for the first optimizer or backward, and only then imports mp_agent. A process
that never makes either (a launcher, a data worker, pip) is left as it is. Nothing here raises.
"""

import os
import sys

# Importing `typing` would delay the start of every interpreter.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_OFF = ("", "0", "false", "no", "off")

_OPTIMIZERS = {
    "torch": "optim.Optimizer",
    "fastai.optimizer": "Optimizer",
    "keras.src.optimizers.base_optimizer": "BaseOptimizer",
}
"""By module, the class from which optimizers are derived."""


class _TorchFinder:
    """Finds torch, and libraries with optimizers not derived from torch's, where others find them.

    It is called back once they are imported.
    """

    def find_spec(
        self,
        name: "str",
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Return the spec of such a module, whose loader calls back; None for anything else."""
        if name not in _OPTIMIZERS:
            return None
        for finder in tuple(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: "Any") -> None:
        load = getattr(loader, "exec_module", None)
        if load is None:
            return

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module
            load(module)
            _await_optimizer(module)
            if module.__name__ == "torch":
                _await_backward(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return


def _await_optimizer(module: "ModuleType") -> None:
    """Attach when the first optimizer is made: before it has been stepped, and torch is whole."""
    kind: Any = module
    for name in _OPTIMIZERS[module.__name__].split("."):
        kind = getattr(kind, name, None)
    if kind is None:
        return
    from functools import wraps

    original = kind.__init__

    @wraps(original)
    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        if _waiting:
            if kind.__init__ is __init__:  # else it stays, beneath what another has put around it
                kind.__init__ = original
            _attach(with_optimizer=True)
        original(self, *args, **kwargs)

    kind.__init__ = __init__


def _await_backward(torch: "ModuleType") -> None:
    """Attach at the first backward: its gradients may be for an optimizer that is not known."""
    autograd: Any = getattr(torch, "autograd", None)
    if not hasattr(autograd, "backward"):
        return
    from functools import wraps

    original = autograd.backward

    @wraps(original)
    def backward(*args: "Any", **kwargs: "Any") -> "Any":
        if not _waiting:
            return original(*args, **kwargs)
        if autograd.backward is backward:
            autograd.backward = original
            _attach(with_optimizer=False)
            return autograd.backward(*args, **kwargs)
        _attach(with_optimizer=False)
        return original(*args, **kwargs)

    autograd.backward = backward


_waiting = [True]
"""Empty once mp_agent was attached, or could not be."""


def _attach(*, with_optimizer: "bool") -> None:
    if "torch" not in sys.modules:
        return
    _waiting.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchFinder)]
    try:
        from mp_agent.probe import api

        api.attach(with_optimizer=with_optimizer)
    except Exception:
        import logging

        logging.getLogger("mp_agent").warning(
            "mp_agent could not attach; training goes on unwatched", exc_info=True
        )


if os.environ.get("MP_AGENT_ATTACH", "").lower() not in _OFF:
    sys.meta_path.insert(0, _TorchFinder())
