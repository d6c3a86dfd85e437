"""The trained model on every rank: log-probs, GRPO's loss and optimizer steps, weights for the rollout."""

# Shape suffixes: S tokens of a sequence, o output tokens of some sequences one after the other.

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

from examples.grpo.options import BF16, Options
from jetrl_megatron.integrations.megatron_bridge import build_model
from jetrl_megatron.integrations.requantized import RequantizedSource
from jetrl_megatron.sync.megatron_source import MegatronSource
from jetrl_megatron.verify.forward import on_gpu, pack_log_probs, packs
from jetrl_megatron.verify.model import gpt_model, initialize_groups, make_optimizer
from jetrl_megatron.verify.progress import Clock


@dataclasses.dataclass
class Sample:
    """One answer: token ids with the prompt's, what it was worth, and its log-probs by three policies."""

    ids_S: torch.Tensor
    prompt: int
    advantage: float
    rollout_o: torch.Tensor
    old_o: torch.Tensor | None = None
    reference_o: torch.Tensor | None = None


def advantages(rewards: Sequence[float], group: int) -> list[float]:
    """Rewards of each group of neighbours, less their mean, over their standard deviation; 0 where all are equal."""
    rewards_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    result: list[float] = (centred_PG / (rewards_PG.std(1, correction=0, keepdim=True) + 1e-6)).flatten().tolist()
    return result


def grpo_loss(
    logp_o: torch.Tensor, samples: Sequence[Sample], options: Options
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over tokens of GRPO's loss, and for the log: "kl" to the first policy, "clipped" and "kl_clamped" tokens."""
    lengths = torch.tensor([len(sample.rollout_o) for sample in samples])
    advantage_o = torch.tensor([s.advantage for s in samples]).repeat_interleave(lengths).to(logp_o.device)
    old_o, rollout_o = (_joined(samples, name, logp_o) for name in ("old_o", "rollout_o"))
    ratio_o = (logp_o - old_o).exp()
    clipped_o = ratio_o.clamp(1 - options.clip, 1 + options.clip)
    loss_o = -torch.minimum(ratio_o * advantage_o, clipped_o * advantage_o)
    if options.truncate_ratios:  # truncated importance sampling: the rollout's policy drew the tokens
        loss_o = loss_o * (old_o - rollout_o).exp().clamp(max=options.truncate_ratios)
    kl_o = torch.zeros_like(loss_o)
    if options.kl:
        # Bounds as in NeMo-RL: else one token that the first policy liked far better can take over a whole update.
        d_o = (_joined(samples, "reference_o", logp_o) - logp_o).clamp(-20, 20)
        kl_o = (torch.expm1(d_o) - d_o).clamp(max=10)
    sums = {"kl": kl_o.sum().detach(), "clipped": (ratio_o != clipped_o).sum(), "kl_clamped": (kl_o == 10).sum()}
    return (loss_o + options.kl * kl_o).sum(), sums


def _joined(samples: Sequence[Sample], name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.cat([getattr(sample, name) for sample in samples]).to(like)


class Policy:
    """Every rank has one. Starts from the Hugging Face folder."""

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options, self._clock = options, clock
        initialize_groups(options.tp, 1, options.seed)
        layout = {"tensor_parallel": options.tp, "sequence_parallel": options.tp > 1}
        parity = options.operators == "parity" and torch.cuda.is_available()
        build = functools.partial(build_model, options.hf_model, recipe=options.recipes[0], parity=parity, **layout)
        self.model = build(ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True))
        self.reference = build() if options.kl else None
        self.optimizer = make_optimizer(self.model, options.learning_rate, options.max_grad_norm)
        self._vocabulary = json.loads((options.hf_model / "config.json").read_text())["vocab_size"]

    def _packs(self, module: Any, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        limit = self._options.tokens_per_forward if on_gpu(module) else 0
        for pack in packs([len(sample.ids_S) for sample in samples], limit):
            yield [samples[index] for index in pack]

    def _log_probs(self, module: Any, samples: Sequence[Sample]) -> torch.Tensor:
        return pack_log_probs(module, [(sample.ids_S, sample.prompt) for sample in samples], self._vocabulary)

    @torch.no_grad()
    def score(self, model: list[Any], samples: Sequence[Sample], name: str) -> None:
        """Gives each sample the log-probs of its output tokens by `model`, under this name."""
        module = gpt_model(model).eval()
        for members in self._packs(module, samples):
            parts = self._log_probs(module, members).cpu().split([len(sample.rollout_o) for sample in members])
            for sample, part_o in zip(members, parts, strict=True):
                setattr(sample, name, part_o)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step on some answers; each token counts alike."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        module, total = gpt_model(self.model).train(), sum(len(sample.rollout_o) for sample in samples)
        sums = dict.fromkeys(("loss", "kl", "clipped", "kl_clamped"), 0.0)
        for members in self._packs(module, samples):
            with self._clock("forward"):
                loss, found = grpo_loss(self._log_probs(module, members), members, self._options)
            with self._clock("backward"):
                (loss / total).backward()
            for name, value in {"loss": loss.detach(), **found}.items():
                sums[name] += float(value) / total
        with self._clock("optimizer"):
            finalize_model_grads(self.model)
            stepped, norm, _ = self.optimizer.step()
        return {**sums, "grad_norm": float(norm), "skipped": float(not stepped)}

    def weight_source(self) -> MegatronSource | RequantizedSource:
        """What weight sync sends: the bytes that training computes with, unless the rollout is to have others."""
        (training, rollout), hf_config = self._options.recipes, self._options.hf_model
        if training == rollout != BF16:
            return MegatronSource(self.model, hf_config=hf_config)
        one_scale = self._options.rollout_scales == "matrix"
        return RequantizedSource(self.model, hf_config=hf_config, recipe=rollout, one_scale=one_scale)
