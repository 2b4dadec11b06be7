"""The exact step: a network as a chain of stages, its LQR, and the Riccati recursion that solves it."""

from llqr.exact.blocks import LQR, StageBlocks, build
from llqr.exact.chain import Chain
from llqr.exact.reference import cg_step, dense_step
from llqr.exact.riccati import Riccati, Solution
from llqr.exact.step import exact_step, solve

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
