"""One transformer layer, forward and backward, sequence 8192, micro-batch 1: JetRL's linears against the BF16 layer.

With TransformerEngine the BF16 layer is Megatron's own TransformerEngine spec with fused gradient accumulation, and
JetRL's is `jetrl_spec` of that spec, so norms of q and k, attention and RoPE are the same; TransformerEngine's
blockwise FP8 is a further peer. Without it, both sides run Megatron's local modules around torch's fused attention.
"jetrl_parity" is the layer whose forward gives vLLM's bytes (`jetrl_spec(..., parity=True)`); it needs vLLM's
FlashAttention 3.
"""

from __future__ import annotations

import torch

from benchmarks.common import Model, Run, start, transformer_engine, write_profile
from benchmarks.layer_contenders import LayerCase
from benchmarks.megatron_state import one_rank

SEQUENCE = 8192
PEERS = ("bf16_megatron", "te_blockwise_strict", "te_blockwise_cached")


def main() -> None:
    """Measures a layer of every model asked for."""
    run = start(
        "bench_layer",
        "A transformer layer against Megatron's BF16 layer.",
        ("--no-te", {"action": "store_true", "help": "torch's attention on both sides, even with TransformerEngine"}),
        ("--profile", {"action": "store_true", "help": "write where the time of the layers goes instead of timing"}),
    )
    te, reason = transformer_engine()
    if run.options.no_te:
        te, reason = None, "switched off by --no-te"
    with one_rank(run.device):
        for model in run.models:
            if te is None:
                run.add(model, "layer", None, "te_blockwise/forward+backward", None, f"not measured: {reason}")
            measure(run, model, te=te is not None)
            if not run.options.profile:
                run.write()


def measure(run: Run, model: Model, *, te: bool) -> None:
    """Rows of one layer."""
    sequence = 64 if run.dry else SEQUENCE
    case = LayerCase(model, sequence, run.device, te=te)
    failure = case.drop_unusable_peer()
    if failure is not None:
        run.add(model, "layer", sequence, "te_blockwise/forward+backward", None, f"not measured: {failure}")
    case.check()
    if run.options.profile:
        contenders = case.contenders()
        for name in ("jetrl_strict", "jetrl_parity_strict", "bf16_megatron"):
            if name in contenders:
                heading = f"{model.name} layer, {name}, sequence {sequence}"
                write_profile(run, contenders[name], f"profile_layer_{model.key}_{name}.txt", heading)
        return
    times = run.clock.race(case.contenders())
    attention = "TransformerEngine's attention" if te else "torch's attention"
    for what, phase in (("forward+backward", "total"), ("forward", "forward"), ("backward", "backward")):
        spans = {name: parts[phase] for name, parts in times.items()}
        run.add_times(model, f"layer, {attention}", sequence, spans, what, peers=PEERS)
        for kind in ("strict", "cached"):
            parity, plain = f"jetrl_parity_{kind}", f"jetrl_{kind}"
            if parity in spans:
                ratio = spans[plain] / spans[parity]
                run.add(
                    model,
                    f"layer, {attention}",
                    sequence,
                    f"{parity}/{what}",
                    spans[parity],
                    "ms",
                    peer=plain,
                    ratio=ratio,
                )
    if run.device.type == "cuda":
        found = {name: case.memory(name) for name in case.layers}
        for name, parts in found.items():
            peer = None if name == "bf16_megatron" else "bf16_megatron"
            for what, value in parts.items():
                ratio = None if peer is None else value / found[peer][what]
                run.add(
                    model, f"layer, {attention}", sequence, f"{name}/{what}", value, "bytes", peer=peer, ratio=ratio
                )
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
