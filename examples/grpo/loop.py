"""The loop, on every rank; rank 0 alone has the engine, the problems and the metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import fmean as mean
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from examples.grpo.options import BF16, Options
from examples.grpo.policy import Policy, Sample, advantages
from examples.grpo.task import Problem, Task
from jetrl_megatron.sync import HostSource, JetRLWeightSynchronizer
from jetrl_megatron.verify.files import write_whole
from jetrl_megatron.verify.live_engine import LiveEngine, live_request
from jetrl_megatron.verify.logprobs import LogProbs
from jetrl_megatron.verify.model import load_training_state, save_training_state, saved_steps
from jetrl_megatron.verify.progress import Clock
from jetrl_megatron.verify.rollouts import ScoredSequence


class Log:
    """Metrics: a line of JSON for each step, TensorBoard on request, and a progress bar."""

    def __init__(self, options: Options, first: int) -> None:
        self._path = options.folder / "metrics.jsonl"
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        # What a killed run wrote behind its last checkpoint comes again.
        write_whole(self._path, "".join(li for li in lines if li.endswith("\n") and json.loads(li)["step"] < first))
        self._bar = tqdm(total=options.steps, initial=first, desc=options.precision, unit="step")
        self._writer: Any = None
        if options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(options.folder / "tensorboard"), purge_step=first)

    def write(self, row: dict[str, Any]) -> None:
        """Writes the metrics of a step."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        groups = {"": row, "mismatch/": row.get("mismatch", {}), "seconds/": row["seconds"]}
        for group, values in groups.items() if self._writer else ():
            for name in [name for name, value in values.items() if isinstance(value, (int, float))]:
                self._writer.add_scalar(group + name, values[name], row["step"])
        if "reward" in row:
            shown = {"reward": row["reward"], "tok/s": row["tokens_per_second"]}
            shown |= {"mismatch": row["mismatch"]["token_mult_prob_error"], **row["seconds"]}
            self._bar.set_postfix({name: f"{value:.6g}" for name, value in shown.items()}, refresh=False)
            self._bar.update()


def start_engine(options: Options, longest_prompt: int) -> LiveEngine:
    """The rollout engine: with the recipe's settings, or for the baselines with vLLM's own."""
    recipe, ours = options.recipes[1], options.precision == "jetrl_fp8" or not torch.cuda.is_available()
    request = live_request(
        options.checkpoint,
        recipe=recipe,
        mode="bf16" if recipe == BF16 else "parity" if ours else "default",
        sequences=options.prompts * options.group,
        longest=longest_prompt + options.max_tokens,
        tensor_parallel=options.tp,
        kv_cache_gib=options.rollout_memory,
    )
    return LiveEngine(request, options.folder / "engine.log")


