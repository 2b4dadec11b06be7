"""How good a step is: held against the exact one, on the quadratic model of a batch."""

from llqr.diagnostics.blocks import BlockStep, Coupling, block_step, coupling
from llqr.diagnostics.classics import Inverse, diagonal, diagonal_step, kfac_inverse, kfac_step
from llqr.diagnostics.judging import Part, Reference, Verdict, judge, reference
from llqr.diagnostics.monitor import Monitor
from llqr.diagnostics.proposals import proposed_step
from llqr.diagnostics.spectra import QUANTILES, Spectrum, spectra
from llqr.diagnostics.staleness import Objectives, Staleness, compare_fits, staleness

__all__ = [
    "QUANTILES",
    "BlockStep",
    "Coupling",
    "Inverse",
    "Monitor",
    "Objectives",
    "Part",
    "Reference",
    "Spectrum",
    "Staleness",
    "Verdict",
    "block_step",
    "compare_fits",
    "coupling",
    "diagonal",
    "diagonal_step",
    "judge",
    "kfac_inverse",
    "kfac_step",
    "proposed_step",
    "reference",
    "spectra",
    "staleness",
]
