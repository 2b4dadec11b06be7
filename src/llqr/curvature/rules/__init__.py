"""Linear rules for the operations whose second derivatives torch computes slowly.

A Jacobian-vector product is read off the graph of a vector-Jacobian product by differentiating once more, by the cotangent:
u ↦ Jᵀu is linear, and its transpose is v ↦ Jv. Torch's own graph for Jᵀu also carries the way back to the activations, and
for normalisations and convolutions its double-backward formulas pay for that even when nobody asks. Here Jᵀ is one node whose
derivative is J and nothing else: exact for products with J and Jᵀ, and wrong for anything beyond, so these rules are in force
only while a forward pass is recorded for such products (`linear_rules`). For Hessian products there are fewer rules, right to
second order (`hessian_rules`), and where neither will do, plain operations (`plain_rules`).
"""

from llqr.curvature.rules.base import BeyondRulesError, ChangedError
from llqr.curvature.rules.replacements import hessian_rules, linear_rules, plain_rules, twice_rules

__all__ = ["BeyondRulesError", "ChangedError", "hessian_rules", "linear_rules", "plain_rules", "twice_rules"]
