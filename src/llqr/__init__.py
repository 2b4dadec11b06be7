"""Geometry-aware optimization of deep networks by layerwise LQR."""

from llqr import divergences
from llqr.exact import cg_step, dense_step, exact_step

__version__ = "0.1.0.dev0"
__all__ = ["__version__", "cg_step", "dense_step", "divergences", "exact_step"]
