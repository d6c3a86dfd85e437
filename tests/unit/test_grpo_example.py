"""The parts of `examples/grpo` that need no engine: options, loss, problems, metrics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from examples.grpo.loop import Log
from examples.grpo.options import BF16, Options, parse
from examples.grpo.policy import Sample, advantages, grpo_loss
from examples.grpo.task import Task
from examples.grpo.train import prepare
from jetrl_megatron.demo.tiny import write_tiny
from jetrl_megatron.recipe import JETRL_FP8

WRONG = {
    "precision='fp8': use one of bf16, bf16_train_fp8_rollout, jetrl_fp8": {"precision": "fp8"},
    "steps=0: use 1 or more": {"steps": 0},
    "group=1: use 2 or more": {"group": 1},
    "kl=-0.1: use 0 or more": {"kl": -0.1},
    "clip=1.0: use a number between 0 and 1": {"clip": 1.0},
    "learning_rate=0.0: use a number between 0 and 1": {"learning_rate": 0.0},
    "updates=9: a step has 8 answers, use no more": {"prompts": 2, "group": 4, "updates": 9},
    "out='': name a folder": {"out": ""},
    "tp=4: smollm2 is padded for 1 and 2": {"tp": 4},
    "ablate='fprop': use dgrad, wgrad, saved_activation": {"ablate": "fprop"},
    "ablate='wgrad': training is BF16 already, use precision jetrl_fp8": {"precision": "bf16", "ablate": "wgrad"},
    "rollout_scales='fp32': use precision jetrl_fp8 with it": {"precision": "bf16", "rollout_scales": "fp32"},
    "task_config='[1]': use a JSON object": {"task_config": "[1]"},
    "task_config='{': use a JSON object": {"task_config": "{"},
    "answer='(': use a regular expression": {"answer": "("},
    "rollout_memory=0.5: use 1 or more": {"rollout_memory": 0.5},
    "transport='ipc': use one of auto, shm": {"transport": "ipc"},
}


@pytest.mark.parametrize("message", WRONG)
def test_options_refuse_with_name_value_and_way_out(message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Options(**{"out": "x", **WRONG[message]})
    assert message in str(raised.value)


def test_parse_ends_with_a_usage_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(["--out", "x", "--steps", "0"])
    assert raised.value.code == 2 and "steps=0: use 1 or more" in capsys.readouterr().err


def test_parse_reads_every_option() -> None:
    given = Options(out="x", precision="bf16", steps=7, learning_rate=0.5, tensorboard=True, task_config='{"a": 1}')
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(given).items()]
    flags = [argument.removesuffix("=True") for argument in arguments if not argument.endswith("=False")]
    assert parse(flags) == given


def test_recipes_follow_precision_and_ablations() -> None:
    assert Options(out="x", precision="bf16").recipes == (BF16, BF16)
    assert Options(out="x", precision="bf16_train_fp8_rollout").recipes == (BF16, JETRL_FP8)
    ablated = dataclasses.replace(JETRL_FP8, dgrad="bf16", saved_activation="bf16")
    assert Options(out="x", ablate="dgrad,saved_activation").recipes == (ablated, ablated)
    other = dataclasses.replace(JETRL_FP8, scale_format="fp32")
    for scales in ("fp32", "matrix"):
        assert Options(out="x", rollout_scales=scales).recipes == (JETRL_FP8, other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "no_such_task"}, "task='no_such_task' with task_config={}: Dataset 'no_such_task' not registered"),
        ({"task_config": '{"no_such_setting": 1}'}, "no_such_setting"),
        ({"model": "/no/such/folder"}, "model='/no/such/folder': no config.json there, use a folder or smollm2, tiny"),
    ],
)
def test_prepare_refuses_before_anything_is_written(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        prepare(Options(**{"out": str(tmp_path / "run"), "model": "tiny", **fields}))
    assert message in str(raised.value) and not (tmp_path / "run").exists()


def test_prepare_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds something that is no run, name another folder"):
        prepare(Options(out=str(tmp_path), model="tiny"))


def test_prepare_resumes_the_same_run_alone(tmp_path: Path) -> None:
    options = Options(out=str(tmp_path / "run"), model="tiny")
    prepare(options)
    prepare(dataclasses.replace(options, steps=500, time_budget=60.0))
    with pytest.raises(ValueError, match=r"holds a run with other options \(kl: 0.001 there, 0.5 now\)"):
        prepare(dataclasses.replace(options, kl=0.5))
    with pytest.raises(ValueError, match="steps=499: the run in out was to have more, use no fewer"):
        prepare(dataclasses.replace(options, steps=499))


def test_rollouts_of_other_models_have_other_checkpoints(tmp_path: Path) -> None:
    """They share a folder, and differ in more than weights, which alone are replaced while an engine runs."""
    tiny = Options(out="x", shared=str(tmp_path), model="tiny")
    others = [dataclasses.replace(tiny, model="a/tiny"), dataclasses.replace(tiny, rollout_scales="fp32")]
    assert len({options.checkpoint for options in (tiny, *others)}) == 3
    assert {options.checkpoint.parent for options in (tiny, *others)} == {tmp_path}


def test_advantages_are_standard_scores_of_each_group_close() -> None:
    """Close: 1e-6 is added to the standard deviation."""
    found = advantages([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5], 4)
    assert found == [pytest.approx(value, abs=1e-5) for value in (1, -1, -1, 1, 0, 0, 0, 0)]


def _samples(**columns: list[list[float]]) -> list[Sample]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    tensors = [{name: torch.tensor(values) for name, values in row.items()} for row in rows]
    return [
        Sample(torch.zeros(5).long(), 1, advantage, **row) for advantage, row in zip((1.0, -2.0), tensors, strict=True)
    ]


def test_grpo_loss_of_an_unchanged_policy_has_the_policy_gradient_exact() -> None:
    old = [[-1.0, -2.0, -0.5], [-0.25, -3.0]]
    logp_o = torch.tensor([*old[0], *old[1]], requires_grad=True)
    samples = _samples(rollout_o=old, old_o=old, reference_o=old)
    loss, sums = grpo_loss(logp_o, samples, Options(out="x"))
    loss.backward()
    assert logp_o.grad is not None and logp_o.grad.tolist() == [-1, -1, -1, 2, 2]
    assert float(loss.detach()) == -3 + 4 and {name: float(value) for name, value in sums.items()} == {
        "kl": 0,
        "clipped": 0,
        "kl_clamped": 0,
    }


def test_grpo_loss_clips_what_gains_and_adds_kl_close() -> None:
    """Close: exponentials in float32."""
    old, logp = [[-1.0, -1.0], [-1.0]], torch.tensor([-0.5, -1.1, -0.5], requires_grad=True)
    samples = _samples(rollout_o=old, old_o=old, reference_o=[[-1.0, -1.0], [-0.5]])
    options = Options(out="x", clip=0.2, kl=0.1)
    loss, sums = grpo_loss(logp, samples, options)
    ratio = (logp.detach() + 1).exp()
    d = torch.tensor([-0.5, 0.1, 0.0])
    kl = (d.exp() - 1 - d).sum()
    # Gains are clipped at 1.2; a ratio that loses (advantage -2) counts as it is.
    expected = -1.2 - ratio[1] + 2 * ratio[2] + 0.1 * kl
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(sums["kl"], kl)
    assert int(sums["clipped"]) == 2


def test_grpo_loss_bounds_the_kl_of_a_token_exact() -> None:
    """A token that the first policy liked e^100 or e^-100 times as well counts 10, and pulls at nothing."""
    old = [[-1.0, -101.0], [-1.0]]
    logp_o = torch.tensor([-1.0, -101.0, -1.0], requires_grad=True)
    samples = _samples(rollout_o=old, old_o=old, reference_o=[[-1.0, -1.0], [-101.0]])
    loss, sums = grpo_loss(logp_o, samples, Options(out="x", kl=1.0))
    loss.backward()
    assert (float(sums["kl"]), int(sums["kl_clamped"])) == (20.0, 2)
    assert logp_o.grad is not None and logp_o.grad.tolist() == [-1, -1, 2]


def test_grpo_loss_truncates_importance_ratios_close() -> None:
    """Close: exponentials in float32."""
    rollout, old = [[-1.0, -5.0], [-1.0]], [[-1.0, -1.0], [-1.5]]
    samples = _samples(rollout_o=rollout, old_o=old)
    logp_o = torch.tensor([-1.0, -1.0, -1.5], requires_grad=True)
    loss, _ = grpo_loss(logp_o, samples, Options(out="x", kl=0.0, truncate_ratios=2.0))
    loss.backward()
    assert logp_o.grad is not None
    torch.testing.assert_close(logp_o.grad, torch.tensor([-1.0, -2.0, 2.0 * 2.718281828**-0.5]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def _task(tiny: Path, **fields: object) -> Task:
    shared = {
        "task": "spell_backward",
        "task_config": '{"max_word_len": 5}',
        "steps": 5,
        "prompts": 4,
        "model": str(tiny),
    }
    return Task(Options(**{"out": "x", "instruction": "now", "eval_problems": 16, **shared, **fields}))


def test_task_gives_each_seed_its_problems_and_repeats_no_held_out_one(tiny: Path) -> None:
    task, again, other = _task(tiny), _task(tiny, steps=7), _task(tiny, seed=1)
    questions = [problem.entry["question"] for problem in task.problems]
    assert questions == [problem.entry["question"] for problem in again.problems][: len(questions)]
    assert questions != [problem.entry["question"] for problem in other.problems]
    held_out = {problem.entry["question"] for problem in task.held_out}
    assert len(questions) == 20 and not held_out & set(questions)
    assert held_out == {problem.entry["question"] for problem in other.held_out}


def test_task_scores_answers_with_and_without_tags(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny))
    task = _task(tiny)
    problem = task.problems[0]
    assert tokenizer.decode(problem.prompt).endswith("now<assistant>")
    answer = tokenizer.encode(problem.entry["answer"].lower())
    assert task.score([*answer, tokenizer.eos_token_id], problem) == 1.0
    assert task.score(answer[:1], problem) == pytest.approx(1 / len(answer))
    assert task.score([], problem) == 0.0


def test_task_takes_the_last_match_of_a_pattern_for_the_answer(tiny: Path) -> None:
    from transformers import AutoTokenizer

    task = _task(tiny, answer="[a-z]+")
    problem = task.problems[0]
    said = AutoTokenizer.from_pretrained(str(tiny)).encode(f"it is {problem.entry['answer'].lower()} .")
    assert task.score(said, problem) == 1.0


def test_task_takes_the_whole_match_of_a_pattern_with_groups(tiny: Path) -> None:
    from transformers import AutoTokenizer

    task = _task(tiny, answer="(x|y)?[a-z]+")
    problem = task.problems[0]
    said = AutoTokenizer.from_pretrained(str(tiny)).encode(f"it is {problem.entry['answer'].lower()} .")
    assert task.score(said, problem) == 1.0


def test_task_with_too_few_problems_is_refused(tiny: Path) -> None:
    with pytest.raises(ValueError, match="too few problems beside the held-out ones, use a larger one"):
        _task(tiny, task="coin_flip", task_config='{"min_trials": 1, "max_trials": 1}', eval_problems=2000)


def test_log_drops_what_comes_again(tmp_path: Path) -> None:
    rows = [{"step": step, "seconds": {}} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "sec')
    log = Log(Options(out=str(tmp_path)), 2)
    log.write({"step": 2, "seconds": {"step": 1.0}})
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == [*rows[:2], {"step": 2, "seconds": {"step": 1.0}}]


def test_example_is_read_in_one_sitting() -> None:
    folder = Path(__file__).parents[2] / "examples/grpo"
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) <= 600
