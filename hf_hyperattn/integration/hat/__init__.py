"""HAT, the hierarchical attention transformer (arXiv 2210.05529): its models, and the conversion that makes them."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ..conversions import Conversion, register_conversion
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
    Conversion(to_hat, lambda config: True, lambda model: isinstance(model, HatPreTrainedModel)),
)

__all__ = [
    "HatEncoderConfig",
    "HatForMaskedLM",
    "HatForSequenceClassification",
    "HatForTokenClassification",
    "HatModel",
    "HatModelOutput",
]
