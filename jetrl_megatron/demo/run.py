"""The driver of `jetrl demo`: starts the phases one after the other, each in processes of its own, and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from jetrl_megatron.demo.data import fitting_examples
from jetrl_megatron.demo.options import DemoFolder, DemoOptions, layout_label
from jetrl_megatron.demo.report import QUESTION, DemoReport
from jetrl_megatron.demo.rollout import RolloutRequest
from jetrl_megatron.demo.scales import Comparison, Matrices, compare, join_layers, read_checkpoint
from jetrl_megatron.demo.smollm import write_smollm
from jetrl_megatron.recipe import JETRL_FP8
from jetrl_megatron.verify.child import run_child
from jetrl_megatron.verify.environment import megatron_command, megatron_environment, versions
from jetrl_megatron.verify.logprobs import LogProbs

_RESCORING_RANKS = 2
_CHAT_TOKENS = 24
_PAIRINGS = {
    "fp8_train_fp8_rollout": ("fp8", "fp8_tp1"),
    "bf16_train_fp8_rollout": ("bf16", "fp8_tp1"),
    "bf16_train_bf16_rollout": ("bf16", "bf16_tp1"),
    "fp8_train_fp8_tp2_rollout": ("fp8", "fp8_tp2"),
}
"""Key of the report's PAIRINGS: precision of the training forward, name of the rollout."""


def run_demo(options: DemoOptions, out: Path) -> DemoReport:
    """Runs the demo from the model's weights to the report.

    Args:
        out: folder for everything that is written.

    Returns:
        the report, which is also in `out` as report.json, report.md and report.png.

    Raises:
        ValueError: `out` holds something that is no demo output.
        ChildError: a phase failed.
    """
    folder = DemoFolder.create(out, options)
    seconds: dict[str, float] = {}
    with _timed(seconds, "import"):
        write_smollm(folder.model)
    with _timed(seconds, "train"):
        _megatron("train", folder, options.tp * options.pp)
    prompts = [example.prompt for example in fitting_examples(options.prompts, options.seed + 1, folder)]
    for rollout in rollouts(folder, options, prompts):
        with _timed(seconds, f"rollout {rollout.name}"):
            rollout.run(folder)
    with _timed(seconds, "rescore"):
        _megatron("rescore", folder, _RESCORING_RANKS)
    with _timed(seconds, "compare"):
        report = collect(folder, options, seconds)
    report = dataclasses.replace(report, seconds=seconds)
    report.write(folder.root)
    return report


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
    if not sys.stderr.isatty():
        print(f"{phase}: {seconds[phase]:.0f} s", file=sys.stderr, flush=True)


def _megatron(task: str, folder: DemoFolder, ranks: int) -> None:
    command = megatron_command("jetrl_megatron.demo.worker", [task, str(folder.root)], ranks)
    run_child(task, command, folder.logs / f"{task}.log", megatron_environment(ranks, cuda=False))


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One vLLM engine's work."""

    name: str
    request: RolloutRequest

    def run(self, folder: DemoFolder) -> None:
        """Writes the request, and has the engine write the result beside it."""
        request, result = folder.rollout_request(self.name), folder.rollout_result(self.name)
        request.write_text(json.dumps(dataclasses.asdict(self.request)))
        command = [sys.executable, "-m", "jetrl_megatron.demo.rollout", str(request), str(result)]
        run_child(f"rollout {self.name}", command, folder.logs / f"rollout_{self.name}.log", {})


def rollouts(folder: DemoFolder, options: DemoOptions, prompts: list[tuple[int, ...]]) -> list[Rollout]:
    """The engines to run: FP8 with one and two ranks, BF16 with one; same prompts, same seeds."""
    shared: dict[str, Any] = {
        "prompts": tuple(prompts),
        "max_tokens": options.new_tokens,
        # Answers are short; what the model goes on to say is as good for a comparison.
        "ignore_eos": True,
        "seed": options.seed,
        "chat_max_tokens": _CHAT_TOKENS,
    }
    fp8 = {"checkpoint": str(folder.fp8), **shared}
    return [
        Rollout("fp8_tp1", RolloutRequest(**fp8, chat=(QUESTION,), fp8_weights=str(folder.engine_scales("vllm_tp1")))),
        Rollout(
            "fp8_tp2",
            RolloutRequest(
                # Fewer tokens: this engine is there for the weights that its ranks hold.
                **{**fp8, "max_tokens": max(1, options.new_tokens // 2)},
                tensor_parallel_size=2,
                fp8_weights=str(folder.engine_scales("vllm_tp2")),
            ),
        ),
        Rollout("bf16_tp1", RolloutRequest(checkpoint=str(folder.bf16), **shared, chat=(QUESTION,))),
    ]


def collect(folder: DemoFolder, options: DemoOptions, seconds: dict[str, float]) -> DemoReport:
    """Reads what the phases wrote."""
    results = {name: json.loads(folder.rollout_result(name).read_text()) for name in ("fp8_tp1", "fp8_tp2", "bf16_tp1")}
    rescored = {precision: json.loads(folder.rescored(precision).read_text()) for precision in ("fp8", "bf16")}
    logprobs = {
        pairing: LogProbs.of(
            [sequence["logprobs"] for sequence in results[rollout]["sequences"]], rescored[precision][rollout]
        )
        for pairing, (precision, rollout) in _PAIRINGS.items()
    }
    return DemoReport(
        options=options.to_dict(),
        recipe=JETRL_FP8,
        versions=versions(),
        loss=json.loads(folder.losses.read_text()),
        scales=compare_scales(folder, options),
        logprobs=logprobs,
        answers={"fp8": results["fp8_tp1"]["answers"][0], "bf16": results["bf16_tp1"]["answers"][0]},
        seconds=seconds,
    )


def compare_scales(folder: DemoFolder, options: DemoOptions) -> dict[str, Comparison]:
    """Compares codes and scales along the way from training to the engines, and across layouts."""
    training = f"training_{layout_label(options.tp, options.pp)}"
    pairs = [
        (training, "export"),
        ("export", "vllm_tp1"),
        ("export", "vllm_tp2"),
        (training, "tp1"),
        ("tp1", "tp2"),
        ("tp1", "pp2"),
    ]
    matrices = {name: _matrices(folder, name) for name in {name for pair in pairs for name in pair}}
    return {f"{left}/{right}": compare(matrices[left], matrices[right]) for left, right in pairs}


def _matrices(folder: DemoFolder, name: str) -> Matrices:
    if name == "export":
        return read_checkpoint(folder.fp8)
    if folder.engine_scales(name).is_file():
        return load_file(folder.engine_scales(name))
    return join_layers(folder.layer_scales(name))
