"""Inner solvers: how U is found that minimises J(U). One a file; each is a set of options without state."""

from llqr.solvers.conjugate_gradient import ConjugateGradient
from llqr.solvers.first_order import SGDM, Adam
from llqr.solvers.problem import Problem, Quadratic, Solver, curvature_along
from llqr.solvers.scale_free import ScaleFree

__all__ = ["SGDM", "Adam", "ConjugateGradient", "Problem", "Quadratic", "ScaleFree", "Solver", "curvature_along"]
