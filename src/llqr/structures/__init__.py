"""Block structures of U, each with its identity, its action and its closed form."""

from llqr.structures.base import Dense, Diagonal, Linearization, LinearStructure, Scalar, Structure
from llqr.structures.kronecker import EigenKronecker, Kronecker

__all__ = [
    "Dense",
    "Diagonal",
    "EigenKronecker",
    "Kronecker",
    "LinearStructure",
    "Linearization",
    "Scalar",
    "Structure",
]
