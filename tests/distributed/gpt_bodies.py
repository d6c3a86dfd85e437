"""A small GPT on four ranks under every parallel layout: losses, gradients, codes and scales, optimizer steps.

Widths are chosen so that tensor parallelism cuts tiles everywhere: hidden 384, 6 heads of 64 with 2 KV heads, FFN 640,
at TP 2 are 192 query rows, 64 key rows and 320 FFN rows a rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from jetrl_megatron import JETRL_FP8, Fp8BlockRecipe
from jetrl_megatron.layers import Fp8LinearMixin, WeightCache
from jetrl_megatron.linear_call import LinearPlan
from jetrl_megatron.ops.backends import ReferenceGemm
from jetrl_megatron.spec import get_gpt_layer_jetrl_spec
from jetrl_megatron.tensor import BlockScaledTensor

VOCABULARY, SEQUENCE, BATCH = 256, 24, 2


@dataclasses.dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    sp: bool = False
    recompute: bool = False
    distributed_optimizer: bool = False


class Job:
    """A model under a layout, with Megatron's DDP and schedule."""

    def __init__(self, layout: Layout, recipe: Fp8BlockRecipe = JETRL_FP8) -> None:
        mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(layout.tp, layout.pp, layout.vpp)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        self.layout = layout
        self.config = self._config(layout)
        spec = get_gpt_layer_jetrl_spec(normalization="RMSNorm", qk_layernorm=True, recipe=recipe)
        self.models = [self._build(spec, stage) for stage in (range(layout.vpp) if layout.vpp else [None])]
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=layout.distributed_optimizer
        )
        self.chunks = [DistributedDataParallel(self.config, ddp, model) for model in self.models]
        self.config.finalize_model_grads_func = finalize_model_grads

    def _config(self, layout: Layout) -> TransformerConfig:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return TransformerConfig(
            num_layers=4,
            hidden_size=384,
            ffn_hidden_size=640,
            num_attention_heads=6,
            num_query_groups=2,
            kv_channels=64,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            sequence_parallel=layout.sp,
            use_cpu_initialization=True,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            qk_layernorm=True,
            add_bias_linear=False,
            add_qkv_bias=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            transformer_impl="local",
            **(recompute if layout.recompute else {}),
        )

    def _build(self, spec: Any, stage: int | None) -> GPTModel:
        ignore_virtual = stage is None
        return GPTModel(
            self.config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=stage,
        )

    def load(self, whole: dict[str, torch.Tensor]) -> None:
        """Takes this rank's part of global weights, named by global layer."""
        rank = mpu.get_tensor_model_parallel_rank()
        with torch.no_grad():
            for name, parameter in self.parameters():
                parameter.copy_(split(name, whole[name], self.layout.tp)[rank])

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by global name: decoder.layers.N counts from the first layer of the whole model."""
        for model in self.models:
            for name, parameter in model.named_parameters():
                if name.startswith("decoder.layers."):
                    _, _, local, rest = name.split(".", 3)
                    number = model.decoder.layers[int(local)].layer_number - 1
                    name = f"decoder.layers.{number}.{rest}"
                yield name, parameter

    def step(self, microbatches: int = 2, equal: bool = False, seed: int = 0) -> float | None:
        """Forward and backward of one step; every data-parallel rank sees the same tokens. Loss on the last stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_tokens(seed, equal) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        return sum(loss["loss"].item() for loss in losses) / len(losses) if losses else None

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.main_grad.clone() for name, parameter in self.parameters()}

    def linears(self) -> Iterator[tuple[str, Fp8LinearMixin]]:
        for model in self.models:
            for layer in model.decoder.layers:
                for name, module in layer.named_modules():
                    if isinstance(module, Fp8LinearMixin):
                        yield f"decoder.layers.{layer.layer_number - 1}.{name}", module

    def codes(self) -> dict[str, tuple[torch.Tensor, torch.Tensor, Any, Any]]:
        """Codes, scales and the two layouts of every linear that this rank holds."""
        return {
            name: (
                module.quantized_weight().tensor.data.view(torch.uint8),
                module.quantized_weight().tensor.scale,
                *module.layouts,
            )
            for name, module in self.linears()
        }


