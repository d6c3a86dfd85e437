"""Rollout with vLLM on a CPU: `python -m jetrl_megatron.demo.rollout REQUEST.json RESULT.json`.

A process of its own, because an engine wants its environment set before vLLM is imported, and keeps threads and memory
until the process ends. The request holds the fields of `RolloutRequest`; the result is what `serve` returns.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from jetrl_megatron.verify import loaded_weights
from jetrl_megatron.verify.engine import CPU_OPERATOR, checked_operators, require_plugin, sequences_of
from jetrl_megatron.verify.environment import cpu_engine_environment, request_paths, restart_with
from jetrl_megatron.verify.rollouts import ScoredSequence

if TYPE_CHECKING:
    from vllm import LLM

_CHAT_PROMPT_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """What to generate, from which checkpoint.

    Fields:
        checkpoint: folder in Hugging Face format, block FP8 or BF16.
        prompts: token ids of each prompt; repeat a prompt to sample it several times.
        temperature, max_tokens, ignore_eos: as in vLLM's SamplingParams; temperature 0 is greedy.
        seed: prompt i draws with seed + i.
        score: also compute the log-prob of every generated token from a prefill of prompt and output.
        chat: user messages that are answered greedily through the checkpoint's chat template.
        chat_max_tokens: longest answer to one of them.
        fp8_weights: file to write every loaded FP8 linear to, as `loaded_weights.join_pieces` describes.
        tensor_parallel_size: ranks, each a process.

    Raises:
        ValueError: there is nothing to do, or a field is out of range.
    """

    checkpoint: str
    prompts: tuple[tuple[int, ...], ...] = ()
    temperature: float = 1.0
    max_tokens: int = 16
    seed: int = 0
    ignore_eos: bool = False
    score: bool = False
    chat: tuple[str, ...] = ()
    chat_max_tokens: int = 48
    fp8_weights: str | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for field in ("max_tokens", "chat_max_tokens", "tensor_parallel_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be 1 or more")
        if not (self.prompts or self.chat or self.fp8_weights):
            raise ValueError("the request asks for nothing: give prompts, chat or fp8_weights")
        if not all(self.prompts):
            raise ValueError("prompts holds an empty prompt: give at least one token id each")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RolloutRequest:
        """From the JSON form.

        Raises:
            ValueError: a key is no field.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"request fields {unknown} are unknown: use {', '.join(sorted(known))}")
        prompts = tuple(tuple(prompt) for prompt in fields.get("prompts", ()))
        return cls(**{**fields, "prompts": prompts, "chat": tuple(fields.get("chat", ()))})


def serve(request: RolloutRequest) -> dict[str, Any]:
    """Serves a request in this process, whose environment must hold `cpu_engine_environment`.

    Returns:
        What was asked for, ready for JSON:
        "sequences": for each prompt {"prompt", "output": token ids, "logprobs": of the output tokens, from the raw
        logits at temperature 1, "scored_logprobs": the same from a prefill of prompt and output};
        "answers": one text for each chat message;
        "operators": number of FP8 linears of a rank for each vLLM kernel class that they run;
        "start_seconds", "generate_seconds", "tokens_per_second".

    Raises:
        RuntimeError: FP8 linears run, or would run, another operator than the plugin's.
    """
    require_plugin()
    started = time.perf_counter()
    engine = _engine(request)
    operators = checked_operators(engine, CPU_OPERATOR)
    result: dict[str, Any] = {"operators": operators, "start_seconds": time.perf_counter() - started}
    if request.prompts:
        result.update(_generate(engine, request))
    if request.chat:
        result["answers"] = _answers(engine, request)
    if request.fp8_weights:
        _write_weights(engine, Path(request.fp8_weights))
    return result


def _engine(request: RolloutRequest) -> LLM:
    from vllm import LLM

    # One token more: scoring a whole sequence has to generate one.
    longest = max((len(prompt) for prompt in request.prompts), default=0) + request.max_tokens + 1
    conversation = _CHAT_PROMPT_TOKENS + request.chat_max_tokens if request.chat else 0
    return LLM(
        request.checkpoint,
        tensor_parallel_size=request.tensor_parallel_size,
        worker_extension_cls=loaded_weights.WORKER_EXTENSION,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=not request.chat,
        max_model_len=max(longest, conversation),
        max_num_seqs=max(1, min(len(request.prompts), 64)),
        # Before it serves, the engine runs its largest step, which takes a while with the default of some thousand
        # tokens. Prompts are not cut: vLLM then rewinds the seeded generator of a sequence, and a CPU's cannot be.
        max_num_batched_tokens=max(longest, conversation, len(request.prompts)),
        enable_chunked_prefill=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


def _generate(engine: LLM, request: RolloutRequest) -> dict[str, Any]:
    from vllm import SamplingParams

    stop = [] if request.ignore_eos else _end_of_sequence(engine)
    parameters = [
        SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed + index,
            ignore_eos=request.ignore_eos,
            stop_token_ids=stop,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        for index in range(len(request.prompts))
    ]
    started = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": list(ids)} for ids in request.prompts], parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    sequences = [_fields(sequence) for sequence in sequences_of(engine, outputs, prefill=request.score)]
    tokens = sum(len(sequence["output"]) for sequence in sequences)
    return {"sequences": sequences, "generate_seconds": seconds, "tokens_per_second": tokens / seconds}


def _fields(sequence: ScoredSequence) -> dict[str, Any]:
    fields = {"prompt": sequence.prompt, "output": sequence.output, "logprobs": sequence.logprobs}
    return fields if sequence.prefill_logprobs is None else {**fields, "scored_logprobs": sequence.prefill_logprobs}


def _end_of_sequence(engine: LLM) -> list[int]:
    # Without a tokenizer vLLM does not know it.
    eos = getattr(engine.llm_engine.model_config.hf_config, "eos_token_id", None)
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


def _answers(engine: LLM, request: RolloutRequest) -> list[str]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=request.chat_max_tokens)
    conversations = [[{"role": "user", "content": message}] for message in request.chat]
    return [output.outputs[0].text for output in engine.chat(conversations, parameters, use_tqdm=False)]


def _write_weights(engine: LLM, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine.collective_rpc("jetrl_write_pieces", args=(folder,))
        save_file(loaded_weights.join_pieces(Path(folder)), path)


def main() -> None:
    """Command line: REQUEST.json, and the path of the result (default: REQUEST.result.json)."""
    request_path, result_path = request_paths("jetrl_megatron.demo.rollout")
    request = RolloutRequest.from_dict(json.loads(request_path.read_text()))
    environment = cpu_engine_environment(request.tensor_parallel_size)
    restart_with({name: os.environ.get(name, value) for name, value in environment.items()})
    result_path.write_text(json.dumps(serve(request), indent=1))


if __name__ == "__main__":
    main()
