"""The pass that makes norm and SwiGLU quantise, in vLLM's pass manager on a CPU, over the graph of vLLM's linears."""

import copy
import dataclasses
import pickle

import pytest
import torch

pytest.importorskip("vllm")

from torch._inductor.compile_fx import compile_fx
from vllm import ir
from vllm.compilation.passes.inductor_pass import InductorPass, pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import get_match_table
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.ir.op import IrOp
from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

from jetrl_megatron import JETRL_FP8, BlockScaledTensor, Fp8BlockRecipe
from jetrl_megatron.integrations import vllm_fusion, vllm_gpu
from jetrl_megatron.integrations.vllm_description import custom_passes
from jetrl_megatron.ops import quantize_activation, quantize_weight
from jetrl_megatron.ops.backends import ReferenceGemm
from jetrl_megatron.ops.quantized_outputs import norm_quantizes, scale_stride
from jetrl_megatron.recipe import VLLM_PROVIDER

HIDDEN, FEATURES, EPS = 256, 384, 1e-6
KEY = "post_grad_custom_post_pass"
RECIPES = {"ue8m0": JETRL_FP8, "fp32": Fp8BlockRecipe(scale_format="fp32")}
ONE_FORMAT = pytest.mark.parametrize("recipe", ["ue8m0"], indirect=True)
# As vLLM's CUDA build declares its quantiser; the CPU build has none.
SCHEMA = (
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
)


class Cuda:
    """What vLLM's quantiser asks of its platform."""

    def is_cuda_alike(self) -> bool:
        return True

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


@pytest.fixture(scope="module")
def quantizer():
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(SCHEMA)

    def quantize(x, codes, scale, block, floor, low, high, ue8m0, *layout) -> None:
        made = quantize_activation(x, RECIPES["ue8m0" if ue8m0 else "fp32"])
        codes.copy_(made.data)
        scale.copy_(made.scale)

    library.impl("per_token_group_fp8_quant", quantize, "CPU")
    library.impl("per_token_group_fp8_quant", lambda *_: None, "Meta")
    yield
    library._destroy()


@pytest.fixture(params=RECIPES)
def recipe(request) -> Fp8BlockRecipe:
    return RECIPES[request.param]


@pytest.fixture
def engine(recipe, quantizer, monkeypatch) -> VllmConfig:
    """The plugin's norms first, kernels that quantise, DeepGEMM's linears with the reference's product."""

    def multiply(a, b, out, **_) -> None:
        operands = (BlockScaledTensor(*pair, block, recipe) for pair, block in ((a, (1, 128)), (b, (128, 128))))
        gemm = ReferenceGemm()
        out.copy_(gemm.nt(*(gemm.prepare(operand) for operand in operands)))

    monkeypatch.setattr(deep_gemm, "fp8_gemm_nt", multiply)
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_e8m0_used", lambda: recipe.scale_format == "ue8m0")
    monkeypatch.setattr(fp8_utils, "current_platform", Cuda())
    monkeypatch.setattr(vllm_gpu, "_takes_norm", lambda x, weight, epsilon, variance_size=None: variance_size is None)
    for name in ("rms_norm", "fused_add_rms_norm"):
        monkeypatch.setattr(IrOp.registry[name], "impls", dict(IrOp.registry[name].impls))
    monkeypatch.setattr("vllm.model_executor.custom_op.op_registry_oot", {})
    monkeypatch.setattr(vllm_gpu, "op_registry_oot", {})
    vllm_gpu.register_gpu_operators()
    for name in ("norm_quantizes", "swiglu_quantizes"):
        monkeypatch.setattr(vllm_fusion, name, lambda *_: True)
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    priority = [VLLM_PROVIDER, "native"]
    norms = ir.ops.rms_norm.set_priority(priority), ir.ops.fused_add_rms_norm.set_priority(priority)
    with set_current_vllm_config(config), norms[0], norms[1]:
        yield config


class Linear(torch.nn.Module):
    """A block FP8 linear, served by vLLM's DeepGEMM kernel."""

    def __init__(self, rows: int, columns: int, recipe: Fp8BlockRecipe) -> None:
        super().__init__()
        weight = quantize_weight(torch.randn(rows, columns) / 16, recipe)
        self.weight, self.weight_scale_inv = weight.data, weight.scale
        self.kernel = deep_gemm.DeepGemmFp8BlockScaledMMKernel(
            FP8ScaledMMLinearLayerConfig(
                weight_quant_key=kFp8Static128BlockSym,
                activation_quant_key=kFp8Dynamic128Sym,
                weight_shape=(rows, columns),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
            )
        )
        # On a CPU vLLM takes the plain torch form.
        self.kernel.quant_fp8._forward_method = self.kernel.quant_fp8.forward_cuda

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel.apply_weights(self, x)


