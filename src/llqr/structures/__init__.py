"""Block structures of U, each with its identity, its action, the derivatives of its action, and its closed form."""

from llqr.structures.base import Linearization, LinearStructure, Structure
from llqr.structures.kronecker import EigenKronecker, Kronecker
from llqr.structures.linear import Dense, Diagonal, Scalar

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
