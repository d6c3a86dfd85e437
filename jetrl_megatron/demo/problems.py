"""Grade-school word problems with a known answer, and what a training step makes of them.

The problems are reasoning-gym's gsm_symbolic: templates filled with names and numbers, generated offline.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Example:
    """A problem as token ids; the loss counts the answer alone.

    Attributes:
        prompt: the chat up to where the assistant begins.
        answer: the assistant's answer and the token that ends its turn.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each token of the answer, 0 for each of the prompt; as long as `tokens`."""
        return (0,) * len(self.prompt) + (1,) * len(self.answer)


def problems(count: int, seed: int) -> list[tuple[str, str]]:
    """The first `count` problems of a seed: question and answer, an integer in decimal digits.

    Raises:
        ValueError: count is no positive number.
    """
    import reasoning_gym

    if count < 1:
        raise ValueError(f"count={count} problems: ask for 1 or more")
    data = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed)
    return [(data[i]["question"], data[i]["answer"]) for i in range(count)]


def tokenize_answer(tokenizer: Any, question: str, answer: str) -> Example:
    """Puts a question and its answer through the tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template and an end-of-turn token as `eos_token_id`.
    """
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    # A sentence: answers that are digits alone would teach the model to say nothing else.
    ids = tokenizer.encode(f"The answer is {answer}.", add_special_tokens=False)
    return Example(tuple(prompt), (*ids, tokenizer.eos_token_id))


def examples(count: int, seed: int, tokenizer: str | Path) -> list[Example]:
    """The first `count` problems of a seed as token ids.

    Args:
        tokenizer: folder of a Hugging Face tokenizer with a chat template.

    Raises:
        ValueError: count is no positive number.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(tokenizer))
    return [tokenize_answer(loaded, question, answer) for question, answer in problems(count, seed)]
