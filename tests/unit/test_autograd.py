"""FProp, DGrad and WGrad against float64, accumulation, ablations."""

import dataclasses
import weakref
from typing import Any

import pytest
import torch

from benchmarks.common import relative_error
from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe, quantize_activation, quantize_weight
from jetrl_megatron.autograd import Norm, block_fp8_linear, block_fp8_swiglu_mlp
from jetrl_megatron.layout import TileLayout, gated_layout, plain_layout, qkv_layout
from jetrl_megatron.linear_call import LinearCall, LinearPlan
from jetrl_megatron.ops.alignment import Alignment
from jetrl_megatron.ops.backends import ReferenceGemm, ReferenceQuantizer
from jetrl_megatron.reference import rms_norm, swiglu, swiglu_backward
from tests.fused_reference import FusedReference

CPU = torch.device("cpu")
LAYOUTS = {
    "aligned": plain_layout(256, rank=0, world=1, block=128),
    "ragged": plain_layout(200, rank=0, world=1, block=128),
    "qkv_d128": qkv_layout(4, 2, 128, rank=0, world=1, block=128),
    "qkv_d64": qkv_layout(6, 3, 64, rank=0, world=1, block=128),
}
K = 384


def make_plan(
    rows: TileLayout,
    recipe: Fp8BlockRecipe = JETRL_FP8,
    columns: int = K,
    quantizer: ReferenceQuantizer = ReferenceQuantizer(),  # noqa: B008 - it has no state
    gemm: ReferenceGemm = ReferenceGemm(),  # noqa: B008 - it has no state
) -> LinearPlan:
    column_layout = plain_layout(columns, rank=0, world=1, block=recipe.block)
    return LinearPlan(recipe, quantizer, gemm, Alignment(rows, None, CPU), Alignment(column_layout, None, CPU), None)


class Problem:
    """One linear with its three results and the float64 results on the same dequantised operands."""

    def __init__(self, rows: TileLayout, recipe: Fp8BlockRecipe, tokens: tuple[int, ...] = (37, 3)) -> None:
        torch.manual_seed(0)
        self.plan = make_plan(rows, recipe)
        self.weight = torch.nn.Parameter((torch.randn(rows.stored, K) * 0.05).bfloat16())
        self.x = torch.randn(*tokens, K).bfloat16().requires_grad_()
        self.dy = torch.randn(*tokens, rows.stored).bfloat16()
        self.main_grad = torch.zeros(rows.stored, K)
        self.operand = self.plan.quantize_weight(self.weight)

    def call(self, **kwargs: torch.Tensor) -> LinearCall:
        return LinearCall(self.plan, self.weight, self.operand, **kwargs)

    def run(self) -> torch.Tensor:
        y = block_fp8_linear(self.x, self.call(main_grad=self.main_grad))
        y.backward(self.dy)
        return y.detach()

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, recipe = self.plan.rows, self.plan.recipe
        x, dy = self.x.detach().reshape(-1, K), self.dy.reshape(-1, self.weight.shape[0])
        weight = self.operand.tensor.dequantize(torch.float64)
        xq = quantize_activation(x, recipe).dequantize(torch.float64)
        dyq = quantize_activation(rows.align(dy, 1), recipe).dequantize(torch.float64)
        pad = -x.shape[0] % recipe.block
        x_padded = torch.nn.functional.pad(xq.float(), (0, 0, 0, pad))
        dy_padded = torch.nn.functional.pad(dy, (0, 0, 0, pad))
        xt = quantize_activation(x_padded.t(), recipe).dequantize(torch.float64)
        dyt = quantize_activation(dy_padded.t(), recipe).dequantize(torch.float64)
        return rows.restore(xq @ weight.t(), 1), dyq @ weight, dyt @ xt.t()


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_linear_against_float64_on_dequantised_operands_close(name, scale_format):
    problem = Problem(LAYOUTS[name], Fp8BlockRecipe(scale_format=scale_format))
    y = problem.run()
    fprop, dgrad, wgrad = problem.exact()
    # BF16 keeps 8 bits, so its rounding alone is up to 2^-9 per element; main_grad is FP32.
    assert relative_error(y.reshape(fprop.shape), fprop) < 3e-3
    assert relative_error(problem.x.grad.reshape(dgrad.shape), dgrad) < 3e-3
    assert relative_error(problem.main_grad, wgrad) < 1e-5


