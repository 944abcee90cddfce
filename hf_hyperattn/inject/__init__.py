"""Makes a pretrained model's attention cheaper without training: measures rules, allocates them, verifies the result.

What a rule is stands in `rules.SparseRule`; nothing here but `hsa` and who calls it knows a rule by name.
"""

from .allocate import Allocation, choose, predicted_losses
from .heal import Healing
from .measure import Sensitivity, measure
from .rules import SparseRule

__all__ = ["Allocation", "Healing", "Sensitivity", "SparseRule", "choose", "measure", "predicted_losses"]
