"""`jetrl verify`: the same tokens, scored by a real Megatron model and by a real vLLM engine."""
