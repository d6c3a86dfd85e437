"""BF16 matrix products on a CPU the way tensor cores do them: BF16 operands, FP32 sum, BF16 result.

Without AVX512 or AMX, torch's own BF16 product is several times slower than a float32 one. This mode computes in
float32 and rounds once, on every CPU alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset(
    {
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.baddbmm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        F.linear,
    }
)


class Float32Sums(TorchFunctionMode):
    """While entered, products of BF16 tensors on a CPU are summed in float32 and rounded to BF16 once."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _PRODUCTS or not all(map(_may_be_float32, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        kwargs = {name: _to_float32(value) for name, value in kwargs.items()}
        return func(*map(_to_float32, args), **kwargs).to(torch.bfloat16)


def _may_be_float32(x: Any) -> bool:
    return not isinstance(x, torch.Tensor) or (x.dtype == torch.bfloat16 and x.device.type == "cpu")


def _to_float32(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) else x
