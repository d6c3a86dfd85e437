"""Parity spec: what is swapped, what the layers refuse, positions of packed sequences."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from benchmarks.common import relative_error
from jetrl_megatron import JETRL_FP8
from jetrl_megatron.layers import (
    JetRLFlashAttention,
    JetRLOutputLayer,
    JetRLRMSNorm,
    JetRLSelfAttention,
    use_parity_head,
)
from jetrl_megatron.layers.attention import _packing, _positions
from jetrl_megatron.spec import jetrl_spec, parity_block_spec
from tests.unit.test_spec import TOKENS, config

pytestmark = pytest.mark.usefixtures("megatron")


def model(parity: bool, *, qk_layernorm: bool = True, **changes) -> GPTModel:
    settings = config(qk_layernorm=qk_layernorm, **changes)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm)
    built = GPTModel(
        settings,
        jetrl_spec(spec, JETRL_FP8, parity=parity),
        vocab_size=128,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return use_parity_head(built) if parity else built


def test_parity_spec_swaps_every_operator_and_keeps_the_state_dict():
    parity, plain = model(True), model(False)
    kinds = {type(module).__name__ for module in parity.modules()}
    assert {"JetRLRMSNorm", "JetRLFlashAttention", "JetRLSelfAttention", "JetRLOutputLayer", "JetRLMLP"} <= kinds
    assert not kinds & {"SelfAttention", "DotProductAttention", "RMSNorm", "WrappedTorchNorm", "ColumnParallelLinear"}
    layer = parity.decoder.layers[0]
    norms = layer.input_layernorm, layer.pre_mlp_layernorm, layer.self_attention.q_layernorm
    assert all(isinstance(norm, JetRLRMSNorm) for norm in (*norms, parity.decoder.final_layernorm))
    assert isinstance(layer.self_attention, JetRLSelfAttention)
    assert isinstance(layer.self_attention.core_attention, JetRLFlashAttention)
    tensors = {name for name, value in plain.state_dict().items() if isinstance(value, torch.Tensor)}
    assert {name for name, value in parity.state_dict().items() if isinstance(value, torch.Tensor)} == tensors


def test_parity_block_spec_brings_a_final_norm_that_takes_sequence_parallelism():
    settings = config(qk_layernorm=True)
    spec = parity_block_spec(settings, get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True))
    assert len(spec.layer_specs) == settings.num_layers
    settings.sequence_parallel = True
    norm = spec.layer_norm(config=settings, hidden_size=settings.hidden_size, eps=settings.layernorm_epsilon)
    assert isinstance(norm, JetRLRMSNorm) and norm.weight.sequence_parallel
    assert parity_block_spec(settings, spec).layer_norm is JetRLRMSNorm


def test_use_parity_head_keeps_parameters_and_is_idempotent():
    plain = model(False)
    before = {name: id(parameter) for name, parameter in plain.named_parameters()}
    assert use_parity_head(use_parity_head(plain)) is plain
    assert {name: id(parameter) for name, parameter in plain.named_parameters()} == before
    assert isinstance(plain.output_layer, JetRLOutputLayer)


def test_use_parity_head_refuses_a_bias():
    plain = model(False)
    plain.output_layer.bias = torch.nn.Parameter(torch.zeros(128))
    with pytest.raises(ValueError, match="bias=True: the parity output layer takes the place"):
        use_parity_head(plain)


def test_use_parity_head_keeps_the_hooks_of_the_norm():
    # DistributedDataParallel hangs the gathering of parameters on every module, and takes it off by module.
    plain, called = model(False), []
    norm = plain.decoder.final_layernorm
    norm.register_forward_pre_hook(lambda *_: called.append(True))
    use_parity_head(plain)
    assert plain.decoder.final_layernorm is norm and isinstance(norm, JetRLRMSNorm)
    assert norm.eps == plain.config.layernorm_epsilon
    norm(torch.ones(2, 256).bfloat16())
    assert called


def parity_output_layer(monkeypatch):
    """The output layer with plain torch's product."""
    home = "jetrl_megatron.layers.output_layer"
    monkeypatch.setattr(f"{home}.row_invariant_refusal", lambda _: None)
    monkeypatch.setattr(f"{home}.row_invariant_linear", torch.nn.functional.linear)
    return model(True).output_layer


def test_output_layer_frozen_weight_with_fused_gradients_exact(monkeypatch):
    layer = parity_output_layer(monkeypatch)
    layer.weight.requires_grad_(False)
    layer.gradient_accumulation_fusion = True
    x, dy = torch.randn(3, 1, 256).bfloat16().requires_grad_(), torch.randn(3, 1, 128).bfloat16()
    layer(x)[0].backward(dy)
    assert torch.equal(x.grad, dy @ layer.weight) and layer.weight.grad is None


