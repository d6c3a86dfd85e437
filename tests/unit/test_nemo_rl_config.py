"""NeMo-RL configurations: each file in conf/ resolves, wrong ones are named, and NeMo-RL's schema takes the result."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron import cli
from jetrl_megatron.integrations.nemo_rl.checkout import nemo_rl_checkout
from jetrl_megatron.integrations.nemo_rl.command import read_config, run_script
from jetrl_megatron.integrations.nemo_rl.files import load_config
from jetrl_megatron.integrations.nemo_rl.resolution import resolve
from jetrl_megatron.recipe import JETRL_FP8, Fp8BlockRecipe

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
POLICIES = sorted(CONF.glob("grpo_*.yaml"))
OVERLAYS: tuple[tuple[Path, ...], ...] = ((), *((path,) for path in sorted((CONF / "overlays").glob("*.yaml"))))
COMBINATIONS = [
    pytest.param(policy, overlays, id="+".join(path.stem for path in (policy, *overlays)))
    for policy in POLICIES
    for overlays in OVERLAYS
]
MINIMAL = """
policy:
  precision: {precision}
  dtensor_cfg: {{enabled: false}}
  megatron_cfg: {{enabled: true, tensor_model_parallel_size: 2, pipeline_dtype: "${{policy.precision}}"}}
  generation:
    backend: vllm
    vllm_cfg: {{tensor_parallel_size: 2, precision: "${{policy.precision}}"}}
loss_fn: {{}}
cluster: {{num_nodes: 1}}
"""
needs_checkout = pytest.mark.skipif(nemo_rl_checkout() is None, reason="no NeMo-RL checkout on PYTHONPATH")


@pytest.fixture
def write(tmp_path: Path):
    """Writes a file that is complete but for NeMo-RL's defaults, with more on top; returns its path."""

    def write_file(more: str = "", precision: str = "jetrl_fp8", name: str = "run.yaml") -> Path:
        (tmp_path / "minimal.yaml").write_text(MINIMAL.format(precision=precision))
        (tmp_path / name).write_text(f"defaults: minimal.yaml\n{more}")
        return tmp_path / name

    return write_file


def test_conf_holds_the_policies_and_baselines():
    assert [path.stem for path in POLICIES] == [
        "grpo_llama3.3_70b_8n8g", "grpo_qwen3_32b_4n8g", "grpo_qwen3_8b_1n8g", "grpo_smoke_1n1g",
    ]  # fmt: skip
    assert len(OVERLAYS) == 3


@pytest.mark.parametrize(("policy", "overlays"), COMBINATIONS)
def test_conf_resolves(policy, overlays):
    resolved = read_config(policy, overlays)
    values = resolved.values["policy"]
    assert values["precision"] == "bfloat16"
    assert (resolved.recipe == JETRL_FP8) is not bool(overlays)
    assert set(resolved.origins) == {key for key, _ in _leaves(resolved.values)}
    if overlays:
        assert "jetrl" not in values and "vllm_kwargs" not in (
            values["generation"] if nemo_rl_checkout() is None else {}
        )
        return
    assert not [note for note in resolved.notes if "not promised" in note]
    generation = values["generation"]
    assert values["jetrl"] == generation["jetrl"] == {**JETRL_FP8.to_stamp(), "parity": True}
    assert generation["vllm_cfg"]["env_vars"] == JETRL_FP8.to_vllm_env()
    assert generation["vllm_cfg"]["precision"] == values["megatron_cfg"]["pipeline_dtype"] == "bfloat16"
    arguments = JETRL_FP8.to_vllm_engine_args()
    arguments.pop("dtype")
    assert generation["vllm_kwargs"] == arguments


