"""The plugin's GPU operators as far as a CPU goes: offered by name, chosen by arguments, refused by name."""

import dataclasses

import pytest
import torch

pytest.importorskip("vllm")

from vllm.ir.op import IrOp
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.integrations import vllm_gpu


@pytest.fixture
def registered(monkeypatch):
    """Registers into registries of its own, so that other tests of this process find vLLM as it was."""
    registry: dict[str, type] = {}
    for module in ("vllm.model_executor.custom_op", vllm_gpu.__name__):
        monkeypatch.setattr(f"{module}.op_registry_oot", registry)
    for name in ("rms_norm", "fused_add_rms_norm"):
        monkeypatch.setattr(IrOp.registry[name], "impls", dict(IrOp.registry[name].impls))
    vllm_gpu.register_gpu_operators()
    assert set(registry) == {"SiluAndMul", "LogitsProcessor"}


@dataclasses.dataclass
class Config:
    """What `engine_recipe` reads of a VllmConfig."""

    additional_config: dict
    model_config: object = None


@dataclasses.dataclass
class ModelConfig:
    hf_config: object


@dataclasses.dataclass
class HfConfig:
    jetrl: dict


def test_providers_compute_the_norm_exact(registered):
    x, residual, weight = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16(), torch.ones(64).bfloat16()
    norm, add_norm = (IrOp.registry[name].impls["jetrl"] for name in ("rms_norm", "fused_add_rms_norm"))
    y, total = add_norm.func_impl_fn(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, norm.func_impl_fn(total, weight, 1e-6))
    assert not norm.supports_args(x, weight, 1e-6), "on a CPU vLLM keeps its own"


def test_backend_never_splits(registered, monkeypatch):
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert backend is vllm_gpu.ParityFlashAttentionBackend and backend.get_name() == "CUSTOM"

    def init(self, *_):
        self.use_full_cuda_graph, self.aot_schedule = full, True
        self.max_cudagraph_size, self.max_num_splits = 512, 32

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", init)
    for full in (True, False):
        builder = backend.get_builder_cls()()
        # As `build` has it: in which steps the bound holds, and the bound.
        assert builder.use_full_cuda_graph and builder.max_cudagraph_size > 1 << 40 and builder.max_num_splits == 1
        assert builder.aot_schedule == full


@pytest.mark.parametrize(("size", "queries", "expected"), [(64, 1, 65), (64, 700, 700), (128, 1, 1), (256, 1, 1)])
def test_attention_of_few_queries_walks_keys_in_the_blocks_of_many(monkeypatch, size, queries, expected):
    nothing = torch.zeros(0, dtype=torch.int32)
    batch = CommonAttentionMetadata(nothing, nothing, nothing, 1, queries, queries, 900, nothing, nothing)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", lambda _, prefix, common, fast: (prefix, common, fast))
    builder = object.__new__(vllm_gpu.ParityFlashAttentionMetadataBuilder)
    builder.headdim = size
    built = builder.build(0, batch, True)
    assert built == (0, dataclasses.replace(batch, max_query_len=expected), True) and batch.max_query_len == queries


def test_engine_recipe_is_that_of_the_arguments(monkeypatch):
    monkeypatch.setattr(vllm_gpu, "is_deep_gemm_e8m0_used", lambda: True)
    assert vllm_gpu.engine_recipe(Config({})) is None
    config = Config(JETRL_FP8.to_vllm_engine_args()["additional_config"])
    assert vllm_gpu.engine_recipe(config) == JETRL_FP8
    config.model_config = ModelConfig(HfConfig(Fp8BlockRecipe(scale_format="fp32").to_stamp()))
    with pytest.raises(ValueError, match="scale_format: 'ue8m0' != 'fp32'"):
        vllm_gpu.engine_recipe(config)


@pytest.mark.parametrize(("scale_format", "e8m0"), [("fp32", True), ("ue8m0", False)])
def test_engine_recipe_refuses_the_other_scale_format(monkeypatch, scale_format, e8m0):
    monkeypatch.setattr(vllm_gpu, "is_deep_gemm_e8m0_used", lambda: e8m0)
    config = Config(Fp8BlockRecipe(scale_format=scale_format).to_vllm_engine_args()["additional_config"])
    with pytest.raises(ValueError, match=f"VLLM_USE_DEEP_GEMM_E8M0 is {'on' if e8m0 else 'off'}.*to_vllm_env"):
        vllm_gpu.engine_recipe(config)


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, None), (torch.bfloat16, torch.zeros(8))])
def test_parity_head_refuses_what_it_does_not_compute(dtype, bias):
    head = torch.nn.Linear(16, 8, bias=False, dtype=dtype)
    processor = vllm_gpu.ParityLogitsProcessor.__new__(vllm_gpu.ParityLogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.parity, processor.head_dtype = True, None
    with pytest.raises(ValueError, match="the parity lm_head is BF16 without bias"):
        processor._apply_head(head, torch.zeros(2, 16, dtype=dtype), bias)
