"""Benchmarks on a Hopper GPU, each `python -m benchmarks.bench_NAME --out benchmarks/results/NAME.json`."""
