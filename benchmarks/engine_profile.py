"""Where the time of an engine's decode steps goes: `python -m benchmarks.engine_profile REQUEST.json PROFILE.txt`.

The request is the verifier's `EngineRequest`; its first batch says how many sequences decode, from where: the middle of
their answers. PROFILE.txt holds the kernels of a few steps by their time on the GPU, and how long a step takes.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.verify.engine import engine_arguments, engine_environment
from jetrl_megatron.verify.environment import restart_with
from jetrl_megatron.verify.requests import EngineRequest

STEPS = 24
LINES = 50
_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def profile(request: EngineRequest) -> str:
    """Runs an engine and returns the table of its kernels."""
    from vllm import LLM, SamplingParams

    batch = request.batches[0]
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        context = batch.prompt_tokens + batch.tokens // 2
        arguments = engine_arguments(request) | {
            "max_model_len": max(batch.longest, context + 3 * STEPS) + 1,
            "profiler_config": {
                "profiler": "torch",
                "torch_profiler_dir": folder,
                "torch_profiler_with_stack": False,
                "torch_profiler_use_gzip": False,
                "ignore_frontend": True,
            },
        }
        engine = LLM(**arguments)
        vocabulary = engine.llm_engine.model_config.get_vocab_size()
        ids = torch.randint(vocabulary, (batch.sequences, context), generator=torch.Generator().manual_seed(batch.seed))
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in ids.tolist()]
        shared: Any = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}

        def seconds(steps: int) -> float:
            started = time.perf_counter()
            engine.generate(prompts, SamplingParams(max_tokens=steps, **shared), use_tqdm=False)
            return time.perf_counter() - started

        # Fills the prefix cache, so that later ones decode alone; two lengths, since a batch costs more than its steps.
        seconds(STEPS)
        step = (seconds(3 * STEPS) - seconds(STEPS)) / (2 * STEPS)
        engine.start_profile()
        seconds(STEPS)
        engine.stop_profile()
        traces = sorted(Path(folder).rglob("*.json"), key=lambda path: path.stat().st_size)
        if not traces:
            raise RuntimeError(f"vLLM's profiler left no trace in {folder}")
        events = json.loads(traces[-1].read_text())["traceEvents"]
    heading = f"{batch.sequences} sequences of {context} tokens, {1000 * step:.2f} ms a step; {STEPS} steps:\n"
    return heading + table([event for event in events if event.get("cat") in _ON_THE_GPU])


def table(events: list[dict[str, Any]]) -> str:
    """Kernels by their share of the time; durations are in microseconds."""
    spent: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for event in events:
        spent[event["name"]] += event["dur"]
        count[event["name"]] += 1
    whole = max(1e-9, sum(spent.values()))
    lines = [f"{whole / 1000:.2f} ms on the GPU in {len(events)} launches"]
    for name, took in spent.most_common(LINES):
        lines.append(f"{100 * took / whole:5.1f} %{count[name]:7d} x{took / count[name]:9.1f} us  {name[:140]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line: REQUEST.json and the path of the table."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.engine_profile REQUEST.json PROFILE.txt")
    request = EngineRequest.from_dict(json.loads(Path(sys.argv[1]).read_text()))
    restart_with(engine_environment(request))
    Path(sys.argv[2]).write_text(profile(request))


if __name__ == "__main__":
    main()
