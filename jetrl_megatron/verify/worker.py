"""The class that a verification's engine mixes into vLLM's worker; vLLM imports it in the worker's process."""

from __future__ import annotations

from jetrl_megatron.integrations.vllm_description import PrecisionReport
from jetrl_megatron.sync.receiver import WeightReceiver
from jetrl_megatron.verify.loaded_weights import LoadedWeights


class DescribedWorker(LoadedWeights, PrecisionReport, WeightReceiver):
    """Counts operators, takes and shows weights, and describes itself to the precision-flow checker."""
