"""Hooks of modules whose parameters are read without calling them."""

from __future__ import annotations

import torch


def run_forward_pre_hooks(module: torch.nn.Module) -> None:
    """Runs a module's forward pre-hooks without inputs.

    Megatron's DistributedDataParallel waits there for parameters that are still being gathered, which it also has to
    where a fused operator takes them instead of the module's own forward.
    """
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            hook(module, (), {})
        else:
            hook(module, ())
