"""FP8 linears on a GPU: right, repeatable, without a word to the host, in CUDA graphs, next to torch.compile."""

import pytest
import torch

from benchmarks.common import relative_error
from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.autograd import Norm, block_fp8_linear, block_fp8_swiglu_mlp
from jetrl_megatron.layout import TileLayout, gated_layout, plain_layout, qkv_layout
from jetrl_megatron.linear_call import LinearCall, LinearPlan
from jetrl_megatron.ops import GEMMS, select_gemm, select_quantizer
from jetrl_megatron.ops.alignment import Alignment

RECIPES = {"ue8m0": JETRL_FP8, "fp32": Fp8BlockRecipe(scale_format="fp32")}
MS = (1, 2, 3, 7, 8, 16, 31, 64, 100, 127, 128, 129, 255, 256, 257, 512, 1000, 2048, 3333, 4095, 6000)


def make_call(rows: TileLayout, columns: int, device, recipe: Fp8BlockRecipe = JETRL_FP8) -> LinearCall:
    layouts = rows, plain_layout(columns, rank=0, world=1, block=recipe.block)
    alignments = (Alignment(layout, None, device) for layout in layouts)
    plan = LinearPlan(recipe, select_quantizer(recipe, device), select_gemm(recipe, device), *alignments, None)
    weight = torch.nn.Parameter((torch.randn(rows.stored, columns, device=device) * 0.05).bfloat16())
    main_grad = torch.zeros(rows.stored, columns, device=device)
    return LinearCall(plan, weight, plan.quantize_weight(weight), main_grad=main_grad)


def leaf(*shape: int, device) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16().requires_grad_()


@pytest.mark.parametrize("scale_format", RECIPES)
@pytest.mark.parametrize("tokens", [(37, 3), (128,), (1000,)])
@pytest.mark.parametrize(
    "rows",
    [
        plain_layout(512, rank=0, world=1, block=128),
        qkv_layout(6, 2, 128, rank=0, world=1, block=128),
        qkv_layout(6, 2, 64, rank=0, world=1, block=128),
        plain_layout(400, rank=0, world=1, block=128),
    ],
    ids=["plain", "qkv_d128", "qkv_d64", "ragged"],
)
def test_linear_against_float64_on_dequantised_operands_close(rows, tokens, scale_format, device):
    recipe, features = RECIPES[scale_format], 384
    call = make_call(rows, features, device, recipe)
    plan, x = call.plan, leaf(*tokens, features, device=device)
    dy = torch.randn(*tokens, rows.stored, device=device).bfloat16()
    y = block_fp8_linear(x, call)
    y.backward(dy)
    x_MK, dy_MN = x.detach().reshape(-1, features), dy.reshape(-1, rows.stored)
    gradient = plan.quantize_gradient(dy_MN, needs_dx=True, needs_dw=True)
    x_codes = plan.quantize(x_MK, plan.columns).tensor
    weight = call.operand.tensor.dequantize(torch.float64)
    assert (
        relative_error(y.view(-1, rows.stored), plan.rows.restore(x_codes.dequantize(torch.float64) @ weight.t(), 1))
        < 4e-3
    )
    dx = gradient.rows.tensor.dequantize(torch.float64) @ weight
    assert relative_error(x.grad.view(-1, features), dx) < 4e-3
    x_columns = plan.quantizer.requantize_along_tokens(x_codes)
    dw = gradient.columns.dequantize(torch.float64) @ x_columns.dequantize(torch.float64).t()
    assert relative_error(call.main_grad, dw) < 1e-3
    again = call.main_grad.clone()
    block_fp8_linear(x, call).backward(dy)
    assert relative_error(call.main_grad, 2 * again) < 1e-6


def test_rows_do_not_depend_on_their_number_exact(device):
    call = make_call(plain_layout(1536, rank=0, world=1, block=128), 4096, device)
    x = torch.randn(6000, 4096, device=device).bfloat16()
    whole = block_fp8_linear(x, call)
    for rows in MS:
        assert torch.equal(block_fp8_linear(x[:rows], call), whole[:rows]), rows


def test_twenty_repeats_are_identical_exact(device):
    call = make_call(gated_layout(512, rank=0, world=1, block=128), 512, device)
    second = make_call(plain_layout(512, rank=0, world=1, block=128), 512, device)
    norm_weight, dz = leaf(512, device=device), torch.randn(1000, 512, device=device).bfloat16()
    x, first = leaf(1000, 512, device=device), None
    for _ in range(20):
        x.grad = norm_weight.grad = None
        call.main_grad.zero_(), second.main_grad.zero_()
        z = block_fp8_swiglu_mlp(x, call, second, norm=Norm(norm_weight, 1e-6))
        z.backward(dz)
        result = [t.clone() for t in (z, x.grad, norm_weight.grad, call.main_grad, second.main_grad)]
        first = first or result
        assert all(torch.equal(a, b) for a, b in zip(first, result, strict=True))


