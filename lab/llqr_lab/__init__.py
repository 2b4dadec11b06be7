"""The lab of `llqr`: its command line, experiments and benchmarks. A distribution of its own (lab/pyproject.toml)."""
