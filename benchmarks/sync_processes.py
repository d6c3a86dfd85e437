"""The trainer and the engines of bench_sync: `python -m benchmarks.sync_processes PIPE ROLE REQUEST.json`.

The peers of our weight sync use the same connection, buckets and transport. They differ in what they send, BF16, and in
how an engine loads it: through vLLM's own loaders and layerwise reload, quantised before where the engine serves FP8.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processes import answer, answer_on_all_ranks, connection_of
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync import JetRLWeightSynchronizer, TensorSource
from jetrl_megatron.sync.manifest import Manifest, view_of
from jetrl_megatron.sync.receiver import EngineReceiver, WeightReceiver, version_of
from jetrl_megatron.verify.loaded_weights import LoadedWeights
from jetrl_megatron.verify.requests import EngineRequest

PROMPTS = tuple(tuple(range(3 + index, 90 + 3 * index, 2)) for index in range(8))
TOKENS = 32


# The trainer


class Unchecked(TensorSource):
    """Sends what it has."""

    def refresh(self) -> list[str]:
        """Looks at nothing, as the peers do."""
        return []


def serve_trainer(connection: Connection | None, request: dict[str, Any]) -> None:
    """One rank of a trainer with random weights."""
    from jetrl_megatron.convert.bridge import import_bridge
    from jetrl_megatron.convert.hf_model import open_hf_model
    from jetrl_megatron.integrations.megatron_bridge import build_model
    from jetrl_megatron.sync.megatron_source import MegatronSource
    from jetrl_megatron.verify.model import initialize_groups

    cuda = torch.cuda.is_available()
    initialize_groups(request["tensor_parallel"], 1)
    recipe = Fp8BlockRecipe.from_dict(request["recipe"])
    model = build_model(
        request["folder"], tensor_parallel=request["tensor_parallel"], recipe=recipe, load_weights=False
    )
    source = MegatronSource(model, hf_config=request["folder"])
    listening: list[JetRLWeightSynchronizer] = []

    def listen(bf16: bool, **options: Any) -> list[dict[str, Any]]:
        while listening:
            # With it go the copies of the weights that a peer sends.
            listening.pop().close()
        if cuda:
            torch.cuda.empty_cache()
        sent: Any = source
        if bf16:
            # Not build_model's export_hf_weights: the folder has no weights whose order it could take.
            bridge = import_bridge().AutoBridge.from_hf_config(open_hf_model(request["folder"]).config)
            stream = bridge.export_hf_weights(model, show_progress=False)
            sent = Unchecked({key: weight.clone() for key, weight in stream}, recipe)
        listening.append(JetRLWeightSynchronizer(sent, **options))
        return listening[0].endpoints

    def change() -> None:
        """Every weight changes, as in an optimizer step."""
        for parameter in model[0].parameters():
            parameter.data.mul_(1.01)

    def send() -> dict[str, Any]:
        before = _start_of_peak()
        report = listening[0].update()
        return {"seconds": report.seconds, "bytes": report.nbytes, "peak": _peak_above(before)}

    def layer_bytes() -> int:
        """Of the largest decoder layer, in the form in which it is sent."""
        layers: dict[str, int] = {}
        for name, spec in source.tensors.items():
            layer = ".".join(name.split(".")[:3])
            layers[layer] = layers.get(layer, 0) + spec.nbytes
        return max(nbytes for layer, nbytes in layers.items() if layer.startswith("model.layers."))

    commands = {"listen": listen, "change": change, "send": send, "layer_bytes": layer_bytes}
    if cuda:
        torch.cuda.synchronize()
    answer_on_all_ranks(connection, commands)


def _rank(rank: int, connection: Connection | None, request: dict[str, Any]) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    else:
        from jetrl_megatron.integrations import megatron_cpu

        megatron_cpu.install()
    world = request["tensor_parallel"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{request['rendezvous']}", rank=rank, world_size=world
    )
    serve_trainer(connection, request)


# Engines


def serve_engine(connection: Connection, request: EngineRequest) -> None:
    """An engine, started with weights that nobody will use."""
    from vllm import LLM

    from jetrl_megatron.verify.engine import engine_arguments, require_plugin

    if request.mode == "parity":
        require_plugin()
    llm = LLM(**engine_arguments(request))

    def receive(endpoints: list[dict[str, Any]], timeout: float) -> int:
        reports = llm.collective_rpc("bench_receive", args=(endpoints, timeout))
        version_of([report["report"] for report in reports])
        llm.reset_prefix_cache()
        return max(report["peak"] for report in reports)

    def score() -> list[tuple[list[int], list[float]]]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return [(list(each.token_ids), list(each.logprobs.logprobs)) for each in completions]

    def reload(quantize: bool) -> None:
        llm.collective_rpc("bench_use_reload", args=(quantize,))

    def pieces(out: str) -> None:
        llm.collective_rpc("jetrl_write_pieces", args=(out,))

    answer(connection, {"receive": receive, "score": score, "reload": reload, "pieces": pieces})


class BenchWorker(WeightReceiver, LoadedWeights):
    """Receives updates in three ways, measures its memory, and shows its FP8 weights."""

    def bench_receive(self, endpoints: list[dict[str, Any]], timeout: float) -> dict[str, Any]:
        """One update: its report, and bytes of device memory on top of what was in use before."""
        before = _start_of_peak()
        report = self.jetrl_receive(endpoints, timeout)
        return {"report": report, "peak": _peak_above(before)}

    def bench_use_reload(self, quantize: bool) -> None:
        """From now on updates go through vLLM's loaders."""
        receiver = ReloadingReceiver(self.model_runner.get_model, self.vllm_config, self.device)
        receiver.quantize = quantize
        receiver.version = self.jetrl_weight_version()
        self.__dict__["_jetrl_receiver"] = receiver


