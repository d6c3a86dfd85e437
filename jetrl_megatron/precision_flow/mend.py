"""What to change where the two sides differ: for each field, the settings that decide it on either side."""

from __future__ import annotations

from types import MappingProxyType

from jetrl_megatron.precision_flow.graph import Mend

_EXPORT = "export again with training's recipe (jetrl convert) and serve that"
_ARGUMENTS = "recipe.to_vllm_engine_args()"
_PLUGIN_ON = f"load the plugin (VLLM_PLUGINS unset, or naming jetrl_megatron) and start the engine with {_ARGUMENTS}"

_EXTENSION = (
    "install the package alike on both sides, with the CUDA extension on both or neither (`jetrl doctor` tells)"
)

_FUSED_OPERATORS = ("rms_norm", "rope", "swiglu", "attention", "linear")

ROLLOUT_MEND: Mend = MappingProxyType(
    {
        "recipe": {"*": _EXPORT},
        "tensor_parallel": {"*": "tensor_parallel_size={wanted}"},
        "dtype": {"*": 'dtype="{wanted}"'},
        "layers": {"*": "drop num_hidden_layers from hf_overrides; serve the checkpoint of this very model"},
        "tied_head": {"*": "tie_word_embeddings={wanted} in config.json: " + _EXPORT},
        "weights_source": {
            "*": "serve weights that training quantised (jetrl convert, or weight sync), with no quantization=, no "
            'load_format="dummy", no quantization_config in hf_overrides and no refit hook that quantises what it '
            "receives (NeMo-RL's fp8.load_weights does)"
        },
        "weights_version": {"*": "load the weights of optimizer step {wanted}: sync, or reload_weights"},
        "speculative_decoding": {"*": "speculative_config=None"},
        "lora": {"*": "enable_lora=False; merge the adapter into the weights"},
        "logprobs_mode": {"*": 'logprobs_mode="{wanted}"'},
        "other_fusions": {
            "*": 'compilation_config={{"pass_config": {{PASS: False}}}}, PASS each of {value}; a pass in '
            "inductor_compile_config has to leave it"
        },
        "cuda_extension": {"*": _EXTENSION},
        "linear.dtype": {
            "bfloat16": "{node} belongs into quantization_config's ignored_layers: " + _EXPORT,
            "*": "{node} is in ignored_layers, or the checkpoint is not FP8: " + _EXPORT,
        },
        "linear.activation_dtype": {"*": 'linear_backend="deep_gemm" on a GPU, the plugin on a CPU'},
        "linear.weight_group": {"*": _EXPORT},
        "linear.activation_group": {"*": _EXPORT},
        "linear.scale_format": {
            "ue8m0": "VLLM_USE_DEEP_GEMM_E8M0=1 and weights of an ue8m0 recipe: " + _EXPORT,
            "fp32": "VLLM_USE_DEEP_GEMM_E8M0=0 (recipe.to_vllm_env()) and weights of an fp32 recipe",
        },
        "linear.activation_scale_format": {
            "ue8m0": "VLLM_USE_DEEP_GEMM_E8M0=1 (recipe.to_vllm_env())",
            "fp32": "VLLM_USE_DEEP_GEMM_E8M0=0 (recipe.to_vllm_env())",
        },
        "linear.element_max": {"*": _EXPORT},
        "linear.ue8m0_weight_max": {"*": _EXPORT},
        "linear.weight_amax_floor": {"*": _EXPORT},
        "linear.quantizer": {"*": 'compilation_config={{"custom_ops": ["+quant_fp8"]}}'},
        "linear.kernel": {
            "deep_gemm": 'linear_backend="deep_gemm", VLLM_USE_DEEP_GEMM=1, and no DeepGemmFp8BlockScaledMMKernel in '
            "VLLM_DISABLED_KERNELS",
            "reference": "load the plugin (VLLM_PLUGINS unset, or naming jetrl_megatron); no W8A8BlockLinear in "
            "VLLM_DISABLED_KERNELS",
        },
        "linear.weights": {"*": "the bytes of {node} are other ones: sync the weights again, or " + _EXPORT},
        "linear.bias": {"*": "serve the checkpoint of this very model"},
        "rms_norm.kernel": {
            "jetrl": 'ir_op_priority={{"rms_norm": ["jetrl"], "fused_add_rms_norm": ["jetrl"]}}, the plugin, and '
            "VLLM_BATCH_INVARIANT=0",
            "torch": _PLUGIN_ON,
        },
        "rms_norm.epsilon": {"*": "rms_norm_eps={wanted} in config.json, and no such field in hf_overrides"},
        "rope.kernel": {
            "vllm_c": 'compilation_config={{"custom_ops": ["+rotary_embedding"]}}',
            "torch": _PLUGIN_ON + "; on a CPU it has RoPE without scaling alone",
        },
        "rope.theta": {"*": "rope_theta={wanted} in config.json, and no such field in hf_overrides"},
        "rope.scaling": {"*": "rope scaling '{wanted}' in config.json, and no such field in hf_overrides"},
        "attention.kernel": {"flash_attn_3": 'attention_backend="CUSTOM" and the plugin', "exact": _PLUGIN_ON},
        "attention.kv_splits": {
            "1": 'attention_backend="CUSTOM" on a GPU (the plugin\'s FlashAttention never splits), '
            "VLLM_CPU_ATTN_SPLIT_KV=0 on a CPU; decode_context_parallel_size=1"
        },
        "attention.cascade": {"False": "disable_cascade_attn=True"},
        "attention.cache_dtype": {"*": 'kv_cache_dtype="auto"'},
        "attention.window": {"*": "sliding_window={wanted} in config.json, and no such field in hf_overrides"},
        "swiglu.kernel": {
            "jetrl": 'compilation_config={{"custom_ops": ["+silu_and_mul"]}} and ' + _PLUGIN_ON,
            "torch": 'compilation_config={{"custom_ops": ["-silu_and_mul"]}} on a CPU',
        },
        "lm_head.kernel": {"*": _PLUGIN_ON},
        "log_prob.kernel": {
            "vllm_v2": "VLLM_USE_V2_MODEL_RUNNER=1 (recipe.to_vllm_env())",
            "torch": "VLLM_USE_V2_MODEL_RUNNER=0",
        },
        **{
            f"{operator}.fused_by": {
                "None": 'compilation_config={{"pass_config": {{"{value}": False}}}}; '
                f"{_ARGUMENTS} has all of them off"
            }
            for operator in _FUSED_OPERATORS
        },
    }
)
"""What to change on the rollout's side: see `graph.Mend`."""

