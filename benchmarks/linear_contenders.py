"""One linear, forward and backward, in every implementation that is compared."""

# Shape suffixes: M tokens, N and K rows and columns of a weight, Mp tokens padded to whole groups.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import Contender, Model, relative_error, require, transformer_engine
from benchmarks.megatron_state import accumulate_into_main_grad, drop_gradients, jetrl_linear
from jetrl_megatron import JETRL_FP8, reference
from jetrl_megatron.ops import select_gemm, select_quantizer

Forward = Callable[[torch.Tensor], torch.Tensor]
SETS = 2
"""Input sets that repetitions rotate among. What one repetition touches is several times the L2 already."""


class LinearCase:
    """One linear of one model at M tokens: inputs, output gradients and the layers that compute with them.

    Args:
        te: the module `transformer_engine.pytorch`, or None where it cannot serve.
    """

    def __init__(self, model: Model, name: str, tokens: int, device: torch.device, te: Any = None) -> None:
        self.rows, self.columns = model.linears[name]
        self.device = device
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.x = [torch.randn(tokens, self.columns, **options).requires_grad_() for _ in range(SETS)]
        self.dy = [torch.randn(tokens, self.rows, **options) for _ in range(SETS)]
        drop_gradients(*self.x)
        self.layer: Any = jetrl_linear(model, name, device)
        self.weight = torch.nn.Parameter(self.layer.weight.detach().clone())
        drop_gradients(self.weight)
        self.summed = torch.nn.Linear(self.columns, self.rows, bias=False, **options)
        self.summed.weight = torch.nn.Parameter(self.weight.detach())
        accumulate_into_main_grad(self.summed)
        self.te = None if te is None else TeLinear(te, self.weight.detach())
        self.te_bf16 = None if te is None else TeLinear(te, self.weight.detach(), fp8=False)

    def forward_backward(self, forward: Forward, before: Callable[[], None] | None = None) -> Contender:
        """Phases "forward" and "backward" over rotating inputs; `before` counts as part of the forward."""
        output: dict[str, torch.Tensor] = {}

        def run_forward(i: int) -> None:
            if before is not None:
                before()
            output["y"] = forward(self.x[i % SETS])

        def run_backward(i: int) -> None:
            torch.autograd.backward(output.pop("y"), self.dy[i % SETS])

        return {"forward": run_forward, "backward": run_backward}

    def contenders(self) -> dict[str, Contender]:
        """Everything that is compared."""
        found = {
            "jetrl_strict": self.forward_backward(self.jetrl, self.quantize_weight_anew),
            "jetrl_cached": self.forward_backward(self.jetrl),
            "bf16_torch": self.forward_backward(self.bf16),
            "bf16_torch_main_grad": self.forward_backward(self.summed),
        }
        if self.te is not None:
            found["te_blockwise_strict"] = self.forward_backward(functools.partial(self.te, first=True))
            found["te_blockwise_cached"] = self.forward_backward(functools.partial(self.te, first=False))
        if self.te_bf16 is not None:
            found["te_bf16_main_grad"] = self.forward_backward(functools.partial(self.te_bf16, first=False))
        return found

    def jetrl(self, x: torch.Tensor) -> torch.Tensor:
        """The JetRL layer."""
        y: torch.Tensor = self.layer(x)[0]
        return y

    def bf16(self, x: torch.Tensor) -> torch.Tensor:
        """torch's linear; the weight's gradient stays BF16 and is dropped: the fastest that plain torch can do."""
        return F.linear(x, self.weight)

    def quantize_weight_anew(self) -> None:
        """As at the first microbatch of a step."""
        self.layer.is_first_microbatch = True

    def check(self) -> None:
        """Forward, dgrad and wgrad of the layer are the reference's quantisers around the chosen GEMM, byte for byte.

        The GEMM itself is compared with a product of the dequantised operands.

        Raises:
            SystemExit: something differs.
        """
        x, dy, recipe = self.x[0].detach().requires_grad_(), self.dy[0], JETRL_FP8
        gemm = select_gemm(recipe, self.device)
        self.layer.weight.main_grad.zero_()
        y, _ = self.layer(x)
        y.backward(dy)
        a, w = reference.quantize_activation(x, recipe), reference.quantize_weight(self.weight, recipe)
        expected = gemm.nt(gemm.prepare(a), gemm.prepare(w))
        require(torch.equal(y, expected), "forward is not its parts")
        exact = a.narrow(0, 0, min(256, len(x))).dequantize() @ w.dequantize().t()
        error = relative_error(y[: len(exact)].detach(), exact)
        require(error < 4e-3, f"forward differs from the dequantised product by {error:.2e}")
        g = reference.quantize_activation(dy, recipe)
        dx = gemm.nt(gemm.prepare(g), gemm.prepare(w.t()))
        require(torch.equal(x.grad, dx), "dgrad is not its parts")
        dy_columns, x_columns = (reference.quantize_along_tokens(part, recipe) for part in (dy, a.dequantize()))
        dw = torch.zeros_like(self.layer.weight.main_grad)
        gemm.accumulate_nt(gemm.prepare(dy_columns), gemm.prepare(x_columns), dw)
        require(torch.equal(self.layer.weight.main_grad, dw), "wgrad is not its parts")
        exact = dy_columns.narrow(0, 0, 256).dequantize() @ x_columns.dequantize().t()
        error = relative_error(dw[:256], exact)
        require(error < 2e-3, f"wgrad differs from the dequantised product by {error:.2e}")

    def gemms(self) -> dict[str, Contender]:
        """The three products alone, on operands that are quantised already, and BF16's."""
        quantizer, gemm = select_quantizer(JETRL_FP8, self.device), select_gemm(JETRL_FP8, self.device)
        operand = self.layer.quantized_weight()
        x = [gemm.prepare(quantizer.activation(part.detach(), JETRL_FP8)) for part in self.x]
        both = [quantizer.both(part, JETRL_FP8) for part in self.dy]
        rows, columns = ([gemm.prepare(part[side]) for part in both] for side in (0, 1))
        x_columns = [gemm.prepare(quantizer.along_tokens(part.detach(), JETRL_FP8)) for part in self.x]
        main_grad, weight = self.layer.weight.main_grad, self.weight.detach()
        inputs = [part.detach() for part in self.x]
        return {
            "jetrl_gemm": {
                "fprop": lambda i: gemm.nt(x[i % SETS], operand.rows),
                "dgrad": lambda i: gemm.nt(rows[i % SETS], operand.columns),
                "wgrad": lambda i: gemm.accumulate_nt(columns[i % SETS], x_columns[i % SETS], main_grad),
            },
            "bf16_torch_gemm": {
                "fprop": lambda i: inputs[i % SETS] @ weight.t(),
                "dgrad": lambda i: self.dy[i % SETS] @ weight,
                "wgrad": lambda i: self.dy[i % SETS].t() @ inputs[i % SETS],
            },
        }

    def only(self, *, x: bool, weight: bool) -> None:
        """Which gradients backward computes in the layers and in plain torch."""
        for part in self.x:
            part.requires_grad_(x)
        te_weight = [te.linear.weight for te in (self.te, self.te_bf16) if te is not None]
        for parameter in (self.layer.weight, self.weight, self.summed.weight, *te_weight):
            parameter.requires_grad_(weight)