@pytest.mark.parametrize("policy", POLICIES, ids=lambda path: path.stem)
def test_conf_uses_all_gpus(policy):
    values = read_config(policy).values
    megatron, cluster = values["policy"]["megatron_cfg"], values["cluster"]
    gpus = cluster["num_nodes"] * cluster["gpus_per_node"]
    model_parallel = megatron["tensor_model_parallel_size"] * megatron["pipeline_model_parallel_size"]
    assert gpus % model_parallel == 0
    assert values["policy"]["train_global_batch_size"] % (gpus // model_parallel) == 0
    samples = values["grpo"]["num_prompts_per_step"] * values["grpo"]["num_generations_per_prompt"]
    assert samples % values["policy"]["train_global_batch_size"] == 0
    assert f"_{cluster['num_nodes']}n{cluster['gpus_per_node']}g" in policy.stem


def test_resolve_carries_another_recipe(write):
    recipe = {"scale_format": "fp32", "num_layers_at_end_in_bf16": 2}
    resolved = read_config(write(f"policy: {{jetrl: {{parity: false, recipe: {json.dumps(recipe)}}}}}"))
    assert resolved.recipe == Fp8BlockRecipe(**recipe)
    generation = resolved.values["policy"]["generation"]
    assert generation["vllm_cfg"]["env_vars"]["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    assert "vllm_kwargs" not in generation
    assert resolved.notes == ("zero mismatch is not promised: policy.jetrl.parity is false",)


def test_resolve_leaves_other_precisions_alone(write):
    loaded = load_config(write(precision="float16"))
    resolved = resolve(loaded)
    assert resolved.values["policy"]["megatron_cfg"]["pipeline_dtype"] == "float16"
    assert resolved.recipe is None and "jetrl" not in str(resolved.values)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("policy: {precision: jetrl-fp8}", ["policy.precision: 'jetrl-fp8'", "bfloat16, float16, float32, jetrl_fp8",
                                            "did you mean jetrl_fp8?"]),
        ("policy: {precision: fp8}", ["policy.precision: 'fp8'", "jetrl_fp8"]),
        ("policy: {megatron_cfg: null}", ["section policy.megatron_cfg is missing", "nemo_rl:grpo_math_1B.yaml"]),
        ("loss_fn: null", ["section loss_fn is missing"]),
        ("policy: {generation: {vllm_cfg: null}}", ["section policy.generation.vllm_cfg is missing"]),
        ("policy: {megatron_cfg: {fp8_cfg: {enabled: true}}}",
         ["policy.megatron_cfg.fp8_cfg.enabled=True", "run.yaml", "set it to False"]),
        ("policy: {megatron_cfg: {enabled: false}}", ["policy.megatron_cfg.enabled=False", "=True"]),
        ("policy: {dtensor_cfg: {enabled: true}}", ["policy.dtensor_cfg.enabled=True"]),
        ("policy: {generation: {backend: sglang}}", ["policy.generation.backend='sglang'", "'vllm'"]),
        ("policy: {generation: {vllm_cfg: {precision: fp8}}}", ["vllm_cfg.precision='fp8'", "'bfloat16'"]),
        ("policy: {generation: {vllm_cfg: {kv_cache_dtype: fp8}}}", ["kv_cache_dtype='fp8'", "'auto'"]),
        ("policy: {generation: {vllm_cfg: {num_last_layers_in_bf16: 2}}}", ["num_layers_at_end_in_bf16"]),
        ("policy: {generation: {vllm_cfg: {env_vars: {VLLM_USE_DEEP_GEMM: '0'}}}}", ["VLLM_USE_DEEP_GEMM='0'"]),
        ("policy: {generation: {temperature: 0.7}}", ["temperature=0.7", "policy.jetrl.parity: false"]),
        ("policy: {generation: {vllm_kwargs: {attention_backend: FLASHINFER}}}", ["attention_backend='FLASHINFER'"]),
        ("policy: {generation: {vllm_kwargs: {compilation_config: {custom_ops: [all]}}}}", ["custom_ops=['all']"]),
        ("policy: {megatron_cfg: {context_parallel_size: 2}}", ["context_parallel_size=2"]),
        ("policy: {megatron_cfg: {sequence_parallel: true}, make_sequence_length_divisible_by: 3}",
         ["make_sequence_length_divisible_by=3", "2 tensor-parallel ranks"]),
        ("loss_fn: {use_importance_sampling_correction: false}", ["use_importance_sampling_correction=False"]),
        ("policy: {jetrl: {parity: 'no'}}", ["policy.jetrl.parity: 'no'"]),
        ("policy: {jetrl: {recipes: {}}}", ["policy.jetrl.recipes is unknown"]),
        ("policy: {jetrl: {recipe: {scale_fmt: ue8m0}}}", ["policy.jetrl.recipe", "scale_fmt"]),
        ("policy: {jetrl: {recipe: {block: big}}}", ["policy.jetrl.recipe"]),
        ("policy: {jetrl: 5}", ["policy.jetrl: 5"]),
        ("policy: {precision: bfloat16, jetrl: {parity: true}}", ["policy.jetrl", "contradicts policy.precision"]),
        ("policy: {megatron_cfg: {tensor_model_parallel_size: '${policy.ranks}'}}", ["tensor_model_parallel_size"]),
    ],
)  # fmt: skip
def test_resolve_names_what_is_wrong(write, more, named):
    with pytest.raises(ValueError) as error:
        read_config(write(more))
    for part in named:
        assert part in str(error.value)


