"""Random Hugging Face models with the shapes of real ones and few layers, for measurements that need no knowledge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jetrl_megatron import Fp8BlockRecipe, quantize_weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A dense decoder.

    Attributes:
        family: `model_type` of its configuration: qwen3 (q/k norm), qwen2 (QKV bias) or llama.
        hidden, intermediate, heads, kv_heads, layers: its sizes; heads have 128 elements.
    """

    family: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int = 32768
    positions: int = 10240

    def config(self) -> Any:
        """The transformers configuration."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=128,
            max_position_embeddings=self.positions,
            tie_word_embeddings=False,
            dtype="bfloat16",
        )

    def write(self, out: Path, seed: int = 0, recipe: Fp8BlockRecipe | None = None) -> Path:
        """Writes config.json and model.safetensors with random weights; residual streams stay of order 1.

        Args:
            recipe: quantise the decoder's linears, as an export does; None keeps BF16.
        """
        from transformers import AutoModelForCausalLM

        config = self.config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(seed)
        tensors = {}
        for name, parameter in model.state_dict().items():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            weight = scaled(name, noise).to(torch.bfloat16)
            if recipe is not None and name.endswith("proj.weight"):
                codes = quantize_weight(weight, recipe)
                tensors[name] = codes.data.cpu().contiguous()
                tensors[f"{name}_scale_inv"] = codes.scale.cpu().contiguous()
            else:
                tensors[name] = weight.cpu().contiguous()
        self.write_config(out, recipe)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return out

    def write_config(self, out: Path, recipe: Fp8BlockRecipe | None = None) -> Path:
        """Writes config.json alone."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        config = self.config()
        out.mkdir(parents=True, exist_ok=True)
        content = config.to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]}
        if recipe is not None:
            content |= {"quantization_config": recipe.to_vllm_quantization_config(), "jetrl": recipe.to_stamp()}
        (out / "config.json").write_text(json.dumps(content, indent=1, default=str))
        return out


def scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    """A parameter of this name, from standard normal numbers of its shape."""
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if "proj" in name:
        return noise * 1.6 / noise.shape[1] ** 0.5
    return noise * 0.02
