"""Geometry-aware optimization of deep networks by layerwise LQR."""

from llqr import diagnostics, divergences, solvers, structures
from llqr.curvature.quadratic import QuadraticModel
from llqr.divergences import LayerwiseLoss
from llqr.exact import cg_step, dense_step, exact_step
from llqr.exact.optimizer import Exact
from llqr.optimizer import LLQR
from llqr.plan import Plan, plan
from llqr.preconditioner import Preconditioner
from llqr.refit import fit

__version__ = "0.1.0.dev0"
__all__ = [
    "LLQR",
    "Exact",
    "LayerwiseLoss",
    "Plan",
    "Preconditioner",
    "QuadraticModel",
    "__version__",
    "cg_step",
    "dense_step",
    "diagnostics",
    "divergences",
    "exact_step",
    "fit",
    "plan",
    "solvers",
    "structures",
]