def test_linear_qkv_scales_are_those_of_q_k_v_exact():
    # head_dim 64: the stored interleave shares tiles between q, k and v; the operand must not.
    heads, groups, d = 6, 3, 64
    q, k, v = (torch.randn(n, K).bfloat16() * scale for n, scale in ((384, 1), (192, 8), (192, 0.1)))
    stored = torch.cat([torch.cat(p) for p in zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)])
    layout = qkv_layout(heads, groups, d, rank=0, world=1, block=128)
    tensor = make_plan(layout).quantize_weight(stored).tensor
    assert layout.aligned == 384 + 256 + 192  # k ends mid-tile, so v starts at the next tile
    assert tensor.narrow(0, 0, 384).equal(quantize_weight(q))
    assert tensor.narrow(0, 384, 192).equal(quantize_weight(k))
    assert tensor.narrow(0, 640, 192).equal(quantize_weight(v))


def test_linear_accumulates_over_microbatches():
    problem = Problem(LAYOUTS["aligned"], JETRL_FP8)
    problem.run()
    once = problem.main_grad.clone()
    for _ in range(3):
        problem.run()
    assert relative_error(problem.main_grad, 4 * once) < 1e-6
    assert problem.weight.grad_added_to_main_grad


def test_linear_returns_gradient_without_main_grad():
    problem = Problem(LAYOUTS["aligned"], JETRL_FP8)
    problem.run()
    expected = problem.main_grad.bfloat16()
    block_fp8_linear(problem.x, problem.call()).backward(problem.dy)
    other = Problem(LAYOUTS["aligned"], JETRL_FP8)
    block_fp8_linear(other.x, other.call()).backward(other.dy)
    assert other.weight.grad.dtype == torch.bfloat16
    assert torch.equal(other.weight.grad, expected)


def test_linear_frozen_weight_gives_dx_and_saves_nothing():
    problem = Problem(LAYOUTS["aligned"], JETRL_FP8)
    problem.run()
    dx = problem.x.grad.clone()
    frozen = Problem(LAYOUTS["aligned"], JETRL_FP8)
    frozen.weight.requires_grad_(False)
    y = block_fp8_linear(frozen.x, frozen.call(main_grad=frozen.main_grad))
    assert y.grad_fn.saved_tensors == ()
    y.backward(frozen.dy)
    assert torch.equal(frozen.x.grad, dx)
    assert frozen.weight.grad is None and not frozen.main_grad.any()


def test_linear_saves_codes_not_bf16():
    problem = Problem(LAYOUTS["aligned"], JETRL_FP8)
    y = block_fp8_linear(problem.x, problem.call())
    assert [t.dtype for t in y.grad_fn.saved_tensors] == [torch.float8_e4m3fn, torch.float32]
    assert y.grad_fn.saved_tensors[0].shape == (37 * 3, K)


def test_linear_bias_and_its_gradient():
    problem = Problem(LAYOUTS["qkv_d64"], JETRL_FP8)
    bias = torch.randn(problem.weight.shape[0]).bfloat16().requires_grad_()
    y = block_fp8_linear(problem.x, problem.call(), bias=bias)
    y.backward(problem.dy)
    assert torch.equal(y.detach(), problem.run() + bias.detach())
    assert relative_error(bias.grad, problem.dy.double().reshape(-1, bias.numel()).sum(0)) < 4e-3


def test_linear_strided_gradient_exact():
    problem, strided = (Problem(LAYOUTS["aligned"], JETRL_FP8, tokens=(96,)) for _ in range(2))
    problem.run()
    strided.dy = strided.dy.t().contiguous().t()
    strided.x = strided.x.detach().t().contiguous().t().requires_grad_()
    strided.run()
    assert torch.equal(strided.main_grad, problem.main_grad)
    assert torch.equal(strided.x.grad, problem.x.grad)


def test_linear_token_padding_changes_nothing_exact():
    short, padded = (Problem(LAYOUTS["aligned"], JETRL_FP8, tokens=(201,)) for _ in range(2))
    short.run()
    with torch.no_grad():
        padded.x = torch.cat([short.x.detach(), torch.zeros(55, K).bfloat16()]).requires_grad_()
        padded.dy = torch.cat([short.dy, torch.zeros(55, 256).bfloat16()])
    padded.run()
    assert torch.equal(short.main_grad, padded.main_grad)


