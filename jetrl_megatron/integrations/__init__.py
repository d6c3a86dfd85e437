"""What adapts or patches other libraries: Megatron-Bridge, Megatron on a CPU, the vLLM plugin."""
