"""The Megatron ranks of the demo: `torchrun ... -m jetrl_megatron.demo.worker train|rescore FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from jetrl_megatron.demo.options import DemoFolder
from jetrl_megatron.integrations import megatron_cpu
from jetrl_megatron.verify.exact_sums import ExactSums


# So that torchrun's own report ends with the traceback of the rank that failed.
@record
def main() -> None:
    """Runs one task on this rank."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("train", "rescore"):
        raise SystemExit("usage: python -m jetrl_megatron.demo.worker train|rescore FOLDER")
    task, folder = sys.argv[1], DemoFolder(Path(sys.argv[2]))

    # Before the first import of Megatron, which the tasks' modules do.
    megatron_cpu.install()
    from jetrl_megatron.demo.rescoring import rescore
    from jetrl_megatron.demo.training import train

    dist.init_process_group("gloo")
    with ExactSums():
        (train if task == "train" else rescore)(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