class Run:
    """One rank's part of a run."""

    def __init__(self, options: Options, deadline: float) -> None:
        self.options, self.deadline, self.clock = options, deadline, Clock()
        self.engine: LiveEngine | None = None
        # Ranks wait for the engine here, for as long as it takes, and not on a GPU that it runs on.
        self.waiting = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        if dist.get_rank() == 0:
            self.task = Task(options)
            # Before the model, which would wait for it in vain if it does not start.
            self.engine = start_engine(options, self.task.longest_prompt)
        dist.barrier(self.waiting)
        self.policy = Policy(options, self.clock)
        self.source = self.policy.weight_source()
        ipc = torch.cuda.is_available() and options.transport == "auto"
        own: dict[str, Any] = {"senders": "all"} if ipc else {"receivers": options.tp}
        self.sender = JetRLWeightSynchronizer(self.source if ipc else HostSource(self.source), **own)

    def main(self) -> None:
        """Runs from the last checkpoint to the end, or to the deadline."""
        options, state = self.options, (self.policy.model, self.policy.optimizer)
        checkpoints = options.folder / "checkpoints"
        first = max(saved_steps(checkpoints), default=0)
        if first:
            load_training_state(*state, saved_steps(checkpoints)[first])
        log, started = Log(options, first) if self.engine else None, time.time()
        for step in range(first, options.steps):
            row = self.step(step)
            if log:
                log.write(row)
            # The next step may take half as long again as the mean of those before.
            ahead = 1.5 * (time.time() - started) / (step + 1 - first)
            stop = self.shared(time.time() + ahead > self.deadline)
            if stop or (step + 1) % options.checkpoint_every == 0 or step + 1 == options.steps:
                save_training_state(*state, checkpoints, step + 1)
            if stop:
                break
        else:
            self.clock.seconds = {}
            self.sync(options.steps + 1)
            if log:
                log.write({"step": options.steps, **self.evaluate(), "seconds": self.clock.seconds})
        if self.engine:
            self.engine.close()

    def step(self, step: int) -> dict[str, Any]:
        """One rollout and the training on it; returns the metrics, on rank 0."""
        options, clock, policy = self.options, self.clock, self.policy
        clock.seconds = {}
        with clock("step"):
            self.sync(step + 1)
            evaluation = self.evaluate() if options.eval_every and step % options.eval_every == 0 else {}
            with clock("rollout"):
                samples, row = self.shared(self.roll_out(step) if self.engine else None)
            with clock("log_prob"):
                policy.score(policy.model, samples, "old_o")
            if policy.reference:
                with clock("reference"):
                    policy.score(policy.reference, samples, "reference_o")
            updates = [policy.update(samples[part :: options.updates]) for part in range(options.updates)]
        if not self.engine:
            return {}
        row |= {name: mean(update[name] for update in updates) for name in updates[0]}
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        row |= {"tokens_per_second": row["tokens"] / clock.seconds["rollout"], "peak_memory_gib": peak}
        logprobs = LogProbs.of(*([getattr(s, side).tolist() for s in samples] for side in ("rollout_o", "old_o")))
        row["entropy"] = -float(logprobs.train[logprobs.mask].mean())  # estimated from the drawn tokens
        row |= {"mismatch": logprobs.mismatch.to_dict(), "positions": logprobs.rows_by_position()}
        return {"step": step, **row, **evaluation, "seconds": clock.seconds}

    def sync(self, version: int) -> None:
        """The policy's weights into the engine."""
        with self.clock("sync_quantize"):
            self.source.refresh()
        with self.clock("sync_send_and_load"):
            if self.engine:
                self.engine.start_receiving(self.sender.endpoints)
            self.sender.update(version)
            if self.engine:
                self.engine.received()

    def roll_out(self, step: int) -> tuple[list[Sample], dict[str, Any]]:
        """Answers to the step's problems with their advantages, and what there is to say about them. Rank 0."""
        options, first = self.options, step * self.options.prompts
        drawn = self.task.problems[first : first + options.prompts]
        problems = [problem for problem in drawn for _ in range(options.group)]
        answers, rewards = self.answer(problems, (options.seed * 1_000_003 + step) * len(problems))
        samples = [
            Sample(torch.tensor([*a.prompt, *a.output]), len(a.prompt), advantage, torch.tensor(a.logprobs))
            for a, advantage in zip(answers, advantages(rewards, options.group), strict=True)
        ]
        lengths, accuracy = [len(answer.output) for answer in answers], mean(reward >= 1 for reward in rewards)
        cut = mean(length == options.max_tokens for length in lengths)
        return samples, {"reward": mean(rewards), "accuracy": accuracy, "tokens": sum(lengths), "truncated": cut}

    def evaluate(self) -> dict[str, float]:
        """Share of held-out problems that are answered right, greedily. Rank 0 alone knows."""
        if not self.engine or not self.task.held_out:
            return {}
        with self.clock("evaluate"):
            _, rewards = self.answer(self.task.held_out, 0, temperature=0.0)
        return {"held_out_accuracy": mean(reward >= 1 for reward in rewards)}

    def answer(self, problems: Sequence[Problem], seed: int, **more: Any) -> tuple[list[ScoredSequence], list[float]]:
        """An answer to each problem, and its reward."""
        assert self.engine
        more |= {"max_tokens": self.options.max_tokens, "ignore_eos": self.options.ignore_end}
        answers = self.engine.generate([problem.prompt for problem in problems], seed=seed, **more)
        return answers, [self.task.score(a.output, problem) for a, problem in zip(answers, problems, strict=True)]

    def shared(self, value: Any) -> Any:
        """What rank 0 has, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.waiting)
        return box[0]
