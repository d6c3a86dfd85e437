"""The engine's side of weight sync: a class that vLLM mixes into its workers, and what its driver calls.

Give the engine `worker_extension_cls=WORKER_EXTENSION`, and call `receive_update` while the trainer calls
`JetRLWeightSynchronizer.update`. A worker never raises: vLLM's executor would leave the answers of other workers behind
for the next call. It reports, and `receive_update` raises.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from jetrl_megatron.recipe import VLLM_CONFIG_KEY, Fp8BlockRecipe
from jetrl_megatron.sync.manifest import Manifest, WeightSyncError
from jetrl_megatron.sync.synchronizer import TIMEOUT
from jetrl_megatron.sync.transport import (
    GroupReceiving,
    IpcReceiving,
    Receiving,
    SharedMemoryReceiving,
    device_uuid,
)
from jetrl_megatron.sync.update import Update
from jetrl_megatron.sync.wire import Connection, Message

if TYPE_CHECKING:
    from jetrl_megatron.sync.engine_weights import EngineWeights
    from jetrl_megatron.sync.recorded import Recording

WORKER_EXTENSION = f"{__name__}.WeightReceiver"
"""Value of vLLM's `worker_extension_cls`; a class that derives from it may stand in for it."""

_log = logging.getLogger(__name__)