_RECIPE = "build the layers with the recipe that the rollout's checkpoint carries: jetrl_spec(spec, recipe)"
_PARITY = "build the model with jetrl_spec(spec, recipe, parity=True) and use_parity_head(model)"

TRAINING_MEND: Mend = MappingProxyType(
    {
        "recipe": {"*": _RECIPE},
        "tensor_parallel": {"*": "tensor_model_parallel_size={wanted}"},
        "dtype": {"*": "params_dtype=torch.{wanted}"},
        "cuda_extension": {"*": _EXTENSION},
        "weights_version": {"*": "load the checkpoint of optimizer step {wanted}"},
        "linear.dtype": {
            "float8_e4m3fn": "{node} runs in BF16 (an ordinary linear, or in recipe.ignore or among the recipe's BF16 "
            "layers): " + _RECIPE,
            "bfloat16": "put {node}'s layer into recipe.ignore: " + _RECIPE,
        },
        "linear.scale_format": {"*": 'Fp8BlockRecipe(scale_format="{wanted}")'},
        "linear.element_max": {"*": "Fp8BlockRecipe(element_max={wanted})"},
        "linear.ue8m0_weight_max": {"*": "Fp8BlockRecipe(ue8m0_weight_max={wanted})"},
        "linear.weight_amax_floor": {"*": "Fp8BlockRecipe(weight_amax_floor={wanted})"},
        "linear.activation_amax_floor": {"*": "Fp8BlockRecipe(activation_amax_floor={wanted})"},
        "linear.activation_scale_floor": {"*": "Fp8BlockRecipe(activation_scale_floor={wanted})"},
        "linear.weight_group": {"*": _RECIPE},
        "linear.activation_group": {"*": _RECIPE},
        "linear.kernel": {
            "deep_gemm": "install what select_gemm misses (`jetrl doctor` tells) and run on a Hopper GPU"
        },
        "rms_norm.kernel": {
            "jetrl": _PARITY,
            "torch": "on a CPU the rollout has torch's norm: build the model with jetrl_spec(spec, recipe), no parity",
        },
        "rms_norm.epsilon": {"*": "layernorm_epsilon={wanted}"},
        "rope.kernel": {"vllm_c": _PARITY, "torch": "apply_rope_fusion=False, and no parity on a CPU"},
        "rope.theta": {"*": "rotary_base={wanted}"},
        "rope.scaling": {"*": "rope scaling '{wanted}' in the model's configuration"},
        "attention.kernel": {
            "flash_attn_3": _PARITY,
            "exact": "score under jetrl_megatron.verify.exact_sums.ExactSums and tell training_graph(exact_sums=True)",
        },
        "attention.window": {"*": "window_size of {wanted}"},
        "swiglu.kernel": {
            "jetrl": "bias_activation_fusion=False and jetrl_spec(spec, recipe), whose MLP is JetRLMLP; " + _PARITY,
            "torch": "bias_activation_fusion=False",
        },
        "residual_add.dtype": {"*": "fp32_residual_connection=False"},
        "residual_add.result": {"*": "fp32_residual_connection=False"},
        "lm_head.kernel": {
            "jetrl": "use_parity_head(model)",
            "exact": "score under jetrl_megatron.verify.exact_sums.ExactSums and tell training_graph(exact_sums=True)",
        },
        "log_prob.kernel": {
            "vllm_v2": "compute log-probs with jetrl_megatron.ops.log_prob.token_log_probs",
            "torch": "compute log-probs with torch.log_softmax in float32",
        },
    }
)
"""What to change on training's side: see `graph.Mend`."""
