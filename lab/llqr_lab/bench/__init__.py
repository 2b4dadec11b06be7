"""Benchmarks: both sides interleaved in one run, medians, ratios, and the results as JSON."""
