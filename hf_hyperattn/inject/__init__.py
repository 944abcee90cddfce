"""Makes a pretrained model's attention cheaper without training: measures rules, allocates them, verifies the result.

What a rule is stands in `rules.CandidateRule`; nothing but `hsa`, `sparse` and who calls them knows one by name.
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
