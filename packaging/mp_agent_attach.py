"""Attaches mp_agent to the training processes of a job, without changes to their program.

Imported at interpreter start where `MP_AGENT_ATTACH` is set, by `mp_agent_attach.pth`; it waits for
`import torch`, then for the first optimizer, and only then imports mp_agent. A process that never
makes an optimizer (a launcher, a data worker, pip) is left as it is. Nothing here raises.
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


class _TorchFinder:
    """Finds torch where the finders after it find it, and is called back once it is imported."""

    def find_spec(
        self,
        name: "str",
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Return torch's spec, whose loader calls back; None for anything else."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
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
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _await_optimizer(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return


def _await_optimizer(torch: "ModuleType") -> None:
    """Attach when the first optimizer is made: before it has been stepped, and torch is whole."""
    kind = getattr(getattr(torch, "optim", None), "Optimizer", None)
    if kind is None:
        return
    from functools import wraps

    original = kind.__init__

    @wraps(original)
    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        if kind.__init__ is __init__:
            kind.__init__ = original
            _attach()
        original(self, *args, **kwargs)

    kind.__init__ = __init__


def _attach() -> None:
    try:
        from mp_agent.probe import api

        api.attach()
    except Exception:
        import logging

        logging.getLogger("mp_agent").warning(
            "mp_agent could not attach; training goes on unwatched", exc_info=True
        )


if os.environ.get("MP_AGENT_ATTACH", "").lower() not in _OFF:
    sys.meta_path.insert(0, _TorchFinder())
