"""Inner solvers: how U is found that minimises J(U). Each is a set of options without state."""

from llqr.solvers.conjugate import ConjugateGradient, ScaleFree
from llqr.solvers.first_order import SGDM, Adam
from llqr.solvers.problem import Problem, Quadratic, Solver, curvature_along

__all__ = ["SGDM", "Adam", "ConjugateGradient", "Problem", "Quadratic", "ScaleFree", "Solver", "curvature_along"]
