"""Networks of the experiments and benchmarks."""