class TeLinear:
    """TransformerEngine's linear with fused accumulation into main_grad.

    Args:
        te: the module `transformer_engine.pytorch`.
        weight_NK: BF16, copied.
        fp8: Float8BlockScaling, or plain BF16.

    Raises:
        SystemExit: its result is nowhere near the product.
    """

    def __init__(self, te: Any, weight_NK: torch.Tensor, *, fp8: bool = True) -> None:
        from transformer_engine.common.recipe import Float8BlockScaling

        rows, columns = weight_NK.shape
        self._te, self._recipe, self._fp8 = te, Float8BlockScaling(), fp8
        self.linear = te.Linear(columns, rows, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
        with torch.no_grad():
            self.linear.weight.copy_(weight_NK)
        accumulate_into_main_grad(self.linear)
        x = torch.randn(256, columns, dtype=torch.bfloat16, device=weight_NK.device)
        error = relative_error(self(x, first=True).detach(), F.linear(x, weight_NK.detach()))
        require(error < 0.1, f"TransformerEngine's linear differs from BF16's by {error:.2e}")

    def __call__(self, x: torch.Tensor, *, first: bool) -> torch.Tensor:
        """`first`: quantise the weight and overwrite main_grad; else use the cached codes and accumulate."""
        with self._te.autocast(enabled=self._fp8, recipe=self._recipe):
            y: torch.Tensor = self.linear(x, is_first_microbatch=first)
        return y


def usable_transformer_engine(device: torch.device) -> tuple[Any, str]:
    """The module `transformer_engine.pytorch` once a blockwise forward and backward went through; else None and why."""
    te, reason = transformer_engine()
    if te is None:
        return None, reason
    try:
        linear = TeLinear(te, 0.02 * torch.randn(512, 512, dtype=torch.bfloat16, device=device))
        x = torch.randn(512, 512, dtype=torch.bfloat16, device=device, requires_grad=True)
        for first in (True, False):
            linear(x, first=first).sum().backward()
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError, ImportError, OSError) as error:
        # What a library reports that does not fit the machine; the reason goes into the results.
        return None, f"TransformerEngine does not run: {type(error).__name__}: {error}"
    return te, ""
