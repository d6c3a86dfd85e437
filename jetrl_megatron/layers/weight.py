"""A weight that knows its version, and the quantised weight that is computed once per version.

Optimizers write weights behind autograd's back: `weight.data.copy_(master)` does not move `weight._version`, because
`.data` is another tensor with a counter of its own. A cache keyed on `_version` alone serves stale codes. So the
parameter hands out one alias as `.data` and counts what happens to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from jetrl_megatron.ops import LinearOperand

_raw_data: Any = torch.Tensor.data


class VersionedParameter(torch.nn.Parameter):
    """A parameter whose `version` changes with every write that torch can see.

    Seen are in-place operations on the parameter, on `.data` and on every view of either, whenever the view was taken;
    assignments to `.data`; in-place operations and collectives on the buffer that such an assignment made the storage
    (Megatron's contiguous parameter buffers). Reading `.data` counts as a write, since an extension may write through
    the pointer without telling.
    """

    @property
    def data(self) -> torch.Tensor:
        """The parameter's tensor without autograd history. Shares storage and version counter with earlier reads."""
        state = self.__dict__
        state["_reads"] = state.get("_reads", 0) + 1
        return self._alias().detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _raw_data.__set__(self, value)
        # detach() shares value's version counter, which views of one buffer share in turn.
        self.__dict__["_data_alias"] = value.detach()
        self.__dict__["_assignments"] = self.__dict__.get("_assignments", 0) + 1

    def _alias(self) -> torch.Tensor:
        alias = cast(torch.Tensor | None, self.__dict__.get("_data_alias"))
        if alias is None or alias.data_ptr() != self.data_ptr():
            alias = cast(torch.Tensor, _raw_data.__get__(self))
            self.__dict__["_data_alias"] = alias
        return alias

    @property
    def version(self) -> tuple[int, ...]:
        """Equal as long as nothing was written."""
        state = self.__dict__
        return (
            self.data_ptr(),
            self._version,
            self._alias()._version,
            state.get("_assignments", 0),
            state.get("_reads", 0),
        )


class WeightCache:
    """The quantised form of one weight, computed once per version.

    Args:
        quantize: makes the operand; a collective where ranks share tiles.
    """

    def __init__(self, quantize: Callable[[torch.Tensor], LinearOperand]) -> None:
        self._quantize = quantize
        self._operand: LinearOperand | None = None
        self._key: tuple[int, ...] | None = None

    def get(self, weight: torch.Tensor, *, refresh: bool = False) -> LinearOperand:
        """The operand for the weight as it is now.

        Args:
            weight: float [N, K]. Anything but a `VersionedParameter` is quantised at every call.
            refresh: quantise even if no write was seen.
        """
        key = (id(weight), *weight.version) if isinstance(weight, VersionedParameter) else None
        if self._operand is None or key is None or refresh or key != self._key:
            self._operand = self._quantize(weight)
            self._key = key
        return self._operand