def test_output_layer_gradient_is_megatrons_exact(monkeypatch):
    layer, plain = parity_output_layer(monkeypatch), model(False).output_layer
    plain.load_state_dict(layer.state_dict())
    x, dy = torch.randn(3, 2, 256).bfloat16(), torch.randn(3, 2, 128).bfloat16()
    found = []
    for each in (layer, plain):
        input = x.clone().requires_grad_()
        y = each(input)[0]
        y.backward(dy)
        found.append((y.detach(), input.grad, each.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    _, dx, dweight = found[0]
    assert relative_error(dx, dy.double() @ layer.weight.detach().double()) < 4e-3
    assert relative_error(dweight, dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)) < 4e-3


def test_output_layer_refuses_sharded_weights(monkeypatch):
    layer = parity_output_layer(monkeypatch)
    layer.gtp_remat_size = 2
    with pytest.raises(ValueError, match="gtp_remat_size=2"):
        layer(torch.zeros(3, 1, 256).bfloat16())


def test_parity_spec_of_the_hybrid_stack():
    spec = jetrl_spec(hybrid_stack_spec, JETRL_FP8, parity=True)
    attention = spec.submodules.attention_layer.submodules.self_attention
    assert attention.module is JetRLSelfAttention
    assert attention.submodules.core_attention is JetRLFlashAttention


def test_parity_forward_on_a_cpu_says_what_it_needs():
    built = model(True)
    with pytest.raises(ValueError, match="parity attention cannot run: it needs a Hopper GPU, not cpu"):
        built(TOKENS, torch.arange(12).expand(2, 12), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"window_size": (64, 0)}, "window_size="),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling=True"),
        ({"layernorm_zero_centered_gamma": True}, "Gemma's norm"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
        ({"mrope_section": [8, 12, 12]}, "mrope_section="),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
    ],
)
def test_parity_layers_refuse_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        model(True, **changes)


def test_norm_refuses_layer_norm():
    with pytest.raises(ValueError, match="normalization='LayerNorm'"):
        JetRLRMSNorm(config(normalization="LayerNorm"), 256)


def test_core_attention_refuses_cross_attention():
    with pytest.raises(ValueError, match="attention_type='cross'"):
        JetRLFlashAttention(config(), 1, AttnMaskType.causal, "cross")


