"""Compiles the launches of Triton kernels for a Hopper GPU, for `tests.unit.kernels_on_cpu`."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from jetrl_megatron import JETRL_FP8
from jetrl_megatron.ops.gpu_quantizers import TritonQuantizer
from tests.unit import kernels_on_cpu

M, C, EPS = 512, 1024, 1e-6
WIDEST_STORE = re.compile(r"st\.global(?:\.\w+)*\.v4\.b32")


def assert_fits_registers(kernel: object) -> None:
    """Nothing is kept in memory for want of registers."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in usage and "LOCAL:0 " in usage, f"{kernel.metadata.name}: {usage}"


def compiles(make_launch: Callable[[], None]) -> None:
    kernels_on_cpu.compiled.clear()
    make_launch()
    assert kernels_on_cpu.compiled
    for kernel in kernels_on_cpu.compiled:
        assert_fits_registers(kernel)
        assert WIDEST_STORE.search(kernel.asm["ptx"]), f"{kernel.metadata.name} stores less than 16 bytes at a time"


def compiles_for_awkward_sizes() -> None:
    from jetrl_megatron.kernels import quantize_activation, quantize_both, quantize_weight, swiglu

    for rows, columns in ((1, 1), (7, 129)):
        x = torch.ones(rows, columns).bfloat16()
        quantize_activation.quantize_activation(x, JETRL_FP8)
        quantize_both.quantize_both(x, JETRL_FP8)
        quantize_weight.quantize_weight(x, JETRL_FP8)
    swiglu.swiglu(torch.ones(1, 2).bfloat16(), JETRL_FP8)


def _matrix() -> torch.Tensor:
    return torch.ones(M, C).bfloat16()


def _activation(rows: int) -> None:
    from jetrl_megatron.kernels.quantize_activation import quantize_activation

    quantize_activation(_matrix()[:rows], JETRL_FP8)


def _both() -> None:
    from jetrl_megatron.kernels.quantize_both import quantize_along_tokens, quantize_both

    quantize_both(_matrix(), JETRL_FP8)
    quantize_along_tokens(_matrix(), JETRL_FP8)


def _requantize() -> None:
    from jetrl_megatron.kernels.quantize_activation import quantize_activation_twin
    from jetrl_megatron.kernels.requantize_along_tokens import requantize_along_tokens

    requantize_along_tokens(quantize_activation_twin(_matrix(), JETRL_FP8))


def _weight() -> None:
    from jetrl_megatron.kernels.quantize_weight import quantize_weight

    quantize_weight(_matrix(), JETRL_FP8)


def _norm() -> None:
    from jetrl_megatron.kernels.rms_norm import rms_norm, rms_norm_backward

    x, weight = torch.ones(8, 4096).bfloat16(), torch.ones(4096).bfloat16()
    rms_norm(x, weight, EPS, x)
    rms_norm_backward(x, x, weight, torch.ones(8))


def _heads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Interleaved q, k and v, a norm's weight, positions and their angles."""
    size = 128
    return torch.ones(M, 2, 6, size).bfloat16(), torch.ones(size), torch.arange(M), torch.ones(M, size).bfloat16()


def _norm_rope() -> None:
    from jetrl_megatron.kernels import norm_rope

    qkv, weight, *places = _heads()
    for gain in (weight, None):
        for x in (qkv[:, :, :4], qkv[:, :, 4:5]):
            y, rstd = norm_rope.norm_rope(x, gain, EPS, *places)
            norm_rope.norm_rope_backward(y, x, gain, rstd, *places, torch.empty_like(qkv)[:, :, :4])


def sums_heads_alike() -> None:
    """The norm alone and the one with the rotation sum a row in the same parts, and so in the same order."""
    from jetrl_megatron.kernels import head_norm, norm_rope

    qkv, weight, *places = _heads()
    for size in (64, 128, 192, 256):
        x, gain = qkv.new_ones(M, 2, 6, size), qkv.new_ones(size)
        for part in (slice(4), slice(4, 5)):
            kernels_on_cpu.compiled.clear()
            head_norm.head_norm(x[:, :, part].flatten(1, 2), gain, EPS)
            norm_rope.norm_rope(x[:, :, part], gain, EPS, places[0], qkv.new_ones(M, size))
            alone, fused = map(_layout_of_sum, kernels_on_cpu.compiled)
            assert alone == fused, f"{size}: {alone} and {fused}"


def _layout_of_sum(kernel: object) -> str:
    """How the tensor that a kernel sums lies over threads."""
    code = kernel.asm["ttgir"]
    (shape, layout), *more = re.findall(r"}\) : \(tensor<(\w+), (#\w+)>\) -> ", code)
    assert not more
    return f"{shape} {re.search(rf'^{layout} = (.*)$', code, re.MULTILINE)[1]}"


def _swiglu() -> None:
    from jetrl_megatron.kernels import swiglu

    y, dh = _matrix(), torch.ones(M, C // 2).bfloat16()
    swiglu.swiglu(y, JETRL_FP8)
    swiglu.swiglu_quantize(y, JETRL_FP8)
    swiglu.swiglu_backward_quantize(dh, y, JETRL_FP8)


def _rollout() -> None:
    """The operators that a rollout calls, where the CUDA extension is missing."""
    from jetrl_megatron.ops import quantized_outputs, swiglu

    quantizer = TritonQuantizer()
    with (
        patch.object(swiglu, "runs_kernels", lambda _: True),
        patch.object(swiglu, "has_extension", lambda: False),
        patch.object(quantized_outputs, "has_extension", lambda: False),
        patch.object(quantized_outputs, "select_quantizer", lambda *_: quantizer),
    ):
        assert swiglu.silu_and_mul(_matrix()).shape == (M, C // 2)
        assert quantized_outputs.swiglu_quantize(_matrix(), JETRL_FP8).shape == (M, C // 2)


CASES: dict[str, Callable[[], None]] = {
    "activation": partial(compiles, partial(_activation, M)),
    "both": partial(compiles, _both),
    "requantize": partial(compiles, _requantize),
    "weight": partial(compiles, _weight),
    "norm": partial(compiles, _norm),
    "norm_rope": partial(compiles, _norm_rope),
    "sums_heads_alike": sums_heads_alike,
    "swiglu": partial(compiles, _swiglu),
    "rollout": partial(compiles, _rollout),
    "awkward_sizes": compiles_for_awkward_sizes,
}
