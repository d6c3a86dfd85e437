"""The study: runs of `examples/grpo` in several precisions and with several seeds, and what they add up to."""
