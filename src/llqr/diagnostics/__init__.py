"""How good a step is: compared with the exact one, on the quadratic model of a batch."""

from llqr.diagnostics.comparison import (
    LayerPart,
    Objectives,
    Reference,
    Verdict,
    judge,
    reference,
    spectra,
    staleness,
)
from llqr.diagnostics.monitor import QUANTILES, Monitor, proposed_step

__all__ = [
    "QUANTILES",
    "LayerPart",
    "Monitor",
    "Objectives",
    "Reference",
    "Verdict",
    "judge",
    "proposed_step",
    "reference",
    "spectra",
    "staleness",
]