class Layers(torch.nn.Module):
    """Two decoder layers without attention, of the same weights, in the calls that vLLM's models make."""

    def __init__(self, recipe: Fp8BlockRecipe) -> None:
        super().__init__()
        self.gains = [(1 + torch.randn(HIDDEN) / 8).bfloat16() for _ in range(3)]
        self.qkv_proj, self.o_proj = Linear(HIDDEN, HIDDEN, recipe), Linear(HIDDEN, HIDDEN, recipe)
        self.gate_up_proj, self.down_proj = Linear(2 * FEATURES, HIDDEN, recipe), Linear(HIDDEN, FEATURES, recipe)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual, x = x, ir.ops.rms_norm(x, self.gains[0], EPS)
        for _ in range(2):
            x = self.o_proj(self.qkv_proj(x))
            x, residual = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, self.gains[1], EPS)
            x = self.down_proj(torch.ops.jetrl_megatron.silu_and_mul(self.gate_up_proj(x)))
            x, residual = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, self.gains[2], EPS)
        return x, residual


def compiled(function, config: VllmConfig, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """All that the compiled function returns for each input, and how many operators the pass replaced."""
    manager = PostGradPassManager()
    manager.configure(config)
    manager.fix_functionalization = manager.post_cleanup  # names CUDA operators that a CPU build lacks
    for custom in config.compilation_config.inductor_compile_config.values():
        if isinstance(custom, InductorPass):
            manager.add(custom)
    settings = {
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config),
        KEY: manager,
        "enable_auto_functionalized_v2": False,
        "force_disable_caches": True,
    }
    before = get_match_table().get(vllm_fusion.MATCHES, 0)
    torch._dynamo.reset()
    inputs = [x.clone() for x in inputs]
    torch._dynamo.mark_dynamic(inputs[0], 0)
    with pass_context(Range(start=1, end=8192)), torch.no_grad():
        run = torch.compile(
            function, fullgraph=True, backend=lambda graph, inputs: compile_fx(graph, inputs, config_patches=settings)
        )
        found = [y for x in inputs for y in run(x)]
    return found, get_match_table().get(vllm_fusion.MATCHES, 0) - before


def test_pass_replaces_norm_and_swiglu_exact(engine, recipe):
    layers, inputs = Layers(recipe), [torch.randn(tokens, HIDDEN).bfloat16() for tokens in (3, 16, 5)]
    expected, none = compiled(layers, engine, *inputs)
    vllm_fusion.offer_quantized_outputs(engine, recipe)
    found, replaced = compiled(layers, engine, *inputs)
    assert (none, replaced) == (0, 6), "two norms and SwiGLU of each layer; not the norm of the last output"
    assert len(found) == len(expected) == 6 and all(map(torch.equal, found, expected))


@ONE_FORMAT
def test_pass_leaves_alone_what_others_read_or_lay_out(engine, recipe):
    gain, wide = torch.ones(HIDDEN).bfloat16(), torch.randn(5, 2 * FEATURES).bfloat16()
    linear, unaligned, down = Linear(HIDDEN, HIDDEN, recipe), *(Linear(HIDDEN, k, recipe) for k in (HIDDEN, FEATURES))
    unaligned.kernel.quant_fp8.tma_aligned_scales = down.kernel.quant_fp8.tma_aligned_scales = False

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = ir.ops.rms_norm(x, gain, EPS)
        z = ir.ops.rms_norm(x, gain, 2 * EPS)
        h = torch.ops.jetrl_megatron.silu_and_mul(wide)
        return y, linear(y), linear(z), unaligned(z), down(h)

    vllm_fusion.offer_quantized_outputs(engine, recipe)
    assert compiled(function, engine, torch.randn(5, HIDDEN).bfloat16())[1] == 0


