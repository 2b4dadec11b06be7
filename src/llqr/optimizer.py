"""LLQR: steps in the direction of steepest descent under a divergence, as long as the base's own."""

from __future__ import annotations

from llqr.loop.wrapping import Wrapping
from llqr.paper import PaperLLQR


class LLQR(Wrapping):
    """To come."""

    paper = PaperLLQR
    """Algorithm 1 of the paper: U fitted along one gradient, and U g in place of the gradient g."""
