"""Make a pretrained model's attention cheaper without training: measure, allocate, verify.

A new kind of rule implements `CandidateRule`. Only `hsa`, `sparse` and their callers know rules by
name.
"""

from .allocate import Allocation, OutOfReach, choose, predicted_losses
from .heal import Healing
from .measure import Sensitivity, measure
from .retrieval import Example, Score, examples
from .rules import CandidateRule
from .together import corrected, loss_parts
from .verify import Verified, verify

__all__ = [
    "Allocation",
    "Example",
    "Healing",
    "OutOfReach",
    "Score",
    "Sensitivity",
    "CandidateRule",
    "Verified",
    "choose",
    "corrected",
    "examples",
    "loss_parts",
    "measure",
    "predicted_losses",
    "verify",
]