def split(name: str, whole: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """The parts of a global tensor that tensor-parallel ranks store."""
    if "linear_fc1" in name:
        halves = [half.chunk(tp) for half in whole.chunk(2)]
        return [torch.cat(parts) for parts in zip(*halves, strict=True)]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return list(whole.chunk(tp, dim=1))
    if "linear_qkv" in name or name.startswith(("embedding.", "output_layer.")):
        return list(whole.chunk(tp))
    return [whole] * tp


def join(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of `split`."""
    if "linear_fc1" in name:
        return torch.cat([torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True)])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat(parts, dim=1)
    if "linear_qkv" in name or name.startswith(("embedding.", "output_layer.")):
        return torch.cat(parts)
    return parts[0]


def _tokens(seed: int, equal: bool) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    while True:
        yield tokens
        if not equal:
            tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def _forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens = next(data)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = values.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "tp2_sp": Layout(tp=2, sp=True),
    "pp2": Layout(pp=2),
    "tp2_pp2": Layout(tp=2, pp=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "pp2_recompute": Layout(pp=2, recompute=True),
    "tp2_sp_recompute": Layout(tp=2, sp=True, recompute=True),
}


@functools.cache
def initial_weights() -> dict[str, torch.Tensor]:
    """One set of weights for all layouts, spread so that tiles differ in amax."""
    weights = {name: parameter.detach().clone() for name, parameter in Job(Layout()).parameters()}
    for weight in weights.values():
        if weight.dim() == 2:
            weight.mul_(torch.linspace(0.5, 2, weight.shape[0])[:, None].to(weight.dtype))
    return weights


def layout_body(name: str) -> Callable[[], dict[str, Any]]:
    def body() -> dict[str, Any]:
        weights = initial_weights()
        job = Job(LAYOUTS[name])
        job.load(weights)
        codes = job.codes()
        loss = job.step()
        replica = mpu.get_data_parallel_rank()
        return {
            "loss": loss,
            "rank": mpu.get_tensor_model_parallel_rank(),
            "codes": codes if replica == 0 else {},
            "gradients": job.gradients() if replica == 0 else {},
        }

    return body


class SplitGemm(ReferenceGemm):
    """One rank that sums as two do: contractions that TP 2 cuts are computed in two parts, each rounded to BF16."""

    name = "split"

    def __init__(self, linear: Fp8LinearMixin) -> None:
        rows, columns = linear.layouts
        self._cut_rows = isinstance(linear, RowParallelLinear)
        size = columns.stored if self._cut_rows else rows.stored
        label = "linear_fc1" if getattr(linear.weight, "partition_stride", 1) == 2 else "linear_qkv"
        stored = torch.arange(size) if self._cut_rows or rows.position is None else torch.tensor(rows.position)
        self._parts = stored.chunk(2) if self._cut_rows else split(label, stored, 2)
        self._cut_operand: torch.Tensor | None = None

    def prepare(self, operand: BlockScaledTensor) -> torch.Tensor:
        prepared = super().prepare(operand)
        if operand.block == operand.recipe.weight_block and self._cut_rows:
            self._cut_operand = prepared
        return prepared

    def prepare_transposed(self, operand: BlockScaledTensor, prepared: torch.Tensor) -> torch.Tensor:
        transposed = super().prepare_transposed(operand, prepared)
        if not self._cut_rows:
            self._cut_operand = transposed
        return transposed

    def nt(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if b is not self._cut_operand:
            return super().nt(a, b)
        first, second = (super(SplitGemm, self).nt(a[:, part], b[:, part]) for part in self._parts)
        return first + second


def tp1_summing_as_tp2() -> dict[str, Any]:
    """TP 1 whose linears round partial sums as TP 2 does."""
    weights = initial_weights()
    job = Job(Layout())
    job.load(weights)
    for _, linear in job.linears():
        plan = dataclasses.replace(linear.plan(torch.device("cpu")), gemm=SplitGemm(linear))
        linear._plan, linear._cache = plan, WeightCache(plan.quantize_weight)
    # The stock output layer's input gradient is such a sum too; autograd adds the two parts in BF16.
    job.models[0].output_layer._forward_impl = lambda input, weight, **_: torch.cat(
        [F.linear(input, part) for part in weight.chunk(2)], dim=-1
    )
    loss = job.step()
    return {"loss": loss, "rank": 0, "gradients": job.gradients() if mpu.get_data_parallel_rank() == 0 else {}}


def equal_microbatches() -> dict[int, dict[str, torch.Tensor]]:
    """PP 2: the mean over four equal microbatches against one microbatch of the same tokens."""
    weights, result = initial_weights(), {}
    for count in (1, 4):
        job = Job(Layout(pp=2))
        job.load(weights)
        job.step(microbatches=count, equal=True)
        result[count] = job.gradients()
    return result


def ten_steps() -> dict[str, Any]:
    """Ten optimizer steps at TP 2 x DP 2: cached weights against quantising at every call, and both optimizers."""
    runs = {"cached": (True, True), "uncached": (True, False), "plain_optimizer": (False, True)}
    return {name: _train(*how) for name, how in runs.items()}


def _train(distributed_optimizer: bool, cached: bool) -> dict[str, Any]:
    weights = initial_weights()
    job = Job(Layout(tp=2, distributed_optimizer=distributed_optimizer))
    job.load(weights)
    if not cached:
        for _, linear in job.linears():
            linear.register_forward_pre_hook(lambda module, _: setattr(module, "is_first_microbatch", True))
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=distributed_optimizer,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, job.chunks)
    losses = []
    quantize = LinearPlan.quantize_weight
    with mock.patch.object(LinearPlan, "quantize_weight", autospec=True, side_effect=quantize) as counted:
        for step in range(10):
            losses.append(job.step(seed=step % 2))
            optimizer.step()
    return {
        "losses": losses,
        "quantisations": counted.call_count,
        "linears": len(list(job.linears())),
        "weights": {name: parameter.detach().clone() for name, parameter in job.parameters()},
        "codes": job.codes(),
    }


BODIES: dict[str, Callable[[], Any]] = {
    "initial_weights": initial_weights,
    **{name: layout_body(name) for name in LAYOUTS},
    "tp1_summing_as_tp2": tp1_summing_as_tp2,
    "equal_microbatches": equal_microbatches,
    "ten_steps": ten_steps,
}
