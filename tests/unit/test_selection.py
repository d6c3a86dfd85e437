"""Which quantiser and which GEMM serve, and what is said when none does."""

import pytest
import torch

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.cli import main
from jetrl_megatron.ops import GEMMS, QUANTIZERS, select_gemm, select_quantizer
from jetrl_megatron.ops.hopper import check_alignment
from jetrl_megatron.reference import quantize_activation

CPU = torch.device("cpu")


def test_cpu_is_served_by_the_reference():
    assert select_quantizer(JETRL_FP8, CPU).name == "reference"
    assert select_gemm(JETRL_FP8, CPU).name == "reference"


def test_request_never_degrades():
    with pytest.raises(ValueError, match="no GEMM serves.*deep_gemm: it needs a Hopper GPU, not cpu"):
        select_gemm(JETRL_FP8, CPU, request="deep_gemm")
    with pytest.raises(ValueError, match="'cutlass' is unknown: use one of deep_gemm, scaled_mm, reference"):
        select_gemm(JETRL_FP8, CPU, request="cutlass")


def test_a_recipe_with_another_block_is_refused_by_the_gpu_gemms():
    recipe = Fp8BlockRecipe(block=64)
    for gemm in GEMMS[:2]:
        assert gemm.refusal(recipe, CPU) == "its scales cover 128 elements, the recipe's 64"


def test_nobody_left_lists_every_reason():
    meta = torch.device("meta")
    with pytest.raises(ValueError, match="deep_gemm: .*scaled_mm: .*reference: it sums in float64"):
        select_gemm(JETRL_FP8, meta)


def test_gemm_contraction_that_is_no_multiple_of_16_raises():
    with pytest.raises(ValueError, match="contracts over 200 elements, which is no multiple of 16"):
        check_alignment(quantize_activation(torch.randn(4, 200), JETRL_FP8))


def test_doctor_names_choices_and_refusals(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for candidate in (*QUANTIZERS, *GEMMS):
        assert candidate.name in printed
    assert "it needs a Hopper GPU, not cpu" in printed and JETRL_FP8.fingerprint in printed


def test_extension_refuses_what_it_was_not_built_for():
    extension = pytest.importorskip("jetrl_megatron._C", reason="the CUDA extension was not built here")
    rule = {"element_max": 448.0, "amax_floor": 1e-10, "divisor": 448.0, "scale_floor": 1e-10, "power_of_two": True}
    x, codes, scale = torch.randn(4, 128).bfloat16(), torch.empty(4, 128).to(torch.float8_e4m3fn), torch.empty(4, 1)
    with pytest.raises(ValueError, match="x is BFloat16 .*on cpu: expected a CUDA matrix of BFloat16"):
        extension.quantize_both(x, codes, scale, None, None, extension.Recipe(block=128, **rule))
    assert extension.MOST_FEATURES == 8192
