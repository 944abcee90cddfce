"""HsaEncoder: a small encoder of text and images with hierarchical self-attention from the start.

Importing this package registers the models with Transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from .configuration import HsaEncoderConfig
from .modeling import HsaEncoder, HsaEncoderForSequenceClassification

AutoConfig.register(HsaEncoderConfig.model_type, HsaEncoderConfig, exist_ok=True)
AutoModel.register(HsaEncoderConfig, HsaEncoder, exist_ok=True)
AutoModelForSequenceClassification.register(
    HsaEncoderConfig, HsaEncoderForSequenceClassification, exist_ok=True
)

__all__ = ["HsaEncoder", "HsaEncoderConfig", "HsaEncoderForSequenceClassification"]
