"""Where the weights of an update come from: tensors as they are, or a live Megatron model of any parallel layout.

A source says which tensors an update has and fills buckets with their bytes. On a model that is spread over ranks both
are collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from jetrl_megatron.convert.fp8_weights import require_finite
from jetrl_megatron.convert.plan import TensorSpec
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync.manifest import Bucket, view_of


class WeightSource(Protocol):
    """What a `JetRLWeightSynchronizer` sends.

    Attributes:
        tensors: shape and dtype of each tensor by its Hugging Face name, in the order in which they are sent.
        recipe: by which they are quantised.
        distributed: whether every rank of torch.distributed has a part in it.
        device: where the tensors are.
    """

    tensors: Mapping[str, TensorSpec]
    recipe: Fp8BlockRecipe
    distributed: bool
    device: torch.device

    def refresh(self) -> list[str]:
        """Makes the weights those of the last step, and checks them. A collective; returns this rank's problems."""

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Writes a bucket, uint8 [bucket.nbytes]. A collective; the ranks that send have all of it afterwards."""

    def release(self) -> None:
        """Called when the update is over, however it ended."""


class TensorSource:
    """Whole tensors of one process, e.g. those of an export.

    Args:
        tensors: by Hugging Face name, as a checkpoint holds them: float8_e4m3fn codes beside float32 scales.
        recipe: by which they are quantised.
    """

    distributed = False

    def __init__(self, tensors: Mapping[str, torch.Tensor], recipe: Fp8BlockRecipe) -> None:
        self.recipe = recipe
        self.replace(tensors)

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors of another step."""
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self.tensors: Mapping[str, TensorSpec] = {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()
        }
        self.device = next((tensor.device for tensor in self._tensors.values()), torch.device("cpu"))

    def refresh(self) -> list[str]:
        """See `WeightSource`. Codes are not looked at: their scales show what was not finite."""
        tensors = {name: t for name, t in self._tensors.items() if t.dtype != torch.float8_e4m3fn}
        return not_finite(tensors)

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """See `WeightSource`."""
        for part in bucket.slices:
            rows = (
                self._tensors[part.name].reshape(-1)
                if self._tensors[part.name].dim() == 0
                else self._tensors[part.name]
            )
            source = rows[part.first_row : part.first_row + part.rows]
            view_of(buffer, part, self.tensors[part.name]).copy_(source.reshape(part.rows, -1))

    def release(self) -> None:
        """Nothing to do."""


class HostSource:
    """Another source's weights by way of the host's memory, over transport "shm".

    For a trainer and an engine on one machine whose processes cannot share a GPU's memory (CUDA IPC), as in some
    containers.

    Args:
        source: where the weights are.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.tensors, self.recipe = source.tensors, source.recipe
        self.distributed, self.device = source.distributed, torch.device("cpu")

    def refresh(self) -> list[str]:
        """See `WeightSource`."""
        return self._source.refresh()

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """See `WeightSource`."""
        filled = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._source.device)
        self._source.fill(bucket, filled)
        buffer.copy_(filled)

    def release(self) -> None:
        """See `WeightSource`."""
        self._source.release()


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """A line for each tensor that holds NaN or infinity. Looks at all of them before it waits for a device."""
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not filled:
        return []
    finite = torch.stack([torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in filled.values()])
    lines = []
    for (name, tensor), good in zip(filled.items(), finite.tolist(), strict=True):
        if good:
            continue
        try:
            require_finite(name, tensor)
        except ValueError as error:
            lines.append(str(error))
    return lines