def test_resolve_takes_a_key_that_says_the_same(write):
    values = read_config(write("policy: {generation: {temperature: 1.0, vllm_kwargs: {max_num_seqs: 64}}}")).values
    assert values["policy"]["generation"]["vllm_kwargs"]["max_num_seqs"] == 64
    assert values["policy"]["generation"]["vllm_kwargs"]["attention_backend"] == "CUSTOM"


@pytest.mark.parametrize(("training", "rollout", "note"), [(2, 1, "TP 2 in training and 1"), (4, 4, "sums over 4")])
def test_resolve_notes_what_is_not_promised(write, training, rollout, note):
    sizes = f"megatron_cfg: {{tensor_model_parallel_size: {training}}}"
    path = write(f"policy: {{{sizes}, generation: {{vllm_cfg: {{tensor_parallel_size: {rollout}}}}}}}")
    assert any(note in line for line in read_config(path).notes)


def test_load_config_names_origins_and_replaces_sections(tmp_path):
    (tmp_path / "base.yaml").write_text("a: {b: 1, c: {d: 2}}\ne: 3\n")
    (tmp_path / "middle.yaml").write_text("defaults: base.yaml\na: {_override_: true, f: 4}\n")
    (tmp_path / "top.yaml").write_text("defaults: [middle.yaml]\ne: {g: '${a.f}'}\n")
    loaded = load_config(tmp_path / "top.yaml")
    assert loaded.get("a") == {"f": 4} and loaded.get("e.g") == 4
    assert loaded.origins == {"a.f": str(tmp_path / "middle.yaml"), "e.g": str(tmp_path / "top.yaml")}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("defaults: self.yaml", "inherits from itself"),
        ("defaults: {a: b}", "defaults="),
        ("- 1", "must hold a mapping"),
        ("a: [", "no YAML"),
        ("defaults: absent.yaml", "absent.yaml is no file"),
    ],
)
def test_load_config_names_a_wrong_file(tmp_path, content, named):
    (tmp_path / "self.yaml").write_text(content)
    with pytest.raises(ValueError, match=named):
        load_config(tmp_path / "self.yaml")


def test_config_command_prints_values_and_origins(write, capsys):
    assert cli.main(["config", str(write())]) == 0
    lines = capsys.readouterr().out.splitlines()
    (precision,) = [line for line in lines if line.startswith("policy.precision:")]
    assert "'bfloat16'" in precision and "# jetrl_fp8:" in precision
    (size,) = [line for line in lines if line.startswith("policy.generation.vllm_cfg.tensor_parallel_size:")]
    assert size.endswith("minimal.yaml")


