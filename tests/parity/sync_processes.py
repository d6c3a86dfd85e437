"""The processes of test_weight_sync.py, driven over a connection: a trainer of two Megatron ranks, and vLLM engines.

`python -m tests.parity.sync_processes PIPE ROLE ...` answers commands, see `benchmarks.processes`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.processes import answer, answer_on_all_ranks, connection_of
from jetrl_megatron.verify.environment import cpu_engine_environment

PROMPTS = tuple(tuple(range(3 + index, 30 + 3 * index, 2)) for index in range(4))
TOKENS = 6


# Engines


def start_engine(folder: str, ranks: int) -> Any:
    from vllm import LLM

    experts = json.loads((Path(folder) / "config.json").read_text()).get("num_experts")

    return LLM(
        folder,
        tensor_parallel_size=ranks,
        enable_expert_parallel=bool(experts) and ranks > 1,
        worker_extension_cls="tests.parity.sync_processes.TestedWorker",
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=64,
        enable_chunked_prefill=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


def score(llm: Any) -> dict[str, Any]:
    """Greedy tokens with their log-probs, and log-probs of the prompts."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0, flat_logprobs=True,
        detokenize=False,
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], parameters, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [list(output.outputs[0].logprobs.logprobs) for output in outputs],
        "prompt": [list(output.prompt_logprobs.logprobs)[1:] for output in outputs],
    }


def begin(llm: Any, steps: int) -> None:
    """Starts requests, which go on when the engine is used next."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=3 * TOKENS, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, parameters)
    for _ in range(steps):
        llm.llm_engine.step()


def finish(llm: Any, steps: int) -> list[tuple[list[int], list[int]]]:
    """Ends them; each one's later tokens, and those that follow the same earlier ones now."""
    from vllm import SamplingParams

    tokens: dict[str, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    ended = [tokens[str(index)] for index in range(len(PROMPTS))]
    prompts = [{"prompt_token_ids": [*prompt, *each[:steps]]} for prompt, each in zip(PROMPTS, ended, strict=True)]
    parameters = SamplingParams(temperature=0.0, max_tokens=3 * TOKENS - steps, ignore_eos=True, detokenize=False)
    anew = llm.generate(prompts, parameters, use_tqdm=False)
    pairs = zip(ended, anew, strict=True)
    return [(each[steps:], list(output.outputs[0].token_ids)) for each, output in pairs]


def serve_engine(connection: Connection, folder: str, ranks: int) -> None:
    from jetrl_megatron.sync import receive_update, weight_version

    llm = start_engine(folder, ranks)
    commands = {
        "receive": lambda endpoints, timeout: receive_update(llm, endpoints, timeout),
        "version": lambda: weight_version(llm),
        "score": lambda: score(llm),
        "begin": lambda steps: begin(llm, steps),
        "finish": lambda steps: finish(llm, steps),
        "pieces": lambda out: llm.collective_rpc("jetrl_write_pieces", args=(out,)) and None,
        "others": lambda out: llm.collective_rpc("jetrl_write_others", args=(out,)) and None,
        "delay": lambda seconds: llm.collective_rpc("jetrl_delay_writes", args=(seconds,)) and None,
        "pointers": lambda: llm.collective_rpc("jetrl_pointers"),
    }
    answer(connection, commands)


def serve_fresh(connection: Connection) -> None:
    """Engines that are started anew for each command; vLLM is imported once."""
    importlib.import_module("vllm")

    def fresh(folder: str, ranks: int) -> dict[str, Any]:
        def run() -> None:
            os.environ.update(cpu_engine_environment(ranks))
            theirs.send(score(start_engine(folder, ranks)))

        context = get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=run)
        process.start()
        theirs.close()
        result: dict[str, Any] = ours.recv()
        process.join()
        return result

    answer(connection, {"fresh": fresh})


