"""The exact step: a network as a chain of stages, its LQR, and the Riccati recursion that solves it."""

from llqr.exact.chain import Chain
from llqr.exact.lqr import LQR, StageBlocks, build
from llqr.exact.steps import Riccati, Solution, cg_step, dense_step, exact_step, solve

__all__ = [
    "LQR",
    "Chain",
    "Riccati",
    "Solution",
    "StageBlocks",
    "build",
    "cg_step",
    "dense_step",
    "exact_step",
    "solve",
]
