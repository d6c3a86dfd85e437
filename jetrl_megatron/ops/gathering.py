"""Asynchronous all-gathers over the token axis, for sequence parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist

from jetrl_megatron.tensor import BlockScaledTensor


class Gathered:
    """An all-gather of one tensor along axis 0, under way from the start."""

    def __init__(self, local: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        world = dist.get_world_size(group)
        self._all = local.new_empty(local.shape[0] * world, *local.shape[1:])
        self._work = dist.all_gather_into_tensor(self._all, local.contiguous(), group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """What all ranks hold, once it is here."""
        self._work.wait()
        return self._all


class GatheredCodes:
    """The same of codes and scales: half the bytes of BF16."""

    def __init__(self, local: BlockScaledTensor, group: dist.ProcessGroup | None) -> None:
        self._local = local
        # Bytes, because not every communication library knows float8.
        self._codes = Gathered(local.data.view(torch.uint8), group)
        self._scale = Gathered(local.scale, group)

    def wait(self) -> BlockScaledTensor:
        """What all ranks hold, once it is here."""
        codes = self._codes.wait().view(self._local.data.dtype)
        return BlockScaledTensor(codes, self._scale.wait(), self._local.block, self._local.recipe)
