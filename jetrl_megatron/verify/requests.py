"""Requests to the processes of a verification: frozen dataclasses that travel as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

MODES = ("parity", "default", "bf16")
"""How an engine serves: with the recipe's arguments, with vLLM's own FP8 defaults, or a BF16 checkpoint."""

VARIANTS = {
    "parity": "FP8 training with the rollout's operators",
    "ordinary": "FP8 training with Megatron's own operators",
    "bf16": "BF16 training",
}
"""Which forward scores the tokens, with a title."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences that the engine generates at once, at temperature 1, past any end-of-sequence token.

    Attributes:
        name: key of its results.
        sequences, tokens: how many sequences, and generated tokens of each.
        prompt_tokens: length of each prompt, drawn at random from the vocabulary.
        prompts: token ids to continue instead; `sequences` and `prompt_tokens` are then not read.
        seed: of the prompts.
        weights: folder of a checkpoint that is loaded into the running engine before, as a weight update does.
        prefill: also compute the log-probs with the engine's own prefill.

    Raises:
        ValueError: a number is out of range, or a prompt is empty.
    """

    name: str
    sequences: int = 64
    tokens: int = 600
    prompt_tokens: int = 32
    prompts: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    weights: str | None = None
    prefill: bool = False

    def __post_init__(self) -> None:
        for field in ("sequences", "tokens", "prompt_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be 1 or more")
        if not all(self.prompts):
            raise ValueError("prompts holds an empty prompt: give at least one token id each")
        if not self.name or "/" in self.name:
            raise ValueError(f"name={self.name!r} must be a word without '/'")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(map(len, self.prompts), default=self.prompt_tokens) + self.tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What one engine does.

    Attributes:
        checkpoint: folder in Hugging Face format: block FP8, or BF16 for mode "bf16".
        recipe: `Fp8BlockRecipe.to_dict` of the recipe to serve; None for mode "bf16".
        mode: one of `MODES`.
        cuda: whether the engine runs on GPUs.
        tensor_parallel: ranks.
        batches: in order; weights that one loads stay for those behind it.
        engine_args: further keyword arguments of `vllm.LLM`, on top of the mode's.
        environment: further variables, on top of the mode's.

    Raises:
        ValueError: the mode is unknown, the recipe is missing, or a name is used twice.
    """

    checkpoint: str
    recipe: Mapping[str, Any] | None = None
    mode: str = "parity"
    cuda: bool = False
    tensor_parallel: int = 1
    batches: tuple[Batch, ...] = ()
    engine_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown: use one of {', '.join(MODES)}")
        if self.mode == "parity" and self.recipe is None:
            raise ValueError("mode='parity' needs a recipe: pass the one that the checkpoint carries")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} must be 1 or more")
        names = [batch.name for batch in self.batches]
        if len(set(names)) < len(names):
            raise ValueError(f"batches are named {names}: results go by name, so give each its own")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> EngineRequest:
        """From the JSON form, `dataclasses.asdict`.

        Raises:
            ValueError: a key is no field.
        """
        values = checked_fields(cls, fields)
        batches = tuple(_batch(batch) for batch in values.get("batches", ()))
        return cls(**{**values, "batches": batches})


def _batch(fields: Mapping[str, Any]) -> Batch:
    values = checked_fields(Batch, fields)
    return Batch(**{**values, "prompts": tuple(tuple(prompt) for prompt in values.get("prompts", ()))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """One forward over some of the batches.

    Attributes:
        variant: one of `VARIANTS`.
        batches: names.
        checkpoint: torch_dist checkpoint with the weights; None takes those of the request's Hugging Face folder.

    Raises:
        ValueError: the variant is unknown.
    """

    variant: str
    batches: tuple[str, ...]
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r} is unknown: use one of {', '.join(VARIANTS)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """What the Megatron ranks do: optimizer steps, or scores.

    Attributes:
        hf_model: folder with config.json, and with BF16 weights unless a checkpoint has them.
        recipe: `Fp8BlockRecipe.to_dict`.
        tensor_parallel: ranks.
        sequence_parallel: split activations between tensor-parallel linears along the tokens.
        checkpoint: torch_dist checkpoint with the weights that optimizer steps start from; None takes `hf_model`.
        rollouts: file with the tokens to score.
        scorings: forwards over them; the first one with variant "parity" is also compared with the engine.
        description: file with the engine's description, JSON; None leaves the precision flow unchecked.
        exports: folder of the export that each checkpoint's weights must equal; key "" stands for no checkpoint.
        served: likewise the fields of the `ServedPiece`s that an engine multiplied with.
        tokens_per_forward: tokens that are packed into one forward.
        steps, learning_rate, seed: optimizer steps to take, with Adam on random tokens.
        out: folder for what the steps make: "checkpoint" (torch_dist) and "rollout" (block FP8).
    """

    hf_model: str
    recipe: Mapping[str, Any]
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    checkpoint: str | None = None
    rollouts: str = ""
    scorings: tuple[Scoring, ...] = ()
    description: str | None = None
    exports: Mapping[str, str] = dataclasses.field(default_factory=dict)
    served: Mapping[str, Sequence[Sequence[Any]]] = dataclasses.field(default_factory=dict)
    tokens_per_forward: int = 16384
    steps: int = 0
    learning_rate: float = 1e-4
    seed: int = 0
    out: str = ""

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainingRequest:
        """From the JSON form, `dataclasses.asdict`.

        Raises:
            ValueError: a key is no field.
        """
        values = checked_fields(cls, fields)
        scorings = tuple(
            Scoring(**{**checked_fields(Scoring, scoring), "batches": tuple(scoring["batches"])})
            for scoring in values.get("scorings", ())
        )
        return cls(**{**values, "scorings": scorings})


def checked_fields(kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as a new dict.

    Raises:
        ValueError: a key is no field of the dataclass.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"request fields {unknown} are unknown: use {', '.join(sorted(known))}")
    return dict(fields)
