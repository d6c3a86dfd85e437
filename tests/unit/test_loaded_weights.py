"""What an engine holds, against what training holds."""

from __future__ import annotations

import pytest
import torch

from jetrl_megatron.precision_flow.digests import linear_digest
from jetrl_megatron.verify.loaded_weights import ServedPiece, stale_pieces


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_stale_pieces_are_those_with_another_byte(dim: int, count: int) -> None:
    codes = torch.randint(256, (512, 256), dtype=torch.uint8)
    scale = torch.exp2(torch.randint(-4, 4, (4, 2)).float())
    parts = zip(codes.chunk(count, dim), scale.chunk(count, dim), strict=True)
    served = [
        ServedPiece("down_proj", dim, index, count, linear_digest(part, of_part))
        for index, (part, of_part) in enumerate(parts)
    ]
    assert stale_pieces(codes.view(torch.float8_e4m3fn), scale, served) == []
    for changed in (codes, scale):
        before = changed[-1, -1].item()
        changed[-1, -1] = before + 1
        assert stale_pieces(codes, scale, served) == served[-1:]
        changed[-1, -1] = before
