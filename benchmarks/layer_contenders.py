"""One transformer layer of Megatron-core in BF16, with JetRL's linears, and in TransformerEngine's blockwise FP8."""

# Shape suffixes of Megatron: S sequence, B batch, H hidden, heads and head size.

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import Contender, Model, relative_error, require
from benchmarks.megatron_state import accumulate_into_main_grad, drop_gradients, quantize_anew, transformer_config
from jetrl_megatron.ops.attention import attention_refusal

SETS = 2


class SdpaAttention(torch.nn.Module):
    """Causal attention by torch's fused kernels, in the place of Megatron's core attention.

    Constructor and forward take what Megatron's DotProductAttention takes.
    """

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """query [S, B, heads, size], key and value [S, B, KV heads, size] -> [S, B, heads * size]."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        with _fused_attention(query.device):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def _fused_attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type == "cpu":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # cuDNN's is the fastest on Hopper; never the one that writes all scores to memory.
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    kernel: contextlib.AbstractContextManager[None] = sdpa_kernel(backends, set_priority=True)
    return kernel


class LayerCase:
    """Layers of equal weights with inputs and output gradients.

    Args:
        te: whether TransformerEngine serves; then attention, norms and the BF16 peer are its own, else torch's.
    """

    def __init__(self, model: Model, sequence: int, device: torch.device, *, te: bool) -> None:
        self.model, self.device, self.te = model, device, te
        self.rope = self._rope(sequence)
        self.x = [self._random(sequence).requires_grad_() for _ in range(SETS)]
        self.dy = [self._random(sequence) for _ in range(SETS)]
        drop_gradients(*self.x)
        self.layers: dict[str, torch.nn.Module] = {}
        bf16 = self._build(self._te_spec() if te else self._local_spec(), gradient_accumulation_fusion=te)
        state = {name: parameter.detach() for name, parameter in bf16.named_parameters()}
        self.layers["bf16_megatron"] = bf16
        self.layers["jetrl"] = self._build(self._jetrl_spec())
        self._load(self.layers["jetrl"], state)
        if attention_refusal(device) is None:
            self.layers["jetrl_parity"] = self._build(self._parity_spec())
            self._load(self.layers["jetrl_parity"], state)
        if te:
            self.layers["te_blockwise"] = self._build(self._te_spec(), fp8="e4m3", fp8_recipe="blockwise")
            self._load(self.layers["te_blockwise"], state)
        for layer in self.layers.values():
            accumulate_into_main_grad(layer)

    def drop_unusable_peer(self) -> str | None:
        """Removes TransformerEngine's FP8 layer if it does not run here, and says why."""
        if "te_blockwise" not in self.layers:
            return None
        try:
            self._result("te_blockwise")
        except (RuntimeError, AssertionError, ValueError) as error:
            del self.layers["te_blockwise"]
            return f"{type(error).__name__}: {error}"
        return None

    def forward(self, name: str, x_SBH: torch.Tensor) -> torch.Tensor:
        """The output of one layer, [S, B, H]."""
        from megatron.core.fp8_utils import get_fp8_context

        layer: Any = self.layers[name]
        with get_fp8_context(layer.config):
            y: torch.Tensor = layer(x_SBH, attention_mask=None, rotary_pos_emb=self.rope)[0]
        return y

    def contenders(self) -> dict[str, Contender]:
        """Forward and backward of each; the FP8 ones with weights quantised every time ("strict") or not."""
        found: dict[str, Contender] = {}
        for name in self.layers:
            if name == "bf16_megatron":
                found[name] = self._phases(name, lambda layer: None)
                continue
            found[f"{name}_strict"] = self._phases(name, quantize_anew)
            found[f"{name}_cached"] = self._phases(name, lambda layer: None)
        return found

    def memory(self, name: str) -> dict[str, int]:
        """Bytes that a forward keeps for backward, its output apart, and the most that both take; weights are there."""
        self._result(name)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = self.forward(name, self.x[0])
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        y.backward(self.dy[0])
        return {"kept for backward": kept, "peak of forward+backward": torch.cuda.max_memory_allocated() - before}

    def check(self) -> None:
        """FP8 layers are near the BF16 one, forward and backward, and JetRL's repeats byte for byte.

        Raises:
            SystemExit: something differs.
        """
        results = {name: self._result(name) for name in self.layers}
        for name, parts in results.items():
            errors = [relative_error(a, b) for a, b in zip(parts, results["bf16_megatron"], strict=True)]
            require(max(errors) < 0.15, f"{name}: y, dx differ from BF16's by {errors}")
        again = self._result("jetrl")
        # Attention's backward sums in no fixed order, so only the forward repeats.
        require(torch.equal(again[0], results["jetrl"][0]), "two forward passes of the same layer differ")

    def _result(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[0].detach().requires_grad_()
        y = self.forward(name, x)
        y.backward(self.dy[0])
        assert x.grad is not None
        # Without the residual, which is the same everywhere and would hide what the linears do.
        return (y - x).detach(), x.grad - self.dy[0]

    def _phases(self, name: str, before: Callable[[torch.nn.Module], None]) -> Contender:
        output: dict[str, torch.Tensor] = {}

        def forward(i: int) -> None:
            before(self.layers[name])
            output["y"] = self.forward(name, self.x[i % SETS])

        def backward(i: int) -> None:
            torch.autograd.backward(output.pop("y"), self.dy[i % SETS])

        return {"forward": forward, "backward": backward}

    def _random(self, sequence: int) -> torch.Tensor:
        return torch.randn(sequence, 1, self.model.hidden, dtype=torch.bfloat16, device=self.device)

    def _rope(self, sequence: int) -> torch.Tensor:
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        embedding = RotaryEmbedding(
            self.model.head_dim, 1.0, rotary_base=self.model.rope_base, use_cpu_initialization=self.device.type == "cpu"
        )
        rope: torch.Tensor = embedding(sequence)
        return rope

    def _build(self, spec: Any, **changes: Any) -> torch.nn.Module:
        from megatron.core.transformer.spec_utils import build_module

        config = transformer_config(self.model, self.device, apply_rope_fusion=self.te, **changes)
        layer: torch.nn.Module = build_module(spec, config=config, layer_number=1)
        return layer.to(self.device)

    def _te_spec(self) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=self.model.qk_norm)

    def _local_spec(self) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        spec = get_gpt_layer_local_spec(qk_layernorm=self.model.qk_norm, normalization="RMSNorm")
        return _with_attention(spec, core_attention=SdpaAttention)

    def _jetrl_spec(self) -> Any:
        from jetrl_megatron.spec import jetrl_spec

        return jetrl_spec(self._te_spec() if self.te else _with_fused_norms(self._local_spec()))

    def _parity_spec(self) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from jetrl_megatron.spec import jetrl_spec

        local = get_gpt_layer_local_spec(qk_layernorm=self.model.qk_norm, normalization="RMSNorm")
        return jetrl_spec(self._te_spec() if self.te else _with_fused_norms(local), parity=True)

    def _load(self, layer: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Copies the BF16 layer's weights; where norms are modules of their own there, they are fused here."""
        fused = {
            "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
        }
        own = dict(layer.named_parameters())
        renamed = {name if name in own else fused[name]: value for name, value in state.items()}
        require(own.keys() == renamed.keys(), f"parameters differ: {sorted(own.keys() ^ renamed.keys())}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(renamed[name])


def _with_attention(spec: Any, **fields: Any) -> Any:
    """The layer spec with other submodules of its attention."""
    attention = spec.submodules.self_attention
    attention = dataclasses.replace(attention, submodules=dataclasses.replace(attention.submodules, **fields))
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, self_attention=attention))


def _with_fused_norms(spec: Any) -> Any:
    """Megatron's local layer spec with the norms moved into JetRL's linears, as TransformerEngine's spec has them."""
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.transformer.identity_op import IdentityOp

    from jetrl_megatron.spec import JetRLSpecProvider

    provider = JetRLSpecProvider()
    spec = _with_attention(spec, linear_qkv=provider.column_parallel_layer_norm_linear())
    fields = {
        "input_layernorm": IdentityOp,
        "pre_mlp_layernorm": IdentityOp,
        "mlp": get_mlp_module_spec_for_backend(backend=provider),
        # It renames the norms of checkpoints, and there are none to rename.
        "sharded_state_dict_keys_map": {},
    }
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **fields))
