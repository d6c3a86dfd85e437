"""Problems of reasoning-gym, and what an answer to one is worth."""

from __future__ import annotations

import json
import re
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
    """Problems to train on, always the same for a seed, held-out ones that they do not repeat, and a scorer."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tokenizer = AutoTokenizer.from_pretrained(str(options.hf_model))
        self._data = dataset(options, _HELD_OUT_SEED, max(options.eval_problems, 1))
        self.held_out = [self._problem(self._data[index]) for index in range(options.eval_problems)]
        questions = {problem.entry["question"] for problem in self.held_out}
        wanted = options.steps * options.prompts
        # Seeds lie far apart, since an entry is drawn with seed + index.
        fresh = dataset(options, options.seed << 20, _SPARE * wanted)
        self.problems: list[Problem] = []
        for index in range(_SPARE * wanted):
            if len(self.problems) < wanted and fresh[index]["question"] not in questions:
                self.problems.append(self._problem(fresh[index]))
        if len(self.problems) < wanted:
            raise ValueError(f"task={options.task!r}: too few problems beside the held-out ones, use a larger one")
        self.longest_prompt = max(len(problem.prompt) for problem in [*self.problems, *self.held_out])

    def score(self, output: Sequence[int], problem: Problem) -> float:
        """Between 0 and 1; 1 is right. The answer is the last match of --answer, or in <answer> tags, or everything."""
        text = self._tokenizer.decode(output, skip_special_tokens=True).strip()
        found = [match[0] for match in re.finditer(self._options.answer or "(?!)", text)]
        return float(self._data.score_answer((found or [extract_answer(text) or text])[-1], problem.entry))

    def _problem(self, entry: dict[str, Any]) -> Problem:
        chat = [{"role": "user", "content": f"{entry['question']}\n{self._options.instruction}".strip()}]
        ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return Problem(tuple(ids), entry)


def dataset(options: Options, seed: int, size: int) -> Any:
    """A dataset of reasoning-gym. Raises ValueError if there is none of the name, or it has no such settings."""
    settings = {**json.loads(options.task_config), "seed": seed, "size": size}
    try:
        return reasoning_gym.create_dataset(options.task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task={options.task!r} with task_config={options.task_config}: {error}") from error
