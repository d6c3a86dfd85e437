"""NeMo-RL configurations with `precision: jetrl_fp8`, as data: see docs/how-to/nemo-rl.md."""
