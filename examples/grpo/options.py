"""What a run was asked to do: one frozen object, made from the command line and kept beside the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from jetrl_megatron.demo.models import WRITTEN
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

BF16 = Fp8BlockRecipe(ignore=("*",))
"""The recipe that quantises nothing: Megatron's own BF16 linears, and BF16 weights on their way to the engine."""
RECIPES = {"bf16": (BF16, BF16), "bf16_train_fp8_rollout": (BF16, JETRL_FP8), "jetrl_fp8": (JETRL_FP8, JETRL_FP8)}
"""Recipes of training and of the rollout, by precision."""
_ABLATIONS = ("dgrad", "wgrad", "saved_activation")
_CHOICES = {"precision": tuple(RECIPES), "operators": ("parity", "ordinary"), "transport": ("auto", "shm")}
_CHOICES["rollout_scales"] = ("ue8m0", "fp32", "matrix")
_COUNTS = ("tp", "steps", "prompts", "updates", "max_tokens", "checkpoint_every", "tokens_per_forward")
_MAY_BE_0 = ("seed", "kl", "max_grad_norm", "eval_every", "eval_problems", "truncate_ratios", "time_budget")
_AT_LEAST = {**dict.fromkeys(_COUNTS, 1), **dict.fromkeys(_MAY_BE_0, 0), "group": 2, "rollout_memory": 1}
_MAY_CHANGE = ("out", "shared", "steps", "checkpoint_every", "time_budget", "tensorboard", "transport")


def _read(parser: Any, text: str) -> Any:
    try:
        return parser(text)
    except (json.JSONDecodeError, re.error):
        return None


