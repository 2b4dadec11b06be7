"""Block structures of U: one a file, each with its identity, its action, and the derivatives of its action."""

from llqr.structures.base import Linearization, LinearStructure, Structure
from llqr.structures.eigen_kronecker import EigenKronecker
from llqr.structures.kronecker import Kronecker
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