class ReloadingReceiver(EngineReceiver):
    """Loads whole tensors by vLLM's layerwise reload."""

    quantize = False

    def prepare(self, manifest: Manifest) -> list[str]:
        """Takes any manifest."""
        model, config = self._get_model(), self._vllm_config.model_config
        self.weights = ReloadedWeights(model, config, manifest, self.quantize)  # type: ignore[assignment]
        return []

    def check_taken(self) -> list[str]:
        """Checks nothing: what vLLM does not load, it does not load."""
        return []


class ReloadedWeights:
    """What `EngineWeights` does, by vLLM's layerwise reload, and without a way back."""

    def __init__(self, model: Any, model_config: Any, manifest: Manifest, quantize: bool) -> None:
        self.manifest = manifest
        self._model, self._model_config, self._quantize = model, model_config, quantize
        self._parts: dict[str, list[torch.Tensor]] = {}

    def is_current(self) -> bool:
        """Always."""
        return True

    def save(self) -> None:
        """Keeps nothing."""

    def begin(self) -> None:
        """Starts the reload."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)

    def write(self, index: int, buffer: torch.Tensor) -> None:
        """Loads the tensors that a bucket completes."""
        self._model.load_weights(self._tensors(index, buffer))
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _tensors(self, index: int, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        for part in self.manifest.buckets[index].slices:
            spec = self.manifest.tensors[part.name]
            # The loaders keep tensors until a layer is complete, and the bucket is filled anew before that.
            parts = self._parts.setdefault(part.name, [])
            parts.append(view_of(buffer, part, spec).clone())
            if part.first_row + part.rows < spec.shape[0]:
                continue
            tensor = torch.cat(self._parts.pop(part.name)) if len(parts) > 1 else self._parts.pop(part.name)[0]
            if not (self._quantize and part.name.endswith("_proj.weight")):
                yield part.name, tensor.view(spec.shape)
                continue
            codes, scale = per_block_cast_to_fp8(tensor, list(self.manifest.recipe.weight_block), use_ue8m0=True)
            yield part.name, codes
            yield f"{part.name}_scale_inv", scale

    def finish(self) -> None:
        """Ends the reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)

    def roll_back(self) -> None:
        """Not possible."""

    def commit(self) -> None:
        """Nothing is kept."""


def _start_of_peak() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak_above(before: int) -> int:
    return torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0


def main(pipe: str, role: str, request_path: str) -> None:
    """Runs one of the processes until its driver closes the connection."""
    request = json.loads(Path(request_path).read_text())
    if role == "engine":
        serve_engine(connection_of(pipe), EngineRequest.from_dict(request))
        return
    ranks: list[Any] = []
    start: Callable[..., Any] = get_context("spawn").Process
    connection = connection_of(pipe)
    for rank in range(request["tensor_parallel"]):
        ranks.append(start(target=_rank, args=(rank, None if rank else connection, request), daemon=True))
        ranks[-1].start()
    connection.close()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
