"""The operators that `bench_quantize` measures: inputs, and what a right result is."""

# Shape suffixes: M tokens, C features, F features of a gated pair's half, N and K rows and columns of a weight.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import relative_error
from jetrl_megatron import JETRL_FP8, BlockScaledTensor, reference

EPS = 1e-6
RECIPE = JETRL_FP8

Functions = Mapping[str, Callable[..., Any]]
"""One implementation: operators by name."""


@dataclass(frozen=True)
class Operator:
    """What is measured.

    Attributes:
        name: of the function in `jetrl_megatron.kernels`.
        inputs: (M, C, device) -> its arguments.
        correct: (implementation, arguments, result) -> whether the result is right: byte-equal for codes, within
            rounding for BF16 whose order of summation the reference does not fix.
        norm: whether it works on hidden states alone, never on anything wider.
    """

    name: str
    inputs: Callable[[int, int, torch.device], tuple[Any, ...]]
    correct: Callable[[Functions, tuple[Any, ...], Any], bool]
    norm: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        """Name for reports."""
        return self.name + self.note


def _random(m: int, features: int, device: torch.device) -> torch.Tensor:
    # Rows of different magnitude, so that scales differ.
    magnitude = torch.randn(m, 1, device=device).exp()
    return (torch.randn(m, features, device=device) * magnitude).to(torch.bfloat16)


def _matrix(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    return _random(m, features, device), RECIPE


def _codes(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    # Twice the tokens, so that codes are as many bytes as BF16 is elsewhere.
    codes = reference.quantize_activation(_random(2 * m, features, device), RECIPE)
    stride = -(-2 * m // 4) * 4
    scale = torch.empty_strided(codes.scale.shape, (1, stride), dtype=torch.float32, device=device).copy_(codes.scale)
    return (BlockScaledTensor(codes.data, scale, codes.block, RECIPE),)


def _normed(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    weight = (1 + 0.1 * torch.randn(features, device=device)).to(torch.bfloat16)
    return _random(m, features, device), weight, EPS, RECIPE


def _plain_norm(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    return _normed(m, features, device)[:3]


def _normed_residual(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    return *_normed(m, features, device), _random(m, features, device)


def _norm_gradient(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    x, weight, *_ = _normed(m, features, device)
    return _random(m, features, device), x, weight, reference.rms_norm(x, weight, EPS)[1]


def _gated(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    return _random(m, 2 * features, device), RECIPE


def _gated_gradient(m: int, features: int, device: torch.device) -> tuple[Any, ...]:
    return _random(m, features, device), *_gated(m, features, device)


def _quantized(x: torch.Tensor) -> BlockScaledTensor:
    return reference.quantize_activation(x, RECIPE)


def _along_tokens(x: torch.Tensor) -> BlockScaledTensor:
    return reference.quantize_along_tokens(x, RECIPE)


def _both(x: torch.Tensor) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    return _quantized(x), _along_tokens(x)


def _weight(w: torch.Tensor, *_: Any) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    codes = reference.quantize_weight(w, RECIPE)
    return codes, codes.t()


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if residual is not None:
        x = residual = (x.float() + residual.float()).to(torch.bfloat16)
    return *reference.rms_norm(x, weight, eps), residual


def _rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, _: Any, *residuals: torch.Tensor
) -> tuple[BlockScaledTensor, torch.Tensor, torch.Tensor | None]:
    y, rstd, residual = _rms_norm(x, weight, eps, *residuals)
    return _quantized(y), rstd, residual


TWINS: Functions = {
    "quantize_activation": reference.quantize_activation,
    "quantize_along_tokens": lambda x, _: _along_tokens(x),
    "quantize_both": lambda x, _: _both(x),
    "requantize_along_tokens": lambda codes: _along_tokens(codes.dequantize()),
    "quantize_weight": _weight,
    "quantize_weights": lambda weights, _: [_weight(w) for w in weights],
    "rms_norm": _rms_norm,
    "rms_norm_quantize": _rms_norm_quantize,
    "rms_norm_backward": reference.rms_norm_backward,
    "swiglu": lambda y, _: reference.swiglu(y),
    "swiglu_quantize": lambda y, _: _quantized(reference.swiglu(y)),
    "swiglu_backward": lambda dh, y, _: reference.swiglu_backward(dh, y),
    "swiglu_backward_quantize": lambda dh, y, _: _both(reference.swiglu_backward(dh, y)),
}


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return all(map(_same, got, expected))
    same: bool = got.equal(expected)
    return same


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    # BF16 values that lie near the middle between two neighbours may go either way.
    return relative_error(got, expected) < 1e-3


def _is_twin(name: str) -> Callable[[Functions, tuple[Any, ...], Any], bool]:
    return lambda _, arguments, got: _same(got, TWINS[name](*arguments))


def weight_correct(_: Functions, arguments: tuple[Any, ...], got: Any) -> bool:
    """Both orientations are the reference's codes."""
    return _same(got, _weight(*arguments))


def _norm_correct(_: Functions, arguments: tuple[Any, ...], got: Any) -> bool:
    return all(_close(a, b) for a, b in zip(got, _rms_norm(*arguments), strict=True) if b is not None)


def _norm_is_its_parts(functions: Functions, arguments: tuple[Any, ...], got: Any) -> bool:
    x, weight, eps, _, *residuals = arguments
    y, rstd, residual = functions["rms_norm"](x, weight, eps, *residuals)
    same_residual = residual is None or torch.equal(got[2], residual)
    return got[0].equal(_quantized(y)) and torch.equal(got[1], rstd) and same_residual


def _norm_gradient_correct(_: Functions, arguments: tuple[Any, ...], got: Any) -> bool:
    return all(map(_close, got, reference.rms_norm_backward(*arguments)))


def _swiglu_correct(_: Functions, arguments: tuple[Any, ...], got: Any) -> bool:
    return _close(got, reference.swiglu(arguments[0]))


def _swiglu_gradient_correct(_: Functions, arguments: tuple[Any, ...], got: Any) -> bool:
    return _close(got, reference.swiglu_backward(*arguments[:2]))


OPERATORS = (
    Operator("quantize_activation", _matrix, _is_twin("quantize_activation")),
    Operator("quantize_along_tokens", _matrix, _is_twin("quantize_along_tokens")),
    Operator("quantize_both", _matrix, _is_twin("quantize_both")),
    Operator("requantize_along_tokens", _codes, _is_twin("requantize_along_tokens")),
    Operator("quantize_weight", _matrix, weight_correct),
    Operator("rms_norm", _plain_norm, _norm_correct, norm=True),
    Operator("rms_norm_quantize", _normed, _norm_is_its_parts, norm=True),
    Operator("rms_norm_quantize", _normed_residual, _norm_is_its_parts, norm=True, note=" + residual"),
    Operator("rms_norm_backward", _norm_gradient, _norm_gradient_correct, norm=True),
    Operator("swiglu", _gated, _swiglu_correct),
    Operator("swiglu_quantize", _gated, lambda f, a, got: got.equal(_quantized(f["swiglu"](*a)))),
    Operator("swiglu_backward", _gated_gradient, _swiglu_gradient_correct),
    Operator(
        "swiglu_backward_quantize", _gated_gradient, lambda f, a, got: _same(got, _both(f["swiglu_backward"](*a)))
    ),
)
