"""Problems of reasoning-gym, and what an answer to one is worth."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import reasoning_gym
from reasoning_gym.utils import extract_answer
from transformers import AutoTokenizer

from examples.grpo.options import Options

_HELD_OUT_SEED = 1 << 30
_SPARE = 8


class Problem(NamedTuple):
    """A problem: token ids of the chat up to where the assistant begins, and reasoning-gym's entry."""

    prompt: tuple[int, ...]
    entry: dict[str, Any]


class Task:
    """Problems to train on, which do not repeat held-out ones, and a scorer."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tokenizer = AutoTokenizer.from_pretrained(str(options.hf_model))
        self._data = dataset(options, _HELD_OUT_SEED, max(options.eval_problems, 1))
        self._held_out = [self._data[i] for i in range(options.eval_problems)]
        self.held_out = [self._problem(entry) for entry in self._held_out]
        questions = {entry["question"] for entry in self._held_out}
        wanted = options.steps * options.prompts
        # Seeds far apart: entry i of a dataset is drawn with seed + i.
        data = dataset(options, options.seed * (1 << 20), _SPARE * wanted)
        fresh = (entry for entry in (data[i] for i in range(_SPARE * wanted)) if entry["question"] not in questions)
        self._entries = list(itertools.islice(fresh, wanted))
        if len(self._entries) < wanted:
            raise ValueError(f"task={options.task} has too few problems beside the held-out ones: use a larger one")

    @property
    def longest_prompt(self) -> int:
        """In tokens, of all problems."""
        return max(len(self._problem(entry).prompt) for entry in [*self._entries, *self._held_out])

    def problems(self, step: int) -> list[Problem]:
        """Those of a step; always the same."""
        first = step * self._options.prompts
        return [self._problem(entry) for entry in self._entries[first : first + self._options.prompts]]

    def score(self, output: Sequence[int], problem: Problem) -> float:
        """Between 0 and 1; 1 is right. What stands in <answer> tags is the answer, or else everything is."""
        text = self._tokenizer.decode(output, skip_special_tokens=True).strip()
        answer = extract_answer(text) or text
        if self._options.scorer == "math-verify":
            from math_verify import parse, verify

            return float(verify(parse(str(problem.entry["answer"])), parse(answer)))
        return float(self._data.score_answer(answer, problem.entry))

    def _problem(self, entry: dict[str, Any]) -> Problem:
        chat = [{"role": "user", "content": f"{entry['question']}\n{self._options.instruction}".strip()}]
        ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return Problem(tuple(ids), entry)


def dataset(options: Options, seed: int, size: int) -> Any:
    """A dataset of reasoning-gym. Raises ValueError if there is none of the name, or it has no such settings."""
    try:
        return reasoning_gym.create_dataset(
            options.task, **{**json.loads(options.task_config), "seed": seed, "size": size}
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task={options.task!r} with task_config={options.task_config}: {error}") from error
