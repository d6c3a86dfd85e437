"""A BF16 Hugging Face folder becomes the block FP8 folder that its training would export, without a training run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from jetrl_megatron.convert.fp8_weights import is_decoder_linear, iter_fp8_weights
from jetrl_megatron.convert.hf_model import open_hf_model
from jetrl_megatron.convert.mapping import HfMapping, LogicalMatrix
from jetrl_megatron.convert.plan import plan_export
from jetrl_megatron.convert.stored import tensor_files
from jetrl_megatron.convert.writer import check_out, export_config, write_export
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe


def export_hf_folder(hf_model: Path, out: Path, recipe: Fp8BlockRecipe = JETRL_FP8) -> Path:
    """Quantises a Hugging Face folder with the function that training quantises with.

    Args:
        hf_model: folder with config.json and BF16 safetensors.
        out: folder to make; it appears when it is complete.
        recipe: how to quantise, and which linears stay BF16.

    Returns:
        `out`.

    Raises:
        ValueError: a file is missing or damaged, or the architecture is not supported. Nothing is left behind.
    """
    check_out(out, force=False)
    hf = open_hf_model(hf_model)
    mapping = HfMapping(hf)
    files = tensor_files(hf_model)
    modules = {mapping.from_hf(name, torch.empty(hf.shapes[name], device="meta")).module for name in files}
    plan = plan_export(hf, mapping, filter(is_decoder_linear, modules), recipe)

    def matrices() -> Iterator[LogicalMatrix]:
        for name, path in files.items():
            with safe_open(path, framework="pt") as file:
                yield mapping.from_hf(name, file.get_tensor(name))

    return write_export(
        iter_fp8_weights(mapping.without_tied_head(matrices()), recipe, mapping.num_layers),
        out,
        plan=plan,
        config=export_config(hf, recipe, plan),
        files=hf.files(None),
    )
