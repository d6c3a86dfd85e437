"""torch's own blockwise FP8 product (cuBLASLt), for hosts without DeepGEMM."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from jetrl_megatron.ops.hopper import HopperGemm
from jetrl_megatron.tensor import BlockScaledTensor


class ScaledMm(HopperGemm):
    """`torch.nn.functional.scaled_mm` with BlockWise1x128 against BlockWise128x128."""

    name = "scaled_mm"

    def nt(self, a: BlockScaledTensor, b: BlockScaledTensor) -> torch.Tensor:
        return self._product(a, b, torch.bfloat16)

    def accumulate_nt(self, a: BlockScaledTensor, b: BlockScaledTensor, out_NK: torch.Tensor) -> None:
        out_NK.add_(self._product(a, b, torch.float32))

    @staticmethod
    def _product(a: BlockScaledTensor, b: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
        rows = a.shape[0]
        a = _padded_rows(a)
        kind = F.ScalingType.BlockWise1x128 if b.block[0] == 1 else F.ScalingType.BlockWise128x128
        scale_b = _dense_columns(b.scale) if b.block[0] == 1 else _padded_columns(b.scale)
        product: torch.Tensor = F.scaled_mm(
            a.data,
            b.data.t(),
            _dense_columns(a.scale),
            F.ScalingType.BlockWise1x128,
            scale_b,
            kind,
            output_dtype=dtype,
        )
        return product[:rows]


def _padded_rows(a: BlockScaledTensor) -> BlockScaledTensor:
    """The operand with rows of zeros added up to a multiple of 4, which cuBLASLt wants."""
    missing = -a.shape[0] % 4
    if not missing:
        return a
    data = F.pad(a.data.view(torch.uint8), (0, 0, 0, missing)).view(a.data.dtype)
    return BlockScaledTensor(data, F.pad(a.scale, (0, 0, 0, missing)), a.block, a.recipe)


def _dense_columns(scale: torch.Tensor) -> torch.Tensor:
    """The scale with columns that follow each other without a gap; itself where they do."""
    return scale if scale.stride() == (1, scale.shape[0]) else scale.t().contiguous().t()


def _padded_columns(scale: torch.Tensor) -> torch.Tensor:
    """Transposed scale of a weight, as cuBLASLt reads it: column by column, each padded to a multiple of 4."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()