def test_linear_rows_do_not_depend_on_the_number_of_tokens_exact():
    problem = Problem(LAYOUTS["aligned"], JETRL_FP8, tokens=(300,))
    y = problem.run()
    for rows in (1, 2, 17, 128):
        part = block_fp8_linear(problem.x[:rows].detach(), problem.call())
        assert torch.equal(part, y[:rows])


def test_linear_nan_in_gives_nan_out():
    problem = Problem(LAYOUTS["aligned"], JETRL_FP8)
    with torch.no_grad():
        problem.x[0, 0, 0] = float("nan")
    y = problem.run()
    assert y[0, 0].isnan().all() and not y[1:].isnan().any()


def test_linear_empty_batch():
    problem = Problem(LAYOUTS["qkv_d64"], JETRL_FP8, tokens=(0, 2))
    y = problem.run()
    assert y.shape == (0, 2, problem.weight.shape[0])
    assert problem.x.grad.shape == (0, 2, K) and not problem.main_grad.any()


@pytest.mark.parametrize(
    ("ablation", "changes"),
    [
        ({"dgrad": "bf16"}, {"dgrad"}),
        ({"wgrad": "bf16"}, {"wgrad"}),
        ({"saved_activation": "bf16"}, {"wgrad"}),
        ({"wgrad_gradient_source": "fp8"}, {"wgrad"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_linear_ablation_changes_its_own_pass_alone(ablation, changes):
    base = Problem(LAYOUTS["qkv_d128"], JETRL_FP8)
    other = Problem(LAYOUTS["qkv_d128"], dataclasses.replace(JETRL_FP8, **ablation))
    y, y_other = base.run(), other.run()
    results = {"fprop": (y, y_other), "dgrad": (base.x.grad, other.x.grad), "wgrad": (base.main_grad, other.main_grad)}
    assert {name for name, (a, b) in results.items() if not torch.equal(a, b)} == changes
    for a, b in results.values():
        assert relative_error(b, a) < 0.06  # e4m3 rounding of two operands


def test_linear_gradcheck_direction():
    # The FP8 gradient must point along the true one; e4m3 rounding of both operands costs about 4%.
    problem = Problem(LAYOUTS["qkv_d64"], JETRL_FP8)
    problem.run()
    x, dy = problem.x.detach().double().reshape(-1, K), problem.dy.double().reshape(-1, problem.weight.shape[0])
    assert relative_error(problem.x.grad.reshape(-1, K), dy @ problem.weight.double()) < 0.05
    assert relative_error(problem.main_grad, dy.t() @ x) < 0.05


def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16().requires_grad_()


def linear_call(rows: TileLayout, columns: int, **parts: Any) -> LinearCall:
    plan = make_plan(rows, columns=columns, **{"quantizer": FusedReference(), **parts})
    weight = torch.nn.Parameter(leaf(rows.stored, columns, scale=0.05).detach())
    return LinearCall(plan, weight, plan.quantize_weight(weight), main_grad=torch.zeros(rows.stored, columns))


def test_linear_with_norm_equals_norm_then_linear_close():
    torch.manual_seed(0)
    call, x, norm_weight, dy = linear_call(LAYOUTS["aligned"], K), leaf(37, 3, K), leaf(K), torch.randn(37, 3, 256)
    y = block_fp8_linear(x, call, norm=Norm(norm_weight, 1e-6))
    y.backward(dy.bfloat16())

    reference_x, reference_weight = (t.detach().float().requires_grad_() for t in (x, norm_weight))
    normed = torch.nn.functional.rms_norm(reference_x, (K,), reference_weight, 1e-6)
    exact, _ = rms_norm(x.detach().reshape(-1, K), norm_weight.detach(), 1e-6)
    twin = block_fp8_linear(exact.view(37, 3, K).requires_grad_(), call)
    assert torch.equal(y, twin)
    main_grad = call.main_grad.clone()
    call.main_grad.zero_()
    (dx_operand,) = torch.autograd.grad(twin, twin.grad_fn.next_functions[0][0].variable, dy.bfloat16())
    normed.backward(dx_operand.float())
    assert relative_error(x.grad, reference_x.grad) < 3e-3
    assert relative_error(norm_weight.grad, reference_weight.grad) < 5e-3
    assert main_grad.any()


@pytest.mark.parametrize("with_norm", [False, True])
def test_swiglu_mlp_equals_its_parts_exact(with_norm):
    torch.manual_seed(0)
    ffn = 256
    first = linear_call(gated_layout(ffn, rank=0, world=1, block=128), K)
    second = linear_call(plain_layout(K, rank=0, world=1, block=128), ffn)
    norm_weight = leaf(K)
    norm = Norm(norm_weight, 1e-6) if with_norm else None
    x, dz = leaf(50, 2, K), torch.randn(50, 2, K).bfloat16()
    z = block_fp8_swiglu_mlp(x, first, second, norm=norm)
    z.backward(dz)
    fused = [x.grad, first.main_grad.clone(), second.main_grad.clone(), norm_weight.grad]

    x.grad, norm_weight.grad = None, None
    first.main_grad.zero_(), second.main_grad.zero_()
    y = block_fp8_linear(x, first, norm=norm)
    h = swiglu(y.detach().view(-1, 2 * ffn)).view(50, 2, ffn).requires_grad_()
    parts = block_fp8_linear(h, second)
    assert torch.equal(z, parts)
    parts.backward(dz)
    y.backward(swiglu_backward(h.grad.view(-1, ffn), y.detach().view(-1, 2 * ffn)).view_as(y))
    for one, other in zip(fused, [x.grad, first.main_grad, second.main_grad, norm_weight.grad], strict=True):
        assert one is other is None or torch.equal(one, other)


class Watched(FusedReference, ReferenceGemm):
    """Quantiser and GEMM that say, at each wgrad, which gradients of the MLP's inside are still in memory."""

    def __init__(self) -> None:
        self.made: dict[str, weakref.ref] = {}
        self.alive: list[set[str]] = []

    def swiglu_backward(self, dh_MF, y_M2F, recipe):
        rows, columns = super().swiglu_backward(dh_MF, y_M2F, recipe)
        made = {"dh": dh_MF, "rows": rows.data, "columns": columns.data}
        self.made |= {name: weakref.ref(tensor) for name, tensor in made.items()}
        return rows, columns

    def accumulate_nt(self, a, b, out_NK):
        self.alive.append({name for name, tensor in self.made.items() if tensor() is not None})
        super().accumulate_nt(a, b, out_NK)


def test_swiglu_mlp_lets_go_of_gradients_it_has_read():
    ffn, watched = 256, Watched()
    shapes = {gated_layout(ffn, rank=0, world=1, block=128): K, plain_layout(K, rank=0, world=1, block=128): ffn}
    calls = [linear_call(rows, columns, quantizer=watched, gemm=watched) for rows, columns in shapes.items()]
    placeholders = []
    for call in calls:
        call.weight.register_hook(placeholders.append)
    z = block_fp8_swiglu_mlp(leaf(100, K), *calls)
    z.backward(torch.ones_like(z))
    assert watched.alive == [set(), {"columns"}]
    assert all(call.main_grad.any() and call.weight.grad_added_to_main_grad for call in calls)
    assert [p.shape for p in placeholders] == [call.weight.shape for call in calls]


def test_swiglu_backward_against_autograd_close():
    torch.manual_seed(0)
    y, dh = torch.randn(64, 512).double().requires_grad_(), torch.randn(64, 256).bfloat16()
    gate, up = y.chunk(2, dim=1)
    (torch.nn.functional.silu(gate) * up).backward(dh.double())
    mine = swiglu_backward(dh, y.detach().bfloat16())
    assert relative_error(mine, y.grad) < 8e-3  # y and the result are rounded to BF16
    half = swiglu(y.detach().bfloat16())
    assert half.dtype == torch.bfloat16 and relative_error(half, (torch.nn.functional.silu(gate) * up).detach()) < 8e-3


def test_plan_does_not_fuse_ablations_and_moved_rows():
    assert make_plan(LAYOUTS["qkv_d128"], quantizer=FusedReference()).fuses
    assert not make_plan(LAYOUTS["qkv_d64"], quantizer=FusedReference()).fuses
    assert not make_plan(LAYOUTS["aligned"]).fuses
    for field in ("dgrad", "wgrad", "saved_activation"):
        recipe = Fp8BlockRecipe(**{field: "bf16"})
        assert not make_plan(LAYOUTS["aligned"], recipe, quantizer=FusedReference()).fuses
