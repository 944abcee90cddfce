"""HAT, the hierarchical attention transformer (arXiv 2210.05529): models, and the conversion to
them.

Importing this package registers the models with Transformers' Auto classes, and the conversion with
`convert`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ...patching.conversions import Conversion, register_conversion
from .configuration import HatEncoderConfig
from .conversion import to_hat
from .heads import HatForMaskedLM, HatForSequenceClassification, HatForTokenClassification
from .modeling import HatModel, HatModelOutput, HatPreTrainedModel

AutoConfig.register(HatEncoderConfig.model_type, HatEncoderConfig, exist_ok=True)
for auto, model in (
    (AutoModel, HatModel),
    (AutoModelForMaskedLM, HatForMaskedLM),
    (AutoModelForSequenceClassification, HatForSequenceClassification),
    (AutoModelForTokenClassification, HatForTokenClassification),
):
    auto.register(HatEncoderConfig, model, exist_ok=True)
register_conversion(
    "hat",
    Conversion(
        run=to_hat,
        # HAT has no patch: every `HatConfig` asks for a conversion.
        requested=lambda config: True,
        done=lambda model: isinstance(model, HatPreTrainedModel),
    ),
)

__all__ = [
    "HatEncoderConfig",
    "HatForMaskedLM",
    "HatForSequenceClassification",
    "HatForTokenClassification",
    "HatModel",
    "HatModelOutput",
]
