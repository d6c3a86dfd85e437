"""`jetrl demo`: a real model, trained in FP8 with Megatron and served in FP8 by vLLM, with the mismatch measured."""
