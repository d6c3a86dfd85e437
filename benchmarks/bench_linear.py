"""Training linears: fprop, dgrad and wgrad with all quantisation, through the real layer and autograd.

Implementations, forward and backward in one process and in turn:

- jetrl_strict, jetrl_cached: JetRL's layer; its weight is quantised in every repetition, as with one microbatch a step,
  or not at all.
- bf16_torch: F.linear; the weight's gradient stays BF16 and is dropped.
- bf16_torch_main_grad: the same, and the gradient is added to a float32 main_grad, as Megatron does without fusion.
- te_bf16_main_grad: TransformerEngine's Linear in BF16, whose GEMM accumulates into main_grad.
- te_blockwise_strict, te_blockwise_cached: TransformerEngine's Linear with Float8BlockScaling and fused main_grad;
  `is_first_microbatch` both ways.
- jetrl_gemm, bf16_torch_gemm: the three products alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchmarks.common import Contender, Model, Run, start, write_profile
from benchmarks.linear_contenders import LinearCase, usable_transformer_engine
from benchmarks.megatron_state import one_rank

TOKENS = (8192, 16384)
PEERS = ("bf16_torch", "bf16_torch_main_grad", "te_bf16_main_grad", "te_blockwise_strict", "te_blockwise_cached")
ALL = "all four linears"
Totals = dict[str, Counter[str]]


def main() -> None:
    """Measures every linear of every model asked for, or profiles one."""
    run = start(
        "bench_linear",
        "Training linears against BF16 torch and TransformerEngine.",
        ("--tokens", {"default": ",".join(map(str, TOKENS)), "help": "comma-separated values of M"}),
        ("--profile", {"metavar": "LINEAR", "help": "write a profile of qkv, proj, fc1 or fc2 instead of timing"}),
    )
    te, reason = usable_transformer_engine(run.device)
    tokens = [64] if run.dry else [int(m) for m in run.options.tokens.split(",")]
    with one_rank(run.device):
        for model in run.models:
            if run.options.profile:
                profile(run, model, run.options.profile, tokens[0])
                continue
            if te is None:
                run.add(model, ALL, None, "te_blockwise/fprop+dgrad+wgrad", None, f"not measured: {reason}")
            for m in tokens:
                totals: Totals = {}
                for name in model.linears:
                    measure(run, model, name, m, te, totals)
                for what, times in totals.items():
                    run.add_times(model, ALL, m, times, what, peers=peers_of(what))
                run.write()


def peers_of(what: str) -> tuple[str, ...]:
    """What the JetRL row of a metric is compared with."""
    return ("bf16_torch_gemm",) if what.startswith("gemm") else PEERS


def measure(run: Run, model: Model, name: str, m: int, te: Any, totals: Totals) -> None:
    """Rows of one linear; its times are added to `totals` by metric and implementation."""
    case = LinearCase(model, name, m, run.device, te)
    case.check()
    rows, columns = model.linears[name]

    def add(what: str, times: dict[str, float]) -> None:
        run.add_times(model, f"{name} N={rows} K={columns}", m, times, what, peers=peers_of(what), show=False)
        totals.setdefault(what, Counter()).update(times)

    whole = run.clock.race(case.contenders())
    add("fprop+dgrad+wgrad", {key: times["total"] for key, times in whole.items()})
    add("fprop", {key: times["forward"] for key, times in whole.items()})
    add("dgrad+wgrad", {key: times["backward"] for key, times in whole.items()})
    for what, needed in (("dgrad", {"x": True, "weight": False}), ("wgrad", {"x": False, "weight": True})):
        case.only(**needed)
        parts = run.clock.race(without_strict(case.contenders()))
        add(what, {key: times["backward"] for key, times in parts.items()})
    case.only(x=True, weight=True)
    gemms = run.clock.race(case.gemms())
    for what in ("fprop", "dgrad", "wgrad", "total"):
        add(f"gemm {what}", {key: times[what] for key, times in gemms.items()})
    del case
    if run.device.type == "cuda":
        torch.cuda.empty_cache()


def without_strict(contenders: dict[str, Contender]) -> dict[str, Contender]:
    """Those whose backward is not the same as another one's."""
    return {name: contender for name, contender in contenders.items() if not name.endswith("_strict")}


def profile(run: Run, model: Model, name: str, m: int) -> None:
    """Writes where the time of one linear goes, with fresh weights."""
    contender = LinearCase(model, name, m, run.device).contenders()["jetrl_strict"]
    heading = f"{model.name} {name} N x K = {model.linears[name]}, M = {m}"
    write_profile(run, contender, f"profile_linear_{model.key}_{name}_{m}.txt", heading)


if __name__ == "__main__":
    main()
