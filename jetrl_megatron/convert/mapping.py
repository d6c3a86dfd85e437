"""From Megatron parameters to the logical matrices that a Hugging Face checkpoint names."""

# Shape suffixes: N rows of a stored weight or bias, K columns; a bias has no K.

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from jetrl_megatron.convert.families import check_family, family_bridge
from jetrl_megatron.convert.hf_model import HfModel, named_errors
from jetrl_megatron.convert.parameters import canonical_name, grouped_name
from jetrl_megatron.layout import qkv_runs

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_TIED_HEAD = "lm_head.weight"

_FLOAT32 = ("expert_bias",)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Parameters that go over as they are; Bridge's other mappings rearrange them in ways that `split` does not know.
_WHOLE = ("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping", "DirectMapping")


class LogicalMatrix(NamedTuple):
    """One tensor of a Hugging Face checkpoint before quantisation.

    Attributes:
        module: global name of the Megatron module that holds it, e.g. "decoder.layers.3.self_attention.linear_qkv".
        name: Hugging Face name, e.g. "model.layers.3.self_attn.k_proj.weight".
        tensor: bfloat16; float32 for the few that models keep so, such as a router's expert_bias.
    """

    module: str
    name: str
    tensor: torch.Tensor


@contextlib.contextmanager
def _without_training_advice() -> Iterator[None]:
    # Bridge warns of fusions that a training run would lack and of families that it will drop, and asks transformers
    # for a field by its former name.
    loggers = [logging.getLogger(name) for name in ("megatron.bridge", "transformers.configuration_utils")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Support for Gemma")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class HfMapping:
    """Megatron-Bridge's name mapping for one model, applied to whole parameters.

    Args:
        hf: the model.

    Attributes:
        num_layers: decoder layers.
        latent: whether attention is latent, so that heads are no rows of linear_qkv.
        zero_centered_norms: whether norms store their weights less one.

    Raises:
        ValueError: the model is of a family that the converter does not know.
    """

    def __init__(self, hf: HfModel) -> None:
        check_family(hf.config)
        with _without_training_advice(), named_errors(hf.folder):
            bridge = family_bridge(hf.config)
            # The one way to a bridge's mappings without its weights; Bridge has no public one.
            self._registry: Any = bridge._model_bridge.mapping_registry()
            provider: Any = bridge.to_megatron_provider(load_weights=False)
        self.num_layers: int = provider.num_layers
        self.latent = bool(getattr(hf.config, "kv_lora_rank", None))
        self.zero_centered_norms = bool(provider.layernorm_zero_centered_gamma)
        self._heads: int = provider.num_attention_heads
        self._groups: int = provider.num_query_groups or provider.num_attention_heads
        self._head_dim: int = provider.kv_channels or provider.hidden_size // provider.num_attention_heads
        self._vocab_size: int = hf.config.vocab_size
        self._tied = hf.tied
        # Families that are always tied have no mapping for the head, and yet the last pipeline stage holds a copy.
        self._always_tied = self._tied and self._lookup(HEAD) is None
        self._embedding, self._head = self.targets(EMBEDDING)[0], self.targets(HEAD)[0]

    @property
    def embedding_module(self) -> str:
        """Hugging Face name of the embedding's module, e.g. "model.embed_tokens"."""
        return self._embedding.rpartition(".")[0]

    @property
    def head_module(self) -> str:
        """Hugging Face name of the head's module, e.g. "lm_head"."""
        return self._head.rpartition(".")[0]

    def targets(self, parameter: str) -> tuple[str, ...]:
        """Hugging Face names that a Megatron parameter goes into; q, k, v and gate, up in this order.

        Raises:
            ValueError: the parameter is unknown to the model's mapping, or mapped in a way that is not supported.
        """
        return tuple(name for name, _ in self._parts(parameter))

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV groups, and size of a head, the arguments of `qkv_runs`."""
        return self._heads, self._groups, self._head_dim

    def kind(self, parameter: str) -> str:
        """How a parameter is stored: "qkv" by group, "gated" with gate above up, "whole" as it is."""
        targets = len(self._parts(parameter))
        return {1: "whole", 2: "gated", 3: "qkv"}[targets]

    def split(self, parameter: str, tensor: torch.Tensor) -> Iterator[LogicalMatrix]:
        """The logical matrices in a whole parameter, all tensor-parallel ranks together.

        Args:
            parameter: global Megatron name.
            tensor: float [N, K] or [N]. linear_qkv stores q, k, v by group, a gated linear_fc1 gate above up, and the
                embedding and the head a vocabulary that may be padded.

        Raises:
            ValueError: the name is unknown, the tensor is FP8 or has too few rows.
        """
        module = parameter.rpartition(".")[0]
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{parameter} is stored as {tensor.dtype}, and parameters are BF16, FP16 or FP32: the values of others "
                "are unknown without what their trainer kept; save the checkpoint with BF16 parameters (fp8_param off)"
            )
        dtype = torch.float32 if parameter.endswith(_FLOAT32) else torch.bfloat16
        for name, cut in self._parts(parameter):
            yield LogicalMatrix(module, name, self._without_padding(name, cut(tensor)).to(dtype).contiguous())

    def from_hf(self, name: str, tensor: torch.Tensor) -> LogicalMatrix:
        """The logical matrix for a tensor that Megatron-Bridge exported from a live model."""
        mapping = self._registry.hf_to_megatron_lookup(name)
        if mapping is None:
            raise ValueError(
                f"{name} is unknown to the model's mapping: Megatron-Bridge exported what it cannot import"
            )
        parameter = canonical_name(mapping.megatron_param)
        dtype = torch.float32 if parameter.endswith(_FLOAT32) else torch.bfloat16
        return LogicalMatrix(parameter.rpartition(".")[0], name, self._without_padding(name, tensor).to(dtype))

    def keeps_float32(self, name: str) -> bool:
        """Whether the tensor with this Hugging Face name is never rounded to BF16."""
        mapping = self._registry.hf_to_megatron_lookup(name)
        return mapping is not None and mapping.megatron_param.endswith(_FLOAT32)

    def without_tied_head(self, matrices: Iterable[LogicalMatrix]) -> Iterator[LogicalMatrix]:
        """Drops the head where it is the embedding.

        Raises:
            ValueError: the two differ.
        """
        first: LogicalMatrix | None = None
        for matrix in matrices:
            if self._tied and matrix.name in (self._embedding, self._head):
                if first is not None and not torch.equal(first.tensor, matrix.tensor):
                    raise ValueError(
                        f"{first.name} and {matrix.name} differ, but config.json ties them: set tie_word_embeddings to "
                        "false to export both, or convert a checkpoint that was trained with tied embeddings"
                    )
                first = matrix
            if not (self._tied and matrix.name == self._head):
                yield matrix

    def untied_names(self, names: Iterable[str]) -> list[str]:
        """The Hugging Face names that a checkpoint stores: all but a tied head."""
        return [name for name in names if not (self._tied and name == self._head)]

    def _parts(self, parameter: str) -> list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
        if parameter == HEAD and self._always_tied:
            return [(_TIED_HEAD, lambda t_N: t_N)]
        mapping = self._lookup(parameter)
        if mapping is None:
            return self._half(parameter)
        kind, hf_param = type(mapping).__name__, mapping.hf_param
        if kind == "QKVMapping":
            return [(hf_param[part], self._qkv(index)) for index, part in enumerate("qkv")]
        if kind == "GatedMLPMapping":
            return [(hf_param["gate"], lambda t_N: t_N.chunk(2)[0]), (hf_param["up"], lambda t_N: t_N.chunk(2)[1])]
        if kind in _WHOLE and isinstance(hf_param, str) and getattr(mapping, "permute_dims", None) is None:
            return [(hf_param, lambda t_N: t_N)]
        raise ValueError(
            f"{parameter} is mapped by Megatron-Bridge's {kind}, which this converter does not know yet: export the "
            "live model with export_vllm_checkpoint"
        )

    def _lookup(self, parameter: str) -> Any:
        name = canonical_name(parameter)
        found = self._registry.megatron_to_hf_lookup(name)
        return found if found is not None else self._registry.megatron_to_hf_lookup(grouped_name(name))

    def _half(self, parameter: str) -> list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
        # With singleton_local_shards Megatron saves the halves of a gated fc1 as two tensors, "..._w" and "..._v".
        base, _, half = parameter.rpartition("_")
        mapping = self._lookup(base) if half in ("w", "v") else None
        if mapping is None or type(mapping).__name__ != "GatedMLPMapping":
            raise ValueError(
                f"{parameter} has no counterpart in the Hugging Face model: pass the --hf-config of the model that was "
                "trained"
            )
        return [(mapping.hf_param["gate" if half == "w" else "up"], lambda t_N: t_N)]

    def _qkv(self, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def cut(stored_N: torch.Tensor) -> torch.Tensor:
            runs = qkv_runs(self._heads, self._groups, self._head_dim)
            rows = sum(length for _, _, length in runs)
            if stored_N.shape[0] != rows:
                raise ValueError(
                    f"linear_qkv has {stored_N.shape[0]} rows; {self._heads} heads, {self._groups} groups and head "
                    f"size {self._head_dim} make {rows}: pass the --hf-config of the model that was trained"
                )
            pieces = torch.split(stored_N, [length for _, _, length in runs])
            return torch.cat([piece for piece, (matrix, _, _) in zip(pieces, runs, strict=True) if matrix == part])

        return cut

    def _without_padding(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in (self._embedding, self._head):
            return tensor
        if tensor.shape[0] < self._vocab_size:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, fewer than config.json's vocab_size={self._vocab_size}: pass the "
                "--hf-config of the model that was trained"
            )
        return tensor[: self._vocab_size]
