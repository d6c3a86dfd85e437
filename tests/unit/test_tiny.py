from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetrl_megatron.demo.tiny import write_tiny
from jetrl_megatron.recipe import JETRL_FP8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_write_tiny_always_writes_the_same_exact(tiny: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    write_tiny(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    for path in tiny.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
    other = load_file(write_tiny(tmp_path, seed=1) / "model.safetensors")
    assert not torch.equal(other["lm_head.weight"], load_file(tiny / "model.safetensors")["lm_head.weight"])


def test_write_tiny_speaks_in_single_characters(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Ab c!"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", "a", "b", " ", "c", "<unk>", "<assistant>"]
    assert tokenizer.decode(tokenizer.encode("sun nus"), skip_special_tokens=True) == "sun nus"
    assert tokenizer.eos_token_id == AutoModelForCausalLM.from_pretrained(str(tiny)).config.eos_token_id


def test_write_tiny_has_whole_tiles_for_two_ranks(tiny: Path) -> None:
    for name, weight in load_file(tiny / "model.safetensors").items():
        if "proj" in name:
            assert all(size % (2 * JETRL_FP8.block) == 0 for size in weight.shape), name
