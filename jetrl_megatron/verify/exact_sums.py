"""Sums that depend on nothing: not on their order, the batch, the number of rows, or the machine.

Two programs that sum the same BF16 numbers in different order get results that differ in the last bit now and then, and
FP8 layers make much of such bits. A sum in float64 is exact for all practical purposes, so that its rounding is the
same wherever it is computed. On a CPU without AVX512 it is also several times faster than torch's own BF16 product.
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
_SOFTMAX = frozenset({torch.softmax, torch.Tensor.softmax, F.softmax})


class ExactSums(TorchFunctionMode):
    """While entered, products of BF16 tensors and softmaxes of float32 tensors on a CPU are computed in float64.

    Their results have the dtype that they would have had.

    Args:
        dtype: float32 makes BF16 products faster and leaves softmaxes alone; it is not exact.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        narrow = torch.bfloat16 if func in _PRODUCTS else torch.float32 if func in _SOFTMAX else self._dtype
        if narrow == self._dtype or not all(_is_narrow(x, narrow) for x in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        kwargs = {name: self._widened(value) for name, value in kwargs.items()}
        return func(*map(self._widened, args), **kwargs).to(narrow)

    def _widened(self, x: Any) -> Any:
        return x.to(self._dtype) if isinstance(x, torch.Tensor) else x


def _is_narrow(x: Any, narrow: torch.dtype) -> bool:
    if isinstance(x, torch.dtype):
        return False
    return not isinstance(x, torch.Tensor) or (x.dtype == narrow and x.device.type == "cpu")