def test_core_attention_refuses_head_sizes_whose_keys_are_summed_in_other_blocks():
    for size, message in (
        (80, "other blocks for pages than for packed sequences at head size 80"),
        (288, "256 .* at most"),
    ):
        with pytest.raises(ValueError, match=f"kv_channels={size}: .*{message}"):
            JetRLFlashAttention(config(kv_channels=size), 1, AttnMaskType.causal, "self")
    for size in (64, 128, 192, 256):
        JetRLFlashAttention(config(kv_channels=size), 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize("mask_type", [AttnMaskType.padding, AttnMaskType.no_mask, AttnMaskType.arbitrary])
def test_core_attention_refuses_other_masks(mask_type):
    with pytest.raises(ValueError, match="parity attention is causal alone"):
        JetRLFlashAttention(config(), 1, mask_type, "self")


def test_core_attention_refuses_a_key_value_cache(monkeypatch):
    monkeypatch.setattr("jetrl_megatron.layers.attention.attention_refusal", lambda _: None)
    core, query, key = JetRLFlashAttention(config(), 1, AttnMaskType.causal, "self"), *torch.zeros(2, 5, 1, 4, 64)
    with pytest.raises(ValueError, match="5 keys for 1 queries"):
        core(query[:1], key, key)


def test_self_attention_refuses_megatrons_inference():
    attention = model(True).decoder.layers[0].self_attention
    with pytest.raises(ValueError, match="generate with the rollout engine"):
        attention(torch.zeros(1, 1, 256).bfloat16(), None, inference_context=object())


def packed(starts: list[int], longest: int, **more) -> PackedSeqParams:
    cu = torch.tensor(starts, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, **more)


def positions(tokens: int, batch: int, packing: PackedSeqParams | None, rows: int = 8) -> list[int]:
    return _positions(tokens, batch, packing, torch.device("cpu"), rows).tolist()


def test_positions_start_anew_in_each_sequence_exact():
    assert positions(9, 1, packed([0, 4, 5, 9], 4)) == [0, 1, 2, 3, 0, 0, 1, 2, 3]
    padded = packed([0, 3, 6], 4, cu_seqlens_q_padded=torch.tensor([0, 4, 8], dtype=torch.int32))
    assert positions(8, 1, padded) == [0, 1, 2, 3, 0, 1, 2, 3]
    # [s, b] flattened: the batch is the inner axis.
    assert positions(6, 2, None) == [0, 0, 1, 1, 2, 2]


def test_positions_of_padding_stay_inside_the_angles():
    # Megatron makes as many angles as `max_seqlen_q` says, which leaves padding out.
    padded = packed([0, 3, 6], 3, cu_seqlens_q_padded=torch.tensor([0, 4, 8], dtype=torch.int32))
    assert positions(12, 1, padded, rows=3) == [0, 1, 2, 2, 0, 1, 2, 2, 0, 1, 2, 2]


def test_packing_goes_by_padded_lengths():
    # Two sequences of 6 and 3 tokens in 8 and 4: 2 * 6 rows as well, but not two sequences of 6.
    padded = packed([0, 6, 9], 6, cu_seqlens_q_padded=torch.tensor([0, 8, 12], dtype=torch.int32))
    packing = _packing(padded, 12)
    assert (packing.starts.tolist(), packing.longest, packing.equal) == ([0, 8, 12], 8, False)
    assert _packing(padded, 12) is packing


def test_packing_tokens_behind_the_last_sequence_are_one_more():
    packing = _packing(packed([0, 3, 6], 3), 11)
    assert (packing.starts.tolist(), packing.longest, packing.equal) == ([0, 3, 6, 11], 5, False)
    with pytest.raises(ValueError, match="holds 6 tokens, and 5 came"):
        _packing(packed([0, 3, 6], 3), 5)


def test_packing_knows_equal_lengths():
    assert _packing(packed([0, 4, 8], 4), 8).equal
    assert not _packing(packed([0, 4, 5, 9], 4), 9).equal
    with pytest.raises(ValueError, match="qkv_format='sbhd'"):
        _packing(PackedSeqParams(qkv_format="sbhd"), 8)


def query_key_value(attention: JetRLSelfAttention, batch: int, packing: PackedSeqParams | None, at_once: bool):
    """Query, key and value of 12 tokens, and the gradients of input and parameters for a random upstream."""
    torch.manual_seed(1)
    x = torch.randn(12 // batch, batch, 256).bfloat16().requires_grad_()
    angles = torch.outer(torch.arange(12).float(), torch.logspace(0, -3, 32))
    attention._angles = torch.cat([angles, angles], -1)[:, None, None, :]
    attention._packed = packing
    attention._splits_at_once = (lambda: True) if at_once else (lambda: False)
    parts = attention.get_query_key_value_tensors(x)
    torch.autograd.backward(parts, [torch.randn(part.shape).bfloat16() for part in parts])
    gradients = {name: parameter.grad for name, parameter in attention.named_parameters()}
    attention.zero_grad()
    return [part.detach() for part in parts], {**gradients, "x": x.grad}


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("batch", "packing"), [(1, None), (3, None), (1, {"starts": [0, 5, 12], "longest": 7})], ids=str
)
def test_query_key_and_value_at_once_are_those_of_the_parts_exact(norm, batch, packing):
    attention = model(True, qk_layernorm=norm).decoder.layers[0].self_attention
    assert attention._splits_at_once()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    cases = (query_key_value(attention, batch, packing and packed(**packing), at_once) for at_once in (True, False))
    (parts, gradients), (expected, expected_gradients) = cases
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    assert [part.shape[2] for part in parts] == [4, 2, 2]
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient is None) == (expected_gradients[name] is None), name
        assert gradient is None or torch.equal(gradient, expected_gradients[name]), name


def test_query_key_and_value_come_from_megatron_where_norms_are_others():
    attention = model(True).decoder.layers[0].self_attention
    for size, at_once in ((120, False), (128, True)):
        attention.hidden_size_per_attention_head = size
        for norm in (attention.q_layernorm, attention.k_layernorm):
            norm.weight = torch.nn.Parameter(torch.ones(size))
        assert attention._splits_at_once() == at_once
    attention.k_layernorm.eps = 1.0
    assert not attention._splits_at_once()
    attention.k_layernorm = torch.nn.RMSNorm(64)
    assert not attention._splits_at_once()


def test_query_key_and_value_at_once_run_the_hooks_of_the_norms():
    # DistributedDataParallel waits in them for the norms' weights.
    attention, called = model(True).decoder.layers[0].self_attention, []
    attention.q_layernorm.register_forward_pre_hook(lambda module, _: called.append(module))
    attention.k_layernorm.register_forward_pre_hook(lambda module, *_: called.append(module), with_kwargs=True)
    query_key_value(attention, 1, None, True)
    assert called == [attention.q_layernorm, attention.k_layernorm]


def test_positions_are_made_once_and_anew_for_other_lengths():
    attention, packing = model(True).decoder.layers[0].self_attention, packed([0, 5, 12], 7)
    angles = torch.zeros(12, 1, 1, 64)
    for attention._packed in (None, packing):
        first = attention._known_positions(angles, 12, 1, 12)
        assert attention._known_positions(angles, 12, 1, 12) is first
        assert first.tolist() == positions(12, 1, attention._packed, rows=12)
    packing.cu_seqlens_q[1] = 3
    assert attention._known_positions(angles, 12, 1, 12).tolist() == [*range(3), *range(9)]
    packing.cu_seqlens_q = torch.tensor([0, 4, 12], dtype=torch.int32)
    packing.cu_seqlens_q[1] = 4
    assert attention._known_positions(angles, 12, 1, 12).tolist() == [*range(4), *range(8)]
    attention._packed = None
    assert attention._known_positions(angles, 6, 2, 12).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