if "vllm" in sys.modules:
    from jetrl_megatron.sync.receiver import WeightReceiver
    from jetrl_megatron.verify.loaded_weights import LoadedWeights

    class TestedWorker(WeightReceiver, LoadedWeights):
        """Receives updates, and shows what it holds."""

        def jetrl_write_others(self, folder: str) -> None:
            """Writes this rank's BF16 parameters to a file of its own."""
            held = {
                name: parameter.data.clone()
                for name, parameter in self.model_runner.get_model().named_parameters()
                if parameter.dtype == torch.bfloat16 and parameter.numel()
            }
            save_file(held, Path(folder) / f"others{self.rank}.safetensors")

        def jetrl_pointers(self) -> dict[str, int]:
            """Where the parameters are."""
            return {name: p.data_ptr() for name, p in self.model_runner.get_model().named_parameters()}

        def jetrl_delay_writes(self, seconds: float) -> None:
            """Makes the next update's last bucket slow on this worker."""
            weights = self.jetrl_receiver().weights
            assert weights is not None
            write = weights.write

            def slow(index: int, buffer: torch.Tensor) -> None:
                write(index, buffer)
                if index == len(weights.manifest.buckets) - 1:
                    del weights.__dict__["write"]
                    time.sleep(seconds)

            weights.__dict__["write"] = slow


# The trainer


def serve_trainer(connection: Connection | None, hf_folder: str, recipe: str) -> None:
    """One rank; the first has the connection."""
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

    from jetrl_megatron.convert.export import export_vllm_checkpoint
    from jetrl_megatron.integrations.megatron_bridge import build_model
    from jetrl_megatron.recipe import Fp8BlockRecipe
    from jetrl_megatron.sync import JetRLWeightSynchronizer
    from jetrl_megatron.sync.megatron_source import MegatronSource
    from jetrl_megatron.verify.forward import forward_arguments
    from jetrl_megatron.verify.model import gpt_model, initialize_groups, make_optimizer

    initialize_groups(2, 1)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = build_model(
        hf_folder,
        tensor_parallel=2,
        sequence_parallel=True,
        recipe=Fp8BlockRecipe.from_dict(json.loads(recipe)),
        ddp=ddp,
    )
    optimizer = make_optimizer(model, 2e-3)
    source = MegatronSource(model, hf_config=hf_folder)
    synchronizers: dict[str, JetRLWeightSynchronizer] = {}

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        tokens_S = torch.randint(300, (32,), generator=generator)
        for module in model:
            module.zero_grad_buffer()
        loss = model[0](**forward_arguments(gpt_model(model), [tokens_S]), labels=tokens_S.roll(-1)[None])
        loss.float().mean().backward()
        finalize_model_grads(model)
        optimizer.step()
        return float(loss.detach().float().mean())

    def listen(name: str, **options: Any) -> list[dict[str, Any]]:
        synchronizers[name] = JetRLWeightSynchronizer(source, **options)
        return synchronizers[name].endpoints

    def export(out: str) -> None:
        export_vllm_checkpoint(model, out, hf_config=hf_folder)

    def send(name: str) -> tuple[int, float, int]:
        report = synchronizers[name].update()
        return report.version, report.seconds, report.buckets

    answer_on_all_ranks(connection, {"step": step, "listen": listen, "export": export, "send": send})


def _rank(rank: int, connection: Connection | None, hf_folder: str, recipe: str, rendezvous: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    serve_trainer(connection, hf_folder, recipe)


def main(pipe: str, role: str, *arguments: str) -> None:
    if role == "engine":
        serve_engine(connection_of(pipe), arguments[0], int(arguments[1]))
    elif role == "fresh":
        serve_fresh(connection_of(pipe))
    else:
        from jetrl_megatron.integrations import megatron_cpu

        megatron_cpu.install()
        context = get_context("fork")
        connection = connection_of(pipe)
        ranks = [
            context.Process(target=_rank, args=(rank, None if rank else connection, *arguments), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        connection.close()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