class WeightReceiver:
    """Methods that vLLM mixes into its worker class; call them through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    device: torch.device

    def jetrl_receive(self, endpoints: Sequence[Message], timeout: float = TIMEOUT) -> Message:
        """Takes part in one update, see `receive_update`.

        Returns:
            {"version": which this worker serves now, "problems": why it is not the one that was sent, or []}.
        """
        return self.jetrl_receiver().receive(endpoints, timeout)

    def jetrl_weight_version(self) -> int:
        """Version of the last update that this worker took; 0 before the first."""
        return self.jetrl_receiver().version

    def jetrl_receiver(self) -> EngineReceiver:
        """What this worker keeps from one update to the next."""
        receiver: EngineReceiver | None = self.__dict__.get("_jetrl_receiver")
        if receiver is None:
            receiver = EngineReceiver(self.model_runner.get_model, self.vllm_config, self.device)
            self.__dict__["_jetrl_receiver"] = receiver
        return receiver


def receive_update(llm: Any, endpoints: Sequence[Message], timeout: float = TIMEOUT) -> int:
    """Takes one update into a running engine; the trainer calls `JetRLWeightSynchronizer.update` at the same time.

    No step of the engine runs meanwhile, so no token is computed with weights of two versions. Keys and values of the
    old version are dropped: from the prefix cache, and of requests under way, which compute them anew.

    Args:
        llm: `vllm.LLM`.
        endpoints: `JetRLWeightSynchronizer.endpoints`.
        timeout: seconds that the sender may stay silent, which includes the time until it starts.

    Returns:
        the version that the engine serves now.

    Raises:
        WeightSyncError: nothing was taken; the engine serves the version that it served before.
        RuntimeError: the new version is served, but keys and values of the old one could not be dropped.
    """
    version = version_of(llm.collective_rpc("jetrl_receive", args=(list(endpoints), timeout)))
    if not llm.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError(
            f"version {version} is served, with keys and values of the version before in the prefix cache: wait for "
            "the requests under way, and call reset_prefix_cache() before the next one"
        )
    return version


def weight_version(llm: Any) -> int:
    """The version that an engine serves, 0 before its first update.

    Raises:
        WeightSyncError: its workers serve different ones.
    """
    return version_of([{"version": each, "problems": []} for each in llm.collective_rpc("jetrl_weight_version")])


def version_of(reports: Sequence[Message]) -> int:
    """The version that all workers report, for drivers that call `collective_rpc("jetrl_receive", ...)` themselves.

    Raises:
        WeightSyncError: with the problems of all workers.
    """
    problems = list(dict.fromkeys(problem for report in reports for problem in report["problems"]))
    versions = {report["version"] for report in reports}
    if problems:
        raise WeightSyncError(problems)
    if len(versions) != 1:
        raise WeightSyncError([f"the workers of one engine serve versions {sorted(versions)}: restart the engine"])
    return int(versions.pop())


class EngineReceiver:
    """One worker's part in updates.

    Args:
        get_model: returns the loaded model.
        vllm_config: of the engine.
        device: where the parameters are.

    Attributes:
        name: of this worker, in errors and among the receivers of a broadcast.
        workers: of the engine.
        version: of the last update that was taken.
        weights: prepared for the manifest that was offered last, or None.
        group: the communicator of an earlier update, or None.
    """

    def __init__(self, get_model: Callable[[], torch.nn.Module], vllm_config: Any, device: torch.device) -> None:
        from vllm.distributed.parallel_state import get_world_group

        self._get_model = get_model
        self._vllm_config = vllm_config
        self._device = torch.device(device)
        self._world = get_world_group()
        self.workers = self._world.world_size
        self.name = f"worker {self._world.rank} of {self.workers}, {socket.gethostname()}:{os.getpid()}"
        self._recording: Recording | None = None
        self.weights: EngineWeights | None = None
        self.group: Any = None
        self.version = 0

    def receive(self, endpoints: Sequence[Message], timeout: float) -> Message:
        """See `WeightReceiver.jetrl_receive`. Every worker of the engine takes part in each step, whatever happens."""
        update = Update(self, endpoints, timeout)
        try:
            problems = update.run()
        except Exception as error:
            # Of a collective, when another worker is gone.
            problems = [self.problem(error)]
        if problems:
            # The sender, and through it other engines, learn why; those who told us know already.
            lost = update.give_up(problems)
            kept = [f"{problem}; version {self.version} is served as before" for problem in problems]
            problems = [*problems, *lost] if lost else kept
        return {"version": self.version, "problems": problems}

    def problem(self, error: Exception) -> str:
        """Logs what vLLM or torch raised, and names it."""
        _log.error("weight update failed", exc_info=error)
        return f"{self.name}: {type(error).__name__}: {error}"

    # What an update needs of the engine

    def recipe(self) -> Fp8BlockRecipe:
        """The recipe that the engine was started with.

        Raises:
            WeightSyncError: it was started with none.
        """
        additional = self._vllm_config.additional_config
        told = additional.get(VLLM_CONFIG_KEY) if isinstance(additional, Mapping) else None
        carried = getattr(self._vllm_config.model_config.hf_config, "jetrl", None)
        stamp = carried if told is None else told
        if stamp is None:
            raise WeightSyncError(
                [
                    "the engine knows no recipe: serve an export, or start it with "
                    "additional_config={'jetrl': recipe.to_stamp()}"
                ]
            )
        return Fp8BlockRecipe.from_stamp(stamp, "the engine's configuration")

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers of the engine. A collective."""
        values: list[Any] = [value]
        if self.workers > 1:
            values = [None] * self.workers
            dist.all_gather_object(values, value, group=self._world.cpu_group)
        return values

    def known_digest(self) -> str | None:
        """Of the manifest that this worker is prepared for."""
        if self.weights is None or not self.weights.is_current():
            self.weights = None
            return None
        return self.weights.manifest.digest

    def forget(self) -> None:
        """Gives up what was prepared for another manifest."""
        if self.weights is not None:
            self.weights.roll_back()
        self.weights = None

    def prepare(self, manifest: Manifest) -> list[str]:
        """Checks a manifest and finds out where its tensors go; returns the problems that this worker sees."""
        from jetrl_megatron.sync.engine_weights import engine_problems
        from jetrl_megatron.sync.recorded import record

        model = self._get_model()
        problems = manifest.problems()
        try:
            manifest.recipe.require_same(self.recipe(), ours="trainer", theirs="engine")
        except ValueError as error:
            problems.append(str(error))
        problems += engine_problems(model, manifest.recipe)
        if problems:
            return problems
        self._manifest, self._recording = manifest, record(model, manifest.tensors)
        return self._recording.problems

    def check_taken(self) -> list[str]:
        """Whether the workers together take all of every tensor; a collective. Makes `weights` if they do."""
        from jetrl_megatron.sync.engine_weights import EngineWeights
        from jetrl_megatron.sync.recorded import boxes_of, not_taken

        assert self._recording is not None
        problems = not_taken(self._manifest.tensors, self.gather(boxes_of(self._recording.copies)))
        if not problems and self.weights is None:
            self.weights = EngineWeights(self._get_model(), self._manifest, self._recording, self._device)
        return problems

    def open(self, transport: str, offer: Message, connection: Connection) -> Receiving:
        """The receiving end of the sender's transport."""
        if transport == "shm":
            return SharedMemoryReceiving(offer)
        if transport == "ipc":
            return IpcReceiving(offer, self.name)
        group, self.group = self.group, None
        receiving = GroupReceiving(offer, self.name, group, self._device, connection)
        self.group = receiving.group
        return receiving

    def endpoint(self, endpoints: Sequence[Message]) -> Message:
        """The sender that this worker is served by: the only one, or the one on its GPU.

        Raises:
            WeightSyncError: none of several is on this GPU.
        """
        if len(endpoints) == 1:
            return endpoints[0]
        uuid = device_uuid(self._device)
        for endpoint in endpoints:
            if uuid is not None and endpoint["device"] == uuid:
                return endpoint
        raise WeightSyncError(
            [f"none of {len(endpoints)} senders is on GPU {uuid} of {self.name}: use senders='first', transport 'nccl'"]
        )
