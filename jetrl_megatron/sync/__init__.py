"""Online weight sync: a trainer's FP8 weights into running vLLM engines, between two rollouts.

`JetRLWeightSynchronizer` sends, `WORKER_EXTENSION` is what an engine needs, `receive_update` is what its driver calls.
`MegatronSource` is in `jetrl_megatron.sync.megatron_source`, since it imports Megatron.
"""

from jetrl_megatron.sync.manifest import WeightSyncError
from jetrl_megatron.sync.receiver import WORKER_EXTENSION, receive_update, version_of, weight_version
from jetrl_megatron.sync.source import HostSource, TensorSource, WeightSource
from jetrl_megatron.sync.synchronizer import JetRLWeightSynchronizer, SyncReport

__all__ = [
    "WORKER_EXTENSION",
    "HostSource",
    "JetRLWeightSynchronizer",
    "SyncReport",
    "TensorSource",
    "WeightSource",
    "WeightSyncError",
    "receive_update",
    "version_of",
    "weight_version",
]