def _option(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A run. Raises ValueError where a field is out of range, or contradicts another one."""

    out: str = _option("", "folder of the run; one that holds a run is resumed")
    shared: str = _option("", "folder for what runs have in common: model and rollout's checkpoint; empty: that of out")
    precision: str = _option("jetrl_fp8", f"of training and rollout: {', '.join(RECIPES)}")
    model: str = _option("smollm2", "BF16 Hugging Face folder, smollm2 (135M, Instruct) or tiny (random, for a CPU)")
    tp: int = _option(1, "tensor-parallel size of both sides, a GPU each")
    seed: int = _option(0, "of problems and sampling")
    task: str = _option("chain_sum", "dataset of reasoning-gym")
    task_config: str = _option("{}", "its settings, JSON")
    instruction: str = _option("Reply with the answer alone.", "what follows each question")
    answer: str = _option("", "regular expression of an answer, whose last match counts; empty: all of it counts")
    steps: int = _option(100, "rollouts, each followed by training on it")
    prompts: int = _option(16, "problems of a step")
    group: int = _option(8, "answers to each of them, which are compared")
    updates: int = _option(1, "optimizer steps on a rollout; with one, nothing is ever clipped")
    max_tokens: int = _option(256, "longest answer")
    ignore_end: bool = _option(False, "have every answer as long, to measure with")
    learning_rate: float = _option(1e-6, "of Adam, constant")
    max_grad_norm: float = _option(1.0, "gradients with a larger norm are scaled down to it; 0: never")
    clip: float = _option(0.2, "a ratio counts between 1 - clip and 1 + clip")
    kl: float = _option(1e-3, "coefficient of the KL to the first policy (k3, at most 10 a token); 0 leaves it out")
    eval_every: int = _option(10, "steps between greedy evaluations on held-out problems; 0: at the end alone")
    eval_problems: int = _option(64, "how many of those")
    checkpoint_every: int = _option(10, "steps between checkpoints")
    tokens_per_forward: int = _option(16384, "tokens packed into one forward; a longer sequence has one of its own")
    operators: str = _option("parity", "beside training's linears: parity, the rollout's, or ordinary, Megatron's")
    ablate: str = _option("", f"comma-separated, of {', '.join(_ABLATIONS)}: in BF16 instead of FP8")
    rollout_scales: str = _option("ue8m0", "of the rollout: training's ue8m0, fp32, or matrix: fp32, one for a weight")
    truncate_ratios: float = _option(0.0, "correct for the rollout's policy with ratios up to this; 0: do not")
    rollout_memory: float = _option(8.0, "GiB of each GPU for the engine's keys and values")
    transport: str = _option("auto", "of weights: auto, or shm where processes cannot share a GPU's memory (CUDA IPC)")
    time_budget: float = _option(0.0, "seconds after which the run saves and stops, to be resumed; 0: none")
    tensorboard: bool = _option(False, "also write TensorBoard events")

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            self._require(getattr(self, name) in allowed, name, f"use one of {', '.join(allowed)}")
        for name, least in _AT_LEAST.items():
            self._require(getattr(self, name) >= least, name, f"use {least} or more")
        for name in ("clip", "learning_rate"):
            self._require(0 < getattr(self, name) < 1, name, "use a number between 0 and 1")
        answers, fp8 = self.prompts * self.group, self.precision == "jetrl_fp8"
        self._require(self.updates <= answers, "updates", f"a step has {answers} answers, use no more")
        self._require(bool(self.out), "out", "name a folder")
        self._require(self.model not in WRITTEN or self.tp <= 2, "tp", f"{self.model} is padded for 1 and 2")
        self._require(not set(self._ablated) - set(_ABLATIONS), "ablate", f"use {', '.join(_ABLATIONS)}")
        self._require(fp8 or not self.ablate, "ablate", "training is BF16 already, use precision jetrl_fp8")
        self._require(fp8 or self.rollout_scales == "ue8m0", "rollout_scales", "use precision jetrl_fp8 with it")
        config, answer = _read(json.loads, self.task_config), _read(re.compile, self.answer)
        self._require(isinstance(config, dict), "task_config", 'use a JSON object such as {"max_terms": 2}')
        self._require(answer is not None, "answer", r"use a regular expression such as -?\d+")

    def _require(self, good: bool, name: str, way_out: str) -> None:
        if not good:
            raise ValueError(f"{name}={getattr(self, name)!r}: {way_out}")

    @property
    def _ablated(self) -> list[str]:
        return [name for name in self.ablate.split(",") if name]

    @property
    def recipes(self) -> tuple[Fp8BlockRecipe, Fp8BlockRecipe]:
        """Of training and of the rollout."""
        if self.precision != "jetrl_fp8":
            return RECIPES[self.precision]
        recipe = dataclasses.replace(JETRL_FP8, **dict.fromkeys(self._ablated, "bf16"))
        scales = "ue8m0" if self.rollout_scales == "ue8m0" else "fp32"
        return recipe, dataclasses.replace(recipe, scale_format=scales)

    @property
    def folder(self) -> Path:
        """`out`, absolute."""
        return Path(self.out).absolute()

    @property
    def hf_model(self) -> Path:
        """The BF16 model that training starts from."""
        return (Path(self.shared or self.out) / self.model if self.model in WRITTEN else Path(self.model)).absolute()

    @property
    def checkpoint(self) -> Path:
        """What the rollout's engine starts from."""
        name = re.sub(r"\W+", "-", f"rollout-{self.model}-{self.recipes[1].fingerprint}")
        return self.hf_model if self.recipes[1] == BF16 else (Path(self.shared or self.out) / name).absolute()

    def require_resumable(self, before: dict[str, Any]) -> None:
        """Raises ValueError if the run in the folder was another one."""
        now = {name: value for name, value in dataclasses.asdict(self).items() if name not in _MAY_CHANGE}
        changed = "; ".join(f"{n}: {before.get(n)!r} there, {v!r} now" for n, v in now.items() if v != before.get(n))
        self._require(not changed, "out", f"holds a run with other options ({changed}): name another folder")
        self._require(self.steps >= before.get("steps", 1), "steps", "the run in out was to have more, use no fewer")


def parse(arguments: list[str] | None = None) -> Options:
    """Options from a command line; errors end the process with a usage line."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo.train", description="GRPO with Megatron and vLLM.")
    for field in dataclasses.fields(Options):
        kind: Any = {"action": "store_true"} if field.default is False else {"type": type(field.default)}
        help = f"{field.metadata['help']} (default: %(default)s)"
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, help=help, **kind)
    try:
        return Options(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
