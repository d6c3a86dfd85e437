"""The engine's arguments for a rollout in NeMo-RL, and the class that vLLM mixes into its workers there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension
from vllm.logger import init_logger

from jetrl_megatron.convert.plan import bf16_modules
from jetrl_megatron.convert.rollout_tp import check_rollout_tp
from jetrl_megatron.integrations.nemo_rl.resolution import ENDPOINTS, SECTION
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync.receiver import WeightReceiver

WORKER_EXTENSION = f"{__name__}.JetRLWorkerExtension"
_log = init_logger(f"vllm.{__name__}")


class JetRLWorkerExtension(WeightReceiver, VllmInternalWorkerExtension):
    """NeMo-RL's extension with our receiver: codes and scales arrive as training computes with them, and stay so.

    NeMo-RL's own receiver quantises whatever a block FP8 engine gets, and processes the layers again after each update.
    """

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """Remembers where the senders are."""
        self._jetrl_endpoints = state_dict_info[ENDPOINTS]

    def init_collective(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the receiver connects when an update comes."""

    def update_weights_via_ipc_zmq(self) -> bool:
        """Takes part in one update; False, with the reasons logged, where the old version is served on."""
        report = self.jetrl_receive(self._jetrl_endpoints)
        for problem in report["problems"]:
            _log.error("weight update: %s", problem)
        return not report["problems"]

    def update_weights_from_collective(self) -> bool:
        """The same."""
        return self.update_weights_via_ipc_zmq()


def our_engine_arguments(generation: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What NeMo-RL would start vLLM with, changed for a rollout in FP8.

    Args:
        generation: the resolved section `policy.generation`.
        arguments: NeMo-RL's keyword arguments of `vllm.LLM`.

    Raises:
        ValueError: the rollout's tensor parallel size cuts a tile.
    """
    recipe = Fp8BlockRecipe.from_stamp(generation[SECTION], f"policy.generation.{SECTION}")
    hf_config = importlib.import_module("transformers").AutoConfig.from_pretrained(
        arguments["model"], trust_remote_code=True
    )
    check_rollout_tp(hf_config, arguments["tensor_parallel_size"], recipe)
    overrides = {
        **(arguments.get("hf_overrides") or {}),
        "quantization_config": recipe.to_vllm_quantization_config(bf16_modules(hf_config, recipe)),
        "jetrl": recipe.to_stamp(),
    }
    return {
        **arguments,
        "hf_overrides": overrides,
        "worker_extension_cls": WORKER_EXTENSION,
        # Log-probs of the logits as they are: at temperature 1 the processed ones, before any copy.
        "logprobs_mode": "raw_logprobs",
    }
