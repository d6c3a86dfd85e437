"""NeMo-RL's Megatron worker with our linears, parity operators and weight sync. Ray imports it in each worker."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from jetrl_megatron.convert.bridge import import_bridge
from jetrl_megatron.integrations.megatron_bridge import use_jetrl
from jetrl_megatron.integrations.nemo_rl.log_probs import use_parity_log_probs
from jetrl_megatron.integrations.nemo_rl.resolution import ENDPOINTS, SECTION
from jetrl_megatron.layers import Fp8LinearMixin, use_parity_head
from jetrl_megatron.recipe import Fp8BlockRecipe
from jetrl_megatron.sync import JetRLWeightSynchronizer, WeightSyncError
from jetrl_megatron.sync.megatron_source import MegatronSource

# Before NeMo-RL imports it: it has to import without TransformerEngine too, and to know our linears.
import_bridge()

from megatron.bridge.training import initialize  # noqa: E402
from nemo_rl.distributed import model_utils  # noqa: E402
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker  # noqa: E402
from nemo_rl.models.policy.workers import megatron_policy_worker  # noqa: E402
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl  # noqa: E402


class JetRLMegatronPolicyWorkerImpl(MegatronPolicyWorkerImpl):
    """NeMo-RL's Megatron policy worker for a policy with `precision: jetrl_fp8`.

    Weights stay BF16 in checkpoints and in the optimizer, under the names that they have without FP8.
    """

    _synchronizer: JetRLWeightSynchronizer | None = None
    _engine_workers: int | None = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        recipe, parity = recipe_of(config)
        if importlib.util.find_spec("transformer_engine") is None:
            # The layer spec that the Hugging Face model is imported with; `use_jetrl` chooses alike.
            specs = importlib.import_module("megatron.bridge.models.gpt_provider")
            self._transformer_layer_spec = specs.local_layer_spec
        with _our_model(recipe, parity), _without_index_builder():
            super().__init__(config, *args, **kwargs)
        if parity:
            hf_config = self.megatron_bridge.hf_pretrained.config
            use_parity_log_probs(model_utils, hf_config.get_text_config().vocab_size)

    def init_collective(self, ip: str, port: int, world_size: int, *, train_world_size: int, **_: Any) -> None:
        """Counts the engines' workers; the connection to them is made by the synchroniser."""
        self._engine_workers = world_size - train_world_size

    def prepare_refit_info(self) -> dict[str, Any]:
        """Makes the synchroniser. A collective; returns what engines have to know."""
        colocated = self.cfg["generation"]["colocated"]["enabled"]
        source = MegatronSource(
            [self.model], hf_config=self.megatron_bridge.hf_pretrained.config, recipe=recipe_of(self.cfg)[0]
        )
        if colocated:
            # Each GPU has one training rank and one worker of an engine.
            self._synchronizer = JetRLWeightSynchronizer(source, senders="all")
            return {ENDPOINTS: self._synchronizer.endpoints}
        if self._engine_workers is None:
            raise RuntimeError(
                "init_collective has to come before prepare_refit_info: it tells the number of receivers"
            )
        self._synchronizer = JetRLWeightSynchronizer(
            source,
            receivers=self._engine_workers,
            transport="nccl" if source.device.type == "cuda" else "gloo",
            address=f"tcp:{ray.util.get_node_ip_address()}",
        )
        return {ENDPOINTS: self._synchronizer.endpoints}

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int = 0, kv_scales: Any = None, **_: Any) -> None:
        """Sends the weights to the engines on the same GPUs. A collective."""
        self._send()

    def broadcast_weights_for_collective(self, kv_scales: Any = None, **_: Any) -> None:
        """Sends the weights to the engines on other GPUs. A collective."""
        self._send()

    def offload_after_refit(self) -> None:
        """Frees the quantised weights too; the next forward makes them anew."""
        for module in self.model.modules():
            if isinstance(module, Fp8LinearMixin):
                module.release_quantized_weight()
        super().offload_after_refit()

    def _send(self) -> None:
        if self._synchronizer is None:
            raise RuntimeError("prepare_refit_info has to come before the first update: it makes the synchroniser")
        try:
            report = self._synchronizer.update()
        except WeightSyncError as error:
            # Ray carries a plain exception unchanged from process to process.
            raise RuntimeError(f"weight update failed, engines serve the old version: {error}") from error
        if self.rank == 0:
            size = f"{report.nbytes / 2**30:.2f} GiB in {report.buckets} buckets"
            print(f"jetrl: weights of version {report.version}: {size}, {report.seconds:.2f} s", flush=True)


class BaselineMegatronPolicyWorkerImpl(MegatronPolicyWorkerImpl):
    """NeMo-RL's Megatron policy worker as it is, for a baseline; Megatron-Core may be PyPI's."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with _without_index_builder():
            super().__init__(config, *args, **kwargs)


def recipe_of(config: Any) -> tuple[Fp8BlockRecipe, bool]:
    """Recipe and parity of a resolved policy or generation configuration."""
    section = config[SECTION]
    return Fp8BlockRecipe.from_stamp(section, f"policy.{SECTION}"), bool(section["parity"])


@contextlib.contextmanager
def _our_model(recipe: Fp8BlockRecipe, parity: bool) -> Iterator[None]:
    """While entered, the worker's models are built with our layer spec.

    Afterwards their configuration names NeMo-RL's again: checkpoints carry it, and their readers need not know us.
    """
    theirs = megatron_policy_worker.setup_model_and_optimizer
    changed: list[tuple[Any, Any]] = []

    @functools.wraps(theirs)
    def setup(policy_cfg: Any, megatron_cfg: Any, *args: Any, **kwargs: Any) -> Any:
        changed.append((megatron_cfg.model, megatron_cfg.model.transformer_layer_spec))
        use_jetrl(megatron_cfg.model, recipe, parity=parity)
        state = theirs(policy_cfg, megatron_cfg, *args, **kwargs)
        if parity:
            use_parity_head(state.model)
        return state

    megatron_policy_worker.setup_model_and_optimizer = setup
    try:
        yield
    finally:
        megatron_policy_worker.setup_model_and_optimizer = theirs
        for provider, layer_spec in changed:
            provider.transformer_layer_spec = layer_spec


@contextlib.contextmanager
def _without_index_builder() -> Iterator[None]:
    """While entered, Megatron-Bridge does not compile Megatron's index builder where its sources are missing.

    PyPI's Megatron-Core has it compiled, and no Makefile; without one, Megatron ends the process. RL does not use it.
    """
    theirs = initialize.compile_helpers
    if not (Path(inspect.getfile(theirs)).parent / "Makefile").exists():
        initialize.compile_helpers = lambda: None
    try:
        yield
    finally:
        initialize.compile_helpers = theirs


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class JetRLMegatronPolicyWorker(JetRLMegatronPolicyWorkerImpl):
    """The Ray actor."""


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class BaselineMegatronPolicyWorker(BaselineMegatronPolicyWorkerImpl):
    """The Ray actor of a baseline."""
