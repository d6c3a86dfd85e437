"""Each parity operator by itself against the installed vLLM, bit for bit, so that a release that changes one is named;
rows that do not depend on how many there are; gradients against float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from benchmarks.common import relative_error
from jetrl_megatron.ops.attention import Packing, attention_refusal, fewest_queries, flash_attention
from jetrl_megatron.ops.bf16_linear import row_invariant_linear, row_invariant_refusal
from jetrl_megatron.ops.log_prob import token_log_probs
from jetrl_megatron.ops.norm import norm_forward, norm_kernel, rms_norm
from jetrl_megatron.ops.qkv import Rotation, split_heads
from jetrl_megatron.ops.quantized_outputs import norm_quantize, swiglu_quantize
from jetrl_megatron.ops.rope import cos_sin_cache, rope
from jetrl_megatron.ops.swiglu import silu_and_mul
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.tensor import BlockScaledTensor
from tests.float64 import split_heads64

TOKENS = (1, 2, 3, 7, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 1000, 2048)
EPS = 1e-6
SCALE = 128**-0.5


def randn(*shape: int, device) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


@pytest.mark.parametrize("features", [1024, 4096, 5120, 8192])
def test_norm_rows_do_not_depend_on_their_number_exact(device, features):
    x, residual = randn(2048, features, device=device), randn(2048, features, device=device)
    weight = (1 + 0.1 * randn(features, device=device)).bfloat16()
    y, _, total = norm_forward(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, norm_forward(total, weight, EPS)[0])
    for m in TOKENS:
        assert torch.equal(norm_forward(x[:m], weight, EPS, residual[:m])[0], y[:m]), m


@pytest.mark.parametrize("size", [64, 128, 256])
def test_head_norm_rows_do_not_depend_on_their_number_or_strides_exact(device, size):
    heads = randn(2048, 40 * size, device=device).view(2048, 40, size)[:, 3:35]
    weight = (1 + 0.1 * randn(size, device=device)).bfloat16()
    assert norm_kernel(heads, weight) == "triton_heads"
    y = norm_forward(heads, weight, EPS)[0]
    assert torch.equal(norm_forward(heads.contiguous(), weight, EPS)[0], y)
    for m in TOKENS:
        assert torch.equal(norm_forward(heads[:m], weight, EPS)[0], y[:m]), m


@pytest.mark.parametrize("shape", [(600, 1, 4096), (500, 1, 8, 128)])
def test_norm_gradient(device, shape):
    x = randn(*shape, device=device).requires_grad_()
    weight = (1 + 0.1 * randn(shape[-1], device=device)).bfloat16().requires_grad_()
    dy = randn(*shape, device=device)
    rms_norm(x, weight, EPS).backward(dy)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    F.rms_norm(x64, shape[-1:], weight64, EPS).backward(dy.double())
    assert relative_error(x.grad, x64.grad) < 4e-3 and relative_error(weight.grad, weight64.grad) < 4e-3


@pytest.mark.parametrize(("base", "size"), [(10000, 64), (500000, 128), (1000000, 128)])
def test_rope_equals_vllm_exact(device, base, size):
    operators = pytest.importorskip("vllm._custom_ops")
    embedding = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.base").RotaryEmbedding
    frequencies = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size))
    angles = torch.outer(torch.arange(8192, dtype=torch.float32, device=device), frequencies)
    cache = cos_sin_cache(torch.cat((angles, angles), -1)[:, None, None, :])
    theirs = embedding.__new__(embedding)
    torch.nn.Module.__init__(theirs)
    theirs.base, theirs.rotary_dim, theirs.max_position_embeddings = float(base), size, 8192
    with torch.device(device):
        assert torch.equal(cache, theirs._compute_cos_sin_cache().to(torch.bfloat16))
    positions = torch.randint(8192, (3000,), device=device)
    for heads in (32, 8):
        x = randn(3000, heads, size, device=device)
        turned = x.clone().view(3000, -1)
        operators.rotary_embedding(positions, turned, None, size, cache, True)
        assert torch.equal(rope(x, positions, cache).view(3000, -1), turned)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("groups", "heads", "size"), [(8, 4, 128), (8, 8, 128), (2, 5, 64), (4, 1, 256), (4, 4, 192)])
def test_split_heads_equal_norm_then_rope_exact(device, groups, heads, size, normed):
    qkv = randn(2048, groups, heads + 2, size, device=device).requires_grad_()
    weights = [(1 + 0.1 * randn(size, device=device)).bfloat16().requires_grad_() for _ in range(2)]
    angles = torch.outer(torch.arange(2048, device=device), torch.logspace(0, -4, size // 2, device=device))
    rotation = Rotation(torch.randint(2048, (2048,), device=device), cos_sin_cache(torch.cat((angles, angles), -1)))
    options = {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS} if normed else {}
    parts = split_heads(qkv, rotation, **options)
    expected = []
    for x, weight in zip((qkv[:, :, :-2], qkv[:, :, -2:-1]), weights, strict=True):
        x = x.reshape(2048, 1, -1, size)
        x = (rms_norm(x, weight, EPS) if normed else x).view(2048, -1, size)
        expected.append(rope(x, rotation.positions, rotation.cos_sin))
    expected.append(qkv[:, :, -1])
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    for m in TOKENS:
        few = Rotation(rotation.positions[:m], rotation.cos_sin)
        assert all(torch.equal(a, b[:m]) for a, b in zip(split_heads(qkv[:m], few, **options), parts, strict=True)), m
    upstream = [randn(*part.shape, device=device) for part in parts]
    inputs = [qkv, *weights] if normed else [qkv]
    gradients = torch.autograd.grad(parts, inputs, upstream, retain_graph=True)
    assert all(map(torch.equal, gradients, torch.autograd.grad(parts, inputs, upstream)))
    for a, b in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        assert relative_error(a, b) < 4e-3
    inputs64 = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected64 = split_heads64(inputs64[0], rotation, inputs64[1:], EPS)
    assert all(relative_error(a.detach(), b.detach()) < 4e-3 for a, b in zip(parts, expected64, strict=True))
    found64 = torch.autograd.grad(expected64, inputs64, [each.double() for each in upstream])
    assert all(relative_error(a, b) < 4e-3 for a, b in zip(gradients, found64, strict=True))


def test_silu_and_mul_rows_exact(device):
    gate_up = randn(2048, 2 * 12288, device=device)
    h = silu_and_mul(gate_up)
    for m in TOKENS:
        assert torch.equal(silu_and_mul(gate_up[:m]), h[:m]), m


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("features", [1024, 4096, 5120, 8192])
def test_quantised_outputs_equal_parts_with_vllms_quantiser_exact(device, features, scale_format):
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    recipe = Fp8BlockRecipe(scale_format=scale_format)
    weight = (1 + 0.1 * randn(features, device=device)).bfloat16()

    def assert_quantised(codes: BlockScaledTensor, y: torch.Tensor) -> None:
        layout = {"column_major_scales": True, "tma_aligned_scales": True}
        data, scale = utils.per_token_group_quant_fp8(y, recipe.block, use_ue8m0=scale_format == "ue8m0", **layout)
        assert codes.equal(BlockScaledTensor(data, scale, codes.block, recipe)), len(y)
        assert codes.scale.stride() == scale.stride() and codes.data.stride() == data.stride(), len(y)

    for m in TOKENS:
        x, residual, gate_up = (randn(m, n, device=device) for n in (features, features, 2 * features))
        for added in (None, residual):
            y, _, total = norm_forward(x, weight, EPS, added)
            codes, summed = norm_quantize(x, weight, EPS, recipe, added)
            assert_quantised(codes, y)
            assert added is None or torch.equal(summed, total)
        assert_quantised(swiglu_quantize(gate_up, recipe), silu_and_mul(gate_up))


@pytest.mark.parametrize("vocabulary", [1000, 8192, 49152, 50257, 128256, 151936])
def test_log_probs_equal_vllm_exact(device, vocabulary):
    theirs = pytest.importorskip("vllm.v1.worker.gpu.sample.logprob").compute_token_logprobs
    padded = -(-vocabulary // 64) * 64
    logits = (torch.randn(600, padded, device=device) * 3).bfloat16()
    targets = torch.randint(vocabulary, (600,), device=device)
    expected = theirs(logits[:, :vocabulary], targets[:, None])[:, 0]
    assert torch.equal(token_log_probs(logits, targets, vocabulary=vocabulary), expected)


def test_log_prob_gradient(device):
    logits = (torch.randn(300, 32064, device=device) * 3).bfloat16().requires_grad_()
    targets, dy = torch.randint(32000, (300,), device=device), torch.randn(300, device=device)
    token_log_probs(logits, targets, vocabulary=32000).backward(dy)
    logits64 = logits.detach().double().requires_grad_()
    logits64[:, :32000].log_softmax(-1).gather(1, targets[:, None])[:, 0].backward(dy.double())
    assert relative_error(logits.grad, logits64.grad) < 4e-3


@pytest.mark.parametrize(("rows", "features"), [(32768, 4096), (8192, 1024)])
def test_lm_head_rows_do_not_depend_on_their_number_exact(device, rows, features):
    if (reason := row_invariant_refusal(device)) is not None:
        pytest.skip(reason)
    x, weight = randn(2048, features, device=device), randn(rows, features, device=device) * 0.02
    y = row_invariant_linear(x, weight)
    assert relative_error(y, x.double() @ weight.double().t()) < 4e-3
    for m in TOKENS:
        assert torch.equal(row_invariant_linear(x[:m], weight), y[:m]), m
    half = weight[: rows // 2].contiguous()
    assert torch.equal(row_invariant_linear(x, half), y[:, : rows // 2]), "a rank's half of the vocabulary"


def packing(lengths: list[int], device, equal: bool) -> Packing:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    return Packing(starts, max(lengths), equal)


@pytest.mark.parametrize(
    ("lengths", "equal"), [([2048], True), ([512] * 4, True), ([512] * 4, False), ([300, 1, 777, 512, 458], False)]
)
def test_attention_and_its_gradient(device, lengths, equal):
    if (reason := attention_refusal(device)) is not None:
        pytest.skip(reason)
    tokens = sum(lengths)
    qkv = randn(tokens, 48, 128, device=device)
    q, k, v = (x.detach().requires_grad_() for x in qkv.split((32, 8, 8), 1))
    dout = randn(tokens, 32, 128, device=device)
    out = flash_attention(q, k, v, packing(lengths, device, equal), scale=SCALE)
    out.backward(dout)
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    parts, start = [], 0
    for length in lengths:
        there = slice(start, start + length)
        heads = (x[there].transpose(0, 1).repeat_interleave(32 // x.shape[1], 0) for x in (q64, k64, v64))
        parts.append(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1))
        start += length
    expected = torch.cat(parts)
    expected.backward(dout.double())
    for name, a, b in (
        ("out", out, expected),
        ("dq", q.grad, q64.grad),
        ("dk", k.grad, k64.grad),
        ("dv", v.grad, v64.grad),
    ):
        assert relative_error(a.detach(), b.detach()) < 8e-3, name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 8, 128), (12, 4, 64), (8, 8, 64), (16, 4, 192), (8, 4, 256)]
)
def test_attention_equals_vllms_paged_decode_exact(device, heads, kv_heads, size):
    functions = pytest.importorskip("vllm.vllm_flash_attn")
    length, page = 3000, 16
    q, k, v = (randn(length, count, size, device=device) for count in (heads, kv_heads, kv_heads))
    out = flash_attention(q, k, v, packing([length], device, True), scale=size**-0.5)
    pages = -(-length // page)
    order = torch.randperm(pages, device=device)
    cache = torch.zeros(2, pages, page, kv_heads, size, dtype=torch.bfloat16, device=device)
    for side, x in enumerate((k, v)):
        padded = F.pad(x, (0, 0, 0, 0, 0, pages * page - length)).view(pages, page, kv_heads, size)
        cache[side, order] = padded
    for last, queries in itertools.product((1, 15, 16, 17, 128, 129, 192, 193, 1000, 2999, 3000), (1, 7, 100)):
        queries = min(queries, last)
        decoded = functions.flash_attn_varlen_func(
            q[last - queries : last],
            cache[0],
            cache[1],
            max_seqlen_q=max(queries, fewest_queries(size)),
            cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32, device=device),
            max_seqlen_k=last,
            seqused_k=torch.tensor([last], dtype=torch.int32, device=device),
            block_table=order[None].to(torch.int32),
            softmax_scale=size**-0.5,
            causal=True,
            num_splits=1,
            fa_version=3,
        )
        assert torch.equal(decoded, out[last - queries : last]), (last, queries)
