"""Parity spec: what is swapped, what the layers refuse, positions of packed sequences."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from jetrl_megatron import JETRL_FP8
from jetrl_megatron.layers import (
    JetRLFlashAttention,
    JetRLOutputLayer,
    JetRLRMSNorm,
    JetRLSelfAttention,
    use_parity_head,
)
from jetrl_megatron.layers.attention import _packing, _positions
from jetrl_megatron.spec import jetrl_spec
from tests.unit.test_spec import TOKENS, config

pytestmark = pytest.mark.usefixtures("megatron")


def model(parity: bool, **changes) -> GPTModel:
    settings = config(qk_layernorm=True, **changes)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
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


def packed(starts: list[int], longest: int, **more) -> PackedSeqParams:
    cu = torch.tensor(starts, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, **more)


def test_positions_start_anew_in_each_sequence_exact():
    assert _positions(9, 1, packed([0, 4, 5, 9], 4), torch.device("cpu")).tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3]
    padded = packed([0, 3, 6], 4, cu_seqlens_q_padded=torch.tensor([0, 4, 8], dtype=torch.int32))
    assert _positions(8, 1, padded, torch.device("cpu")).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    # [s, b] flattened: the batch is the inner axis.
    assert _positions(6, 2, None, torch.device("cpu")).tolist() == [0, 0, 1, 1, 2, 2]


def test_packing_knows_equal_lengths():
    assert _packing(packed([0, 4, 8], 4), 8).equal
    assert not _packing(packed([0, 4, 5, 9], 4), 9).equal
    with pytest.raises(ValueError, match="qkv_format='sbhd'"):
        _packing(PackedSeqParams(qkv_format="sbhd"), 8)
