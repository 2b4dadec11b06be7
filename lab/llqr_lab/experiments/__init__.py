"""Experiments: what a run is set by, the folder it lives in, the loop, and many of them."""