def test_swiglu_mlp_equals_its_parts_exact(device):
    first = make_call(gated_layout(512, rank=0, world=1, block=128), 384, device)
    second = make_call(plain_layout(384, rank=0, world=1, block=128), 512, device)
    x, dz = leaf(300, 384, device=device), torch.randn(300, 384, device=device).bfloat16()
    z = block_fp8_swiglu_mlp(x, first, second)
    z.backward(dz)
    fused = x.grad.clone(), first.main_grad.clone(), second.main_grad.clone()

    x.grad = None
    first.main_grad.zero_(), second.main_grad.zero_()
    y = block_fp8_linear(x, first)
    h_codes = second.plan.quantizer.swiglu(y.detach(), JETRL_FP8)
    assert torch.equal(z, second.fprop(second.plan.operand(h_codes)))
    gradient = second.plan.quantize_gradient(dz, needs_dx=True, needs_dw=True)
    second.wgrad(gradient, h_codes)
    rows, _ = first.plan.quantizer.swiglu_backward(second.dgrad(gradient), y.detach(), JETRL_FP8)
    y.backward(rows.dequantize(torch.bfloat16))
    # What fc1 got as BF16 are dequantised codes, and those quantise to themselves along features alone.
    assert torch.equal(x.grad, fused[0]) and torch.equal(second.main_grad, fused[2])
    assert relative_error(first.main_grad, fused[1]) < 0.05


def test_swiglu_mlp_lets_go_of_what_backward_has_read(device):
    hidden, ffn, tokens = 1024, 3072, 8192
    first = make_call(gated_layout(ffn, rank=0, world=1, block=128), hidden, device)
    second = make_call(plain_layout(hidden, rank=0, world=1, block=128), ffn, device)
    x, dz = leaf(tokens, hidden, device=device), torch.randn(tokens, hidden, device=device).bfloat16()
    for _ in range(2):  # the first compiles kernels
        z = block_fp8_swiglu_mlp(x, first, second)
        x.grad = first.weight.grad = second.weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        z.backward(dz)
    half, codes = tokens * ffn * 2, tokens * 2 * ffn * 2  # dh in BF16, and both orientations of the gradient of y
    assert torch.cuda.max_memory_allocated() - before < 1.1 * (half + codes)


def test_linear_never_waits_for_the_gpu(device):
    call = make_call(gated_layout(256, rank=0, world=1, block=128), 256, device)
    second = make_call(plain_layout(256, rank=0, world=1, block=128), 256, device)
    x, dz = leaf(256, 256, device=device), torch.randn(256, 256, device=device).bfloat16()
    block_fp8_swiglu_mlp(x, call, second).backward(dz)  # compiles kernels
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        call.plan.quantize_weight(call.weight)
        block_fp8_swiglu_mlp(x, call, second).backward(dz)
        block_fp8_linear(block_fp8_linear(x, second), second).backward(dz)
        with pytest.raises(RuntimeError, match="synchronizing"):
            dz.sum().item()  # what would have been seen
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_linear_in_a_cuda_graph_exact(device):
    call = make_call(plain_layout(512, rank=0, world=1, block=128), 256, device)
    x, dy = leaf(200, 256, device=device), torch.randn(200, 512, device=device).bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        operand = call.plan.quantize_weight(call.weight)
        y = block_fp8_linear(x, LinearCall(call.plan, call.weight, operand, main_grad=call.main_grad))
        (dx,) = torch.autograd.grad(y, x, dy)
        return y.detach(), dx

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        call.weight.copy_(torch.randn_like(call.weight) * 0.1)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_gemm_candidates_give_the_same_bytes_exact(device):
    serving = [gemm for gemm in GEMMS if gemm.refusal(JETRL_FP8, device) is None]
    if len(serving) < 2:
        pytest.skip(f"only {[gemm.name for gemm in serving]} serve here")
    quantizer = select_quantizer(JETRL_FP8, device)
    for m, n, k in ((1, 256, 512), (333, 640, 1152), (1000, 1536, 4096), (2048, 4096, 1024)):
        x, _ = quantizer.both(torch.randn(m, k, device=device).bfloat16(), JETRL_FP8)
        weight, transposed = quantizer.weight((torch.randn(n, k, device=device) * 0.05).bfloat16(), JETRL_FP8)
        dy, dy_columns = quantizer.both(torch.randn(m, n, device=device).bfloat16(), JETRL_FP8)
        x_columns = quantizer.requantize_along_tokens(x)
        results = []
        for gemm in serving:
            dw = torch.randn(n, k, generator=torch.Generator(device).manual_seed(1), device=device)
            gemm.accumulate_nt(dy_columns, x_columns, dw)
            results.append((gemm.nt(x, weight), gemm.nt(dy, transposed), dw))
        for name, one, other in zip(("fprop", "dgrad", "wgrad"), *results[:2], strict=True):
            assert torch.equal(one, other), (name, m, n, k, int((one != other).sum()))


def test_layer_next_to_torch_compile(device):
    call = make_call(plain_layout(256, rank=0, world=1, block=128), 256, device)
    linear = torch.compiler.disable(lambda x: block_fp8_linear(x, call))

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(linear(x * 2)) + x

    x = leaf(64, 256, device=device)
    expected = model(x)
    actual = torch.compile(model)(x)
    torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=1e-2)
    actual.sum().backward()
    assert x.grad is not None and call.main_grad.any()
