"""A vLLM engine in a process of its own that generates and takes weight updates, one command after the other.

`LiveEngine` is the handle, for a process that trains meanwhile. It starts this module's `main` with an `EngineRequest`,
whose batches are not read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.convert.stored import read_config
from jetrl_megatron.recipe import VLLM_CONFIG_KEY, Fp8BlockRecipe
from jetrl_megatron.sync import receive_update
from jetrl_megatron.verify.engine import engine_arguments, engine_environment, require_plugin, sequences_of
from jetrl_megatron.verify.requests import EngineRequest
from jetrl_megatron.verify.rollouts import ScoredSequence

# What torchrun tells a trainer is nothing for vLLM's own process groups, and what Megatron wants of CUDA slows it down.
_OF_TRAINER = ("TORCHELASTIC", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "CUDA_DEVICE_MAX_CONN")
_LOG_CHARACTERS = 3000

_CAPTURED = (8, 32, 128, 256)
"""Sequences at once for which CUDA graphs are captured; few, since DeepGEMM compiles for each. The last is the most."""
_TOKENS_OF_A_STEP = 8192
_LENGTH_STEP = 128
_FREE_SHARE = 0.03
_SECONDS_TO_END = 30.0


def live_request(
    checkpoint: Path,
    *,
    recipe: Fp8BlockRecipe,
    mode: str,
    sequences: int,
    longest: int,
    tensor_parallel: int = 1,
    kv_cache_gib: float = 8.0,
) -> EngineRequest:
    """How to start an engine beside a trainer, on its GPUs or its CPU.

    Args:
        checkpoint: folder in Hugging Face format; updates replace its weights.
        recipe: of the updates.
        mode: as for `EngineRequest`.
        sequences: how many are generated at once, if there is room.
        longest: tokens of the longest one, prompt and output.
        tensor_parallel: ranks.
        kv_cache_gib: memory of each GPU for keys and values. A size, not a share of what is free: others on the same
            GPU take and free memory meanwhile, which vLLM's own measurement does not survive.
    """
    cuda, sequences = torch.cuda.is_available(), min(sequences, _CAPTURED[-1])
    arguments: dict[str, Any] = {
        # Baselines are started without the recipe's arguments, and weight sync wants to know the recipe.
        "additional_config": {VLLM_CONFIG_KEY: recipe.to_stamp()},
        "max_model_len": longest + 1,
        "max_num_seqs": sequences,
    }
    if cuda:
        # vLLM's cache of compiled graphs goes by this length too, and runs differ in their longest prompt.
        rounded = -(-arguments["max_model_len"] // _LENGTH_STEP) * _LENGTH_STEP
        most = read_config(checkpoint).get("max_position_embeddings", rounded)
        arguments["max_model_len"] = max(min(rounded, most), arguments["max_model_len"])
        captured = [size for size in _CAPTURED if size < sequences] + [sequences]
        arguments["compilation_config"] = {"cudagraph_capture_sizes": captured}
        arguments["max_num_batched_tokens"] = max(_TOKENS_OF_A_STEP, sequences)
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        # What must be free at the start, besides.
        arguments["gpu_memory_utilization"] = _FREE_SHARE
    else:
        arguments["max_num_batched_tokens"] = longest + sequences
    return EngineRequest(
        checkpoint=str(checkpoint),
        recipe=recipe.to_dict(),
        mode=mode,
        cuda=cuda,
        tensor_parallel=tensor_parallel,
        engine_args=arguments,
        # The engine of one rank needs no process beside this one's own, which is there for it alone.
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if tensor_parallel == 1 else {},
    )


class EngineError(RuntimeError):
    """A command failed in the engine, or the engine ended; the message names its log."""


class LiveEngine:
    """A running engine. It ends with this process, however that ends.

    Args:
        request: how to start it.
        log: file for its output, which is appended to.

    Raises:
        EngineError: it did not start.
    """

    def __init__(self, request: EngineRequest, log: Path) -> None:
        self._log = log
        self._connection, theirs = Pipe()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TRAINER)}
        command = [sys.executable, "-m", "jetrl_megatron.verify.live_engine", str(theirs.fileno())]
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps(dataclasses.asdict(request))],
                pass_fds=[theirs.fileno()],
                env={**inherited, **engine_environment(request)},
                stdout=output,
                stderr=output,
            )
        theirs.close()
        self._wait()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        ignore_eos: bool = False,
    ) -> list[ScoredSequence]:
        """Answers each prompt up to the model's end-of-sequence token; the i-th is drawn with seed + i.

        Args:
            ignore_eos: go on behind that token, up to `max_tokens`.

        Raises:
            EngineError: it failed.
        """
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_eos}
        self._send("generate", [list(prompt) for prompt in prompts], seed, sampling)
        return [ScoredSequence(*fields) for fields in self._wait()]

    def start_receiving(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Starts `receive_update`; call `JetRLWeightSynchronizer.update` next, and then `received`."""
        self._send("receive", list(endpoints))

    def received(self) -> int:
        """The version that the engine serves, once the update that was started has come to its end.

        Raises:
            EngineError: the update failed; the engine serves what it served before.
        """
        version: int = self._wait()
        return version

    def close(self) -> None:
        """Ends it."""
        self._connection.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            # It has nothing left to say, and its memory is wanted.
            self._process.kill()
            self._process.wait()

    def _send(self, *command: Any) -> None:
        try:
            self._connection.send(command)
        except BrokenPipeError:
            raise self._ended() from None

    def _wait(self) -> Any:
        try:
            failure, value = self._connection.recv()
        except EOFError:
            raise self._ended() from None
        if failure:
            raise EngineError(f"{failure}; the engine's log is {self._log}")
        return value

    def _ended(self) -> EngineError:
        tail = self._log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        return EngineError(f"the engine ended; {self._log} ends:\n{tail}")


def _generate(llm: Any, prompts: list[list[int]], seed: int, sampling: dict[str, Any]) -> list[tuple[Any, ...]]:
    from vllm import SamplingParams

    # Without a tokenizer vLLM does not know where a sequence ends.
    end = getattr(llm.llm_engine.model_config.hf_config, "eos_token_id", None)
    ends = [] if end is None or sampling["ignore_eos"] else end if isinstance(end, list) else [end]
    shared = {**sampling, "stop_token_ids": ends, "logprobs": 0, "flat_logprobs": True, "detokenize": False}
    parameters = [SamplingParams(seed=seed + index, **shared) for index in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    return [(s.prompt, s.output, list(s.logprobs)) for s in sequences_of(llm, outputs, prefill=False)]


def main() -> None:
    """Command line: file descriptor of the connection, and the request as JSON."""
    connection = Connection(int(sys.argv[1]))
    request = EngineRequest.from_dict(json.loads(sys.argv[2]))
    if request.mode == "parity":
        require_plugin()
    from vllm import LLM

    llm = LLM(**engine_arguments(request))
    commands: dict[str, Callable[..., Any]] = {
        "generate": lambda *arguments: _generate(llm, *arguments),
        "receive": lambda endpoints: receive_update(llm, endpoints),
    }
    connection.send((None, None))
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, commands[name](*arguments)))
        except Exception as error:
            # Whatever it is, the other end has to hear of it.
            connection.send((f"{type(error).__name__}: {error}", None))


if __name__ == "__main__":
    main()
