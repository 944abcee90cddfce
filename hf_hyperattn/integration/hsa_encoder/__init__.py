"""HsaEncoder: a small model over nested signals of several kinds, with hierarchical attention from the start."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from .configuration import HsaEncoderConfig
from .modeling import HsaEncoder, HsaEncoderForSequenceClassification

AutoConfig.register(HsaEncoderConfig.model_type, HsaEncoderConfig, exist_ok=True)
AutoModel.register(HsaEncoderConfig, HsaEncoder, exist_ok=True)
AutoModelForSequenceClassification.register(
    HsaEncoderConfig, HsaEncoderForSequenceClassification, exist_ok=True
)

__all__ = ["HsaEncoder", "HsaEncoderConfig", "HsaEncoderForSequenceClassification"]