@ONE_FORMAT
def test_pass_quantises_once_for_several_linears_exact(engine, recipe):
    gain, first, second = torch.ones(HIDDEN).bfloat16(), Linear(HIDDEN, HIDDEN, recipe), Linear(128, HIDDEN, recipe)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, total = ir.ops.fused_add_rms_norm(x, x, gain, EPS)
        return first(y), second(y), total

    x = torch.randn(5, HIDDEN).bfloat16()
    expected, _ = compiled(function, engine, x)
    vllm_fusion.offer_quantized_outputs(engine, recipe)
    found, replaced = compiled(function, engine, x)
    assert replaced == 1 and all(map(torch.equal, found, expected))


@ONE_FORMAT
@pytest.mark.parametrize("why", ["other format", "other floor", "other norm", "no kernel"])
def test_pass_finds_nothing(engine, recipe, monkeypatch, why):
    gain, linear, pattern = torch.ones(HIDDEN).bfloat16(), Linear(HIDDEN, HIDDEN, recipe), recipe
    if why == "other format":
        pattern = RECIPES["fp32"]
    if why == "other floor":
        pattern = dataclasses.replace(recipe, activation_scale_floor=1e-4)
    if why == "no kernel":
        monkeypatch.setattr(vllm_fusion, "norm_quantizes", norm_quantizes)
    vllm_fusion.offer_quantized_outputs(engine, pattern)
    with ir.ops.rms_norm.set_priority(["native"] if why == "other norm" else [VLLM_PROVIDER, "native"]):
        found = compiled(lambda x: (linear(ir.ops.rms_norm(x, gain, EPS)),), engine, torch.randn(5, HIDDEN).bfloat16())
    assert found[1] == 0


class Theirs(InductorPass):
    """Somebody else's pass."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        return


def test_offer_only_where_a_pass_can_run():
    def offered(mode: CompilationMode, backend: str = "inductor", **passes: InductorPass) -> object:
        config = VllmConfig(compilation_config=CompilationConfig(inductor_compile_config=passes))
        config.compilation_config.mode, config.compilation_config.backend = mode, backend
        for _ in range(2):
            vllm_fusion.offer_quantized_outputs(config, JETRL_FP8)
        config.compute_hash()
        return config.compilation_config.inductor_compile_config.get(KEY)

    ours = offered(CompilationMode.VLLM_COMPILE)
    assert isinstance(ours, vllm_fusion.QuantizedOutputs) and ours.recipe == JETRL_FP8
    assert ours.uuid() == copy.deepcopy(ours).uuid() == pickle.loads(pickle.dumps(ours)).uuid()
    assert ours.uuid() != vllm_fusion.QuantizedOutputs(RECIPES["fp32"]).uuid()
    assert offered(CompilationMode.NONE) is None and offered(CompilationMode.STOCK_TORCH_COMPILE) is None
    assert offered(CompilationMode.VLLM_COMPILE, backend="eager") is None
    theirs = Theirs()
    assert offered(CompilationMode.VLLM_COMPILE, **{KEY: theirs}) is theirs


def test_engine_with_parity_operators_gets_the_pass(engine, recipe, monkeypatch):
    monkeypatch.setattr(vllm_gpu, "is_deep_gemm_e8m0_used", lambda: recipe.scale_format == "ue8m0")
    vllm_gpu.ParitySiluAndMul()
    assert custom_passes(engine) == ()
    engine.additional_config = recipe.to_vllm_engine_args()["additional_config"]
    vllm_gpu.ParitySiluAndMul()
    assert engine.compilation_config.inductor_compile_config[KEY].recipe == recipe
    assert custom_passes(engine) == ("jetrl_megatron.integrations.vllm_fusion.QuantizedOutputs",)


@pytest.mark.parametrize("tokens", [1, 4, 5, 9])
def test_operators_tell_the_compiler_what_they_return(recipe, tokens):
    x, gain, text = (
        torch.randn(tokens, HIDDEN).bfloat16(),
        torch.ones(HIDDEN).bfloat16(),
        vllm_fusion.recipe_text(recipe),
    )
    operators = torch.ops.jetrl_megatron
    for operator, arguments in (
        (operators.rms_norm_quantize, (x, gain, EPS, text)),
        (operators.add_rms_norm_quantize, (x, x, gain, EPS, text)),
        (operators.silu_and_mul_quantize, (x, text)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        codes, scale, *_ = operator(*arguments)
        assert codes.is_contiguous() and scale.stride() == (1, scale_stride(tokens)), operator
