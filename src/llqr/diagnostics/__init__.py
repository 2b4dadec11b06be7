"""How good a step is: compared with the exact one, on the quadratic model of a batch."""

from llqr.diagnostics.comparison import LayerPart, Reference, Verdict, judge, reference
from llqr.diagnostics.fit_quality import QUANTILES, Objectives, Spectrum, Staleness, compare_fits, spectra, staleness
from llqr.diagnostics.monitor import Monitor, proposed_step

__all__ = [
    "QUANTILES",
    "LayerPart",
    "Monitor",
    "Objectives",
    "Reference",
    "Spectrum",
    "Staleness",
    "Verdict",
    "compare_fits",
    "judge",
    "proposed_step",
    "reference",
    "spectra",
    "staleness",
]
