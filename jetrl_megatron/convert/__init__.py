"""From Megatron weights, saved or live, to block-FP8 checkpoints; needs Megatron-Bridge and transformers.

The submodules are imported by name, since `fp8_weights` alone needs neither.
"""
