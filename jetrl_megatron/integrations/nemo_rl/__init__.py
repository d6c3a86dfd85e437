"""NeMo-RL with `policy.precision: jetrl_fp8`: its own GRPO, with our linears, our rollout and our weight sync.

`python -m jetrl_megatron.integrations.nemo_rl grpo --config conf/grpo_qwen3_8b_1n8g.yaml` resolves the configuration
(`resolution`), checks the NeMo-RL that is installed (`seams`), registers two worker classes with it and runs its own
script. `policy_worker` and `generation_worker` are imported by the processes that Ray starts.
"""