def test_config_command_prints_json(write, capsys):
    assert cli.main(["config", str(write()), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["values"]["policy"]["jetrl"]["fingerprint"] == JETRL_FP8.fingerprint
    assert printed["origins"]["policy.jetrl.fingerprint"].startswith("jetrl_fp8")


def test_config_command_reports_an_error_alone(write, capsys):
    assert cli.main(["config", str(write("policy: {precision: jetrl}"))]) == 2
    assert "policy.precision: 'jetrl'" in capsys.readouterr().err


def test_run_script_gives_nemo_rls_script_the_same_values(tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "seen.json"
    script.write_text(
        "import json, sys\nfrom omegaconf import OmegaConf\n"
        "assert __name__ == '__main__' and sys.argv[1] == '--config' and len(sys.argv) == 3\n"
        f"open({str(out)!r}, 'w').write(json.dumps(OmegaConf.to_container(OmegaConf.load(sys.argv[2]))))\n"
    )
    before = list(sys.argv)
    resolved = read_config(POLICIES[0])
    run_script(script, resolved)
    seen = json.loads(out.read_text())
    assert seen == json.loads(json.dumps(resolved.values)) and sys.argv == before
    # Through YAML no number of the recipe changes.
    assert Fp8BlockRecipe.from_stamp(seen["policy"]["jetrl"], "file") == JETRL_FP8
    assert Fp8BlockRecipe.from_stamp(seen["policy"]["generation"]["vllm_kwargs"]["additional_config"]["jetrl"], "file")


@pytest.mark.skipif(nemo_rl_checkout() is not None, reason="a NeMo-RL checkout is on PYTHONPATH")
def test_overrides_without_nemo_rl_name_the_way_out(write):
    with pytest.raises(ValueError, match="PYTHONPATH"):
        read_config(write(), (), ["policy.generation.temperature=1"])


@needs_checkout
@pytest.mark.parametrize(("policy", "overlays"), COMBINATIONS)
def test_conf_passes_nemo_rls_schema(policy, overlays):
    # With NeMo-RL's loader, whose values ours must equal, and its own model of a configuration.
    master = _master_config()(**read_config(policy, overlays).values)
    assert master.policy["precision"] == "bfloat16"
    assert bool(master.policy.get("jetrl")) is not bool(overlays)
    assert bool(master.policy["generation"].get("jetrl")) is not bool(overlays)


@needs_checkout
@pytest.mark.parametrize("policy", POLICIES, ids=lambda path: path.stem)
def test_load_config_equals_nemo_rls(policy):
    from omegaconf import OmegaConf

    ours = load_config(policy)
    theirs = importlib.import_module("nemo_rl.utils.config").load_config(policy)
    assert OmegaConf.to_container(ours.values) == OmegaConf.to_container(theirs)
    assert not ours.missing


@needs_checkout
def test_overrides_are_nemo_rls():
    resolved = read_config(POLICIES[-1], (), ["grpo.max_num_steps=7", "++policy.jetrl.parity=false"])
    assert resolved.values["grpo"]["max_num_steps"] == 7
    assert resolved.origins["grpo.max_num_steps"] == "command line"
    assert resolved.values["policy"]["jetrl"]["parity"] is False
    with pytest.raises(ValueError, match="grpo.max_steps"):
        read_config(POLICIES[-1], (), ["grpo.max_steps=7"])


@needs_checkout
def test_a_default_of_nemo_rls_gives_way_and_a_decision_does_not(tmp_path):
    (tmp_path / "run.yaml").write_text(f"defaults: {CONF / 'grpo_smoke_1n1g.yaml'}\n")
    assert read_config(tmp_path / "run.yaml").values["policy"]["megatron_cfg"]["defer_fp32_logits"] is True
    with pytest.raises(ValueError, match=r"defer_fp32_logits=False \(from command line\)"):
        read_config(tmp_path / "run.yaml", (), ["policy.megatron_cfg.defer_fp32_logits=false"])


def _master_config() -> Any:
    # Importing it takes all of NeMo-RL and Ray.
    return pytest.importorskip("nemo_rl.algorithms.grpo", exc_type=ImportError).MasterConfig


def _leaves(values: Any, prefix: str = "") -> Any:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
