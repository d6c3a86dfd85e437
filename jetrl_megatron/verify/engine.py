"""A real vLLM engine: `python -m jetrl_megatron.verify.engine REQUEST.json [RESULT.json]`.

A process of its own, because an engine wants its environment set before vLLM is imported, and keeps memory until the
process ends. The request is an `EngineRequest`. Beside RESULT.json, which holds what `serve` returns, the tokens and
log-probs go to RESULT.safetensors.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.verify.environment import (
    cpu_engine_environment,
    gpu_engine_environment,
    request_paths,
    restart_with,
)
from jetrl_megatron.verify.progress import report_progress
from jetrl_megatron.verify.requests import Batch, EngineRequest
from jetrl_megatron.verify.rollouts import Rollout, ScoredSequence, save_rollouts

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

CPU_OPERATOR = "W8A8BlockLinear"
"""Kernel class of the plugin that serves block FP8 linears on a CPU."""

# By name: importing it imports vLLM.
_WORKER_EXTENSION = "jetrl_megatron.verify.worker.DescribedWorker"
_PLUGIN = "jetrl_megatron"
_WARM_UP_TOKENS = 8


def serve(request: EngineRequest) -> tuple[dict[str, Any], dict[str, Rollout]]:
    """Serves a request in this process, whose environment must hold `engine_environment`.

    Returns:
        ready for JSON, "description": the engine as the precision-flow checker reads it, None in mode "bf16";
        "operators": number of FP8 linears of a rank for each kernel class that they run; "start_seconds"; "served": in
        mode "parity" fields of the `ServedPiece`s of all ranks, by the first batch that was generated from them;
        "batches": for each name "sequences", "tokens" (generated), "generate_seconds", "tokens_per_second";
        and the rollout of each batch.

    Raises:
        RuntimeError: the plugin is not installed, or a CPU runs FP8 linears with another operator than the plugin's.
    """
    if request.mode == "parity":
        require_plugin()
    from jetrl_megatron.verify.static_check import describe

    started = time.perf_counter()
    engine = _engine(request)
    parity_on_cpu = request.mode == "parity" and not request.cuda
    operators = checked_operators(engine, CPU_OPERATOR if parity_on_cpu else None)
    result: dict[str, Any] = {
        "operators": operators,
        "description": None if request.mode == "bf16" else describe(engine),
        "start_seconds": time.perf_counter() - started,
        "served": {},
        "batches": {},
    }
    rollouts = {}
    for done, batch in enumerate(request.batches):
        if batch.weights is not None:
            _update(engine, request, Path(batch.weights))
        if request.mode == "parity" and (done == 0 or batch.weights is not None):
            ranks = engine.collective_rpc("jetrl_served_pieces")
            result["served"][batch.name] = [piece for rank in ranks for piece in rank]
        rollouts[batch.name], result["batches"][batch.name] = _run_batch(engine, batch)
        report_progress(done + 1, len(request.batches), batch.name)
    return result, rollouts


def engine_environment(request: EngineRequest) -> dict[str, str]:
    """Variables of the engine's process: the machine's where the caller has set none, the mode's, the request's own."""
    common = gpu_engine_environment() if request.cuda else cpu_engine_environment(request.tensor_parallel)
    common = {name: os.environ.get(name, value) for name, value in common.items()}
    if request.mode != "parity":
        # vLLM as it is without this package, also on a CPU, where the plugin would serve every block FP8 model.
        return {**common, "VLLM_PLUGINS": "", **request.environment}
    assert request.recipe is not None, "the request was checked"
    of_recipe = Fp8BlockRecipe.from_dict(request.recipe).to_vllm_env() if request.cuda else {}
    return {**common, **of_recipe, **request.environment}


def engine_arguments(request: EngineRequest) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`."""
    longest = max((batch.longest for batch in request.batches), default=1)
    sequences = max((len(batch.prompts) or batch.sequences for batch in request.batches), default=1)
    arguments: dict[str, Any] = {
        "model": request.checkpoint,
        "tensor_parallel_size": request.tensor_parallel,
        "worker_extension_cls": _WORKER_EXTENSION,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        # One token more: scoring a whole sequence has to generate one.
        "max_model_len": longest + 1,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not request.cuda:
        arguments |= {
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_seqs": max(1, min(sequences, 64)),
            # Before it serves, the engine runs its largest step, which takes a while with the default of some thousand.
            "max_num_batched_tokens": max(longest + 1, sequences),
            "enable_chunked_prefill": False,
        }
    if request.mode == "parity" and request.cuda:
        assert request.recipe is not None, "the request was checked"
        arguments |= Fp8BlockRecipe.from_dict(request.recipe).to_vllm_engine_args()
    return _merged(arguments, request.engine_args)


def _merged(arguments: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments on top; nested configurations are merged instead of replaced."""
    merged = dict(arguments)
    for name, value in more.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if nested else value
    return merged


def require_plugin() -> None:
    """Checks that vLLM will find the plugin.

    Raises:
        RuntimeError: its entry point is not installed.
    """
    if _PLUGIN not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise RuntimeError(
            "vLLM would not find the plugin jetrl_megatron: its entry point is not installed; run pip install -e . in "
            "the project's folder"
        )


def checked_operators(engine: LLM, operator: str | None) -> dict[str, int]:
    """Number of FP8 linears of a rank for each kernel class that they run.

    Args:
        operator: the one class that may run; None allows any.

    Raises:
        RuntimeError: a rank runs another.
    """
    per_rank: list[dict[str, int]] = engine.collective_rpc("jetrl_fp8_operators")
    for rank, operators in enumerate(per_rank):
        if operator is not None and set(operators) - {operator}:
            raise RuntimeError(
                f"rank {rank} runs FP8 linears with {operators} instead of {operator}: leave VLLM_PLUGINS unset or "
                f"name jetrl_megatron in it, and do not name {operator} in VLLM_DISABLED_KERNELS"
            )
    return per_rank[0]


def sequences_of(engine: LLM, outputs: Sequence[RequestOutput], *, prefill: bool) -> list[ScoredSequence]:
    """Reads what an engine generated with logprobs=0 and flat_logprobs=True.

    Args:
        prefill: also have the engine score each sequence in one prefill.
    """
    sequences = [_sequence(output) for output in outputs]
    return _with_prefill(engine, sequences) if prefill else sequences


def _sequence(output: RequestOutput) -> ScoredSequence:
    completion = output.outputs[0]
    assert output.prompt_token_ids is not None, "prompts were given as token ids"
    recorded: Any = completion.logprobs
    ids = list(completion.token_ids)
    assert recorded.token_ids == ids, "with logprobs=0 an engine records the drawn token alone"
    return ScoredSequence(list(output.prompt_token_ids), ids, recorded.logprobs)


def _with_prefill(engine: LLM, sequences: Sequence[ScoredSequence]) -> list[ScoredSequence]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
    prompts = [{"prompt_token_ids": [*sequence.prompt, *sequence.output]} for sequence in sequences]
    scored = []
    for sequence, output in zip(sequences, engine.generate(prompts, parameters, use_tqdm=False), strict=True):
        recorded: Any = output.prompt_logprobs
        # The first token has none.
        first = len(sequence.prompt) - 1
        assert recorded.token_ids[first:] == sequence.output, "one log-prob for each token behind the first"
        scored.append(sequence._replace(prefill_logprobs=recorded.logprobs[first:]))
    return scored


def _engine(request: EngineRequest) -> LLM:
    from vllm import LLM

    return LLM(**engine_arguments(request))


def _update(engine: LLM, request: EngineRequest, folder: Path) -> None:
    """Gives the engine the weights of another checkpoint of the same model, in place, as a trainer would."""
    if request.mode != "parity":
        engine.collective_rpc("jetrl_load", args=(str(folder),))
        _forget_prompts(engine)
        return
    from safetensors.torch import load_file

    from jetrl_megatron.convert.stored import tensor_files
    from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource, receive_update

    assert request.recipe is not None, "the request was checked"
    tensors = {name: tensor for path in set(tensor_files(folder).values()) for name, tensor in load_file(path).items()}
    source = TensorSource(tensors, Fp8BlockRecipe.from_dict(request.recipe))
    synchronizer = JetRLWeightSynchronizer(source, receivers=request.tensor_parallel)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(synchronizer.update)
        receive_update(engine, synchronizer.endpoints)
        sent.result()
    synchronizer.close()


def _forget_prompts(engine: LLM) -> None:
    """What was computed before must not serve a batch that is timed, nor new weights."""
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache, although no request is under way")


def _run_batch(engine: LLM, batch: Batch) -> tuple[Rollout, dict[str, Any]]:
    from vllm import SamplingParams

    shared: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    shared |= {"logprobs": 0, "flat_logprobs": True}
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in _prompts(engine, batch)]
    # A first step of this size may compile or capture. The batch itself must find no cached prompts.
    warm_up = SamplingParams(max_tokens=min(_WARM_UP_TOKENS, batch.tokens), **shared)
    engine.generate(prompts, warm_up, use_tqdm=False)
    _forget_prompts(engine)
    started = time.perf_counter()
    outputs = engine.generate(prompts, SamplingParams(max_tokens=batch.tokens, **shared), use_tqdm=False)
    seconds = time.perf_counter() - started
    rollout = Rollout.of(sequences_of(engine, outputs, prefill=batch.prefill))
    tokens = len(rollout.logprobs_o)
    figures = {
        "sequences": len(outputs),
        "tokens": tokens,
        "generate_seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }
    return rollout, figures


def _prompts(engine: LLM, batch: Batch) -> list[tuple[int, ...]]:
    if batch.prompts:
        return list(batch.prompts)
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(batch.seed)
    drawn = torch.randint(vocabulary, (batch.sequences, batch.prompt_tokens), generator=generator)
    return [tuple(prompt) for prompt in drawn.tolist()]


def main() -> None:
    """Command line: REQUEST.json, and the path of the result (default: REQUEST.result.json)."""
    request_path, result_path = request_paths("jetrl_megatron.verify.engine")
    request = EngineRequest.from_dict(json.loads(request_path.read_text()))
    restart_with(engine_environment(request))
    result, rollouts = serve(request)
    save_rollouts(rollouts, result_path.with_suffix(".safetensors"))
    result_path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
