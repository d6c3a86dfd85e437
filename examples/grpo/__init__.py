"""GRPO in a few hundred lines: Megatron-core trains, vLLM generates, JetRL's weight sync lies between them."""
