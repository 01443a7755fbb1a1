"""Benchmarks that anyone can rerun; each has a make target and writes its table under docs/benchmarks."""
