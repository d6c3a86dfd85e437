"""Loss curves of one short training run in three forms: BF16, FP8 with Megatron's operators, FP8 with parity operators.

A random model with q/k norm memorises a few random sequences with Megatron's Adam; each form starts from the same
weights and sees the same batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Run, start
from benchmarks.megatron_state import one_rank
from benchmarks.random_models import RandomModel
from jetrl_megatron import JETRL_FP8

MODEL = RandomModel(family="qwen3", hidden=1024, intermediate=3072, heads=8, kv_heads=4, layers=8)
TINY = RandomModel(family="qwen3", hidden=256, intermediate=256, heads=2, kv_heads=1, layers=1, vocabulary=256)
FORMS: dict[str, dict[str, Any]] = {
    "bf16_megatron": {},
    "jetrl": {"recipe": JETRL_FP8},
    "jetrl_parity": {"recipe": JETRL_FP8, "parity": True},
}
SEQUENCES, LENGTH, LEARNING_RATE = 16, 512, 3e-4


def main() -> None:
    """Trains each form and writes the loss of every step."""
    run = start(
        "bench_training",
        "Loss with and without parity operators.",
        ("--steps", {"type": int, "default": 100, "help": "optimizer steps"}),
        ("--forms", {"default": ",".join(FORMS), "help": f"comma-separated, of {', '.join(FORMS)}"}),
    )
    forms, steps, model = run.options.forms.split(","), run.options.steps, MODEL
    if run.dry:
        # Parity operators need a GPU.
        forms, steps, model = ["bf16_megatron", "jetrl"], 2, TINY
    with tempfile.TemporaryDirectory() as folder, one_rank(run.device):
        path = model.write(Path(folder) / "model")
        losses = {form: train(run, path, FORMS[form], steps) for form in forms}
    for form, curve in losses.items():
        for step, loss in enumerate(curve):
            last = step == len(curve) - 1
            peer = "bf16_megatron" if form != "bf16_megatron" and "bf16_megatron" in losses else None
            ratio = None if peer is None else losses[peer][step] / loss
            run.add(None, f"step {step + 1}", step + 1, f"{form}/loss", loss, "nats", peer=peer, ratio=ratio, show=last)
    run.write()


def train(run: Run, path: Path, options: dict[str, Any], steps: int) -> list[float]:
    """Mean loss of each step."""
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

    from jetrl_megatron.integrations.megatron_bridge import build_model
    from jetrl_megatron.verify.forward import forward_arguments
    from jetrl_megatron.verify.model import gpt_model, make_optimizer

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = build_model(path, ddp=ddp, **options)
    optimizer, curve = make_optimizer(model, LEARNING_RATE), []
    batches = sequences(gpt_model(model).vocab_size, 64 if run.dry else LENGTH)
    packs = "parity" in options
    for step in range(steps):
        for module in model:
            module.zero_grad_buffer()
        # Megatron's local attention takes one sequence at a time: the gradient is the mean over the same sequences.
        batch = [batches[(4 * step + i) % SEQUENCES] for i in range(1 if run.dry else 4)]
        losses = []
        for members in [batch] if packs else [[ids_S] for ids_S in batch]:
            arguments = forward_arguments(gpt_model(model), members)
            labels = torch.cat([ids_S.roll(-1) for ids_S in members]).to(run.device)[None]
            loss = model[0](**arguments, labels=labels).float().mean()
            (loss if packs else loss / len(batch)).backward()
            losses.append(float(loss.detach()))
        finalize_model_grads(model)
        optimizer.step()
        curve.append(sum(losses) / len(losses))
    return curve


def sequences(vocabulary: int, length: int) -> Sequence[torch.Tensor]:
    """Random token ids, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(min(vocabulary, 4096), (SEQUENCES, length), generator=generator))


if __name__ == "__main__":
    main()
