"""Which Auto class loads an architecture, and which task the Hub files it under."""

# mapping in transformers.models.auto.modeling_auto, Auto class, pipeline tag of the Hub; first fit wins
TASKS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM", "text-generation"),
    (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "AutoModelForImageTextToText",
        "image-text-to-text",
    ),
    (
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "AutoModelForSpeechSeq2Seq",
        "automatic-speech-recognition",
    ),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM", None),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM", "fill-mask"),
    (
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForSequenceClassification",
        "text-classification",
    ),
    (
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForTokenClassification",
        "token-classification",
    ),
    (
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        "AutoModelForQuestionAnswering",
        "question-answering",
    ),
    ("MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES", "AutoModelForMultipleChoice", None),
    (
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForImageClassification",
        "image-classification",
    ),
    ("MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES", "AutoModelForObjectDetection", "object-detection"),
    ("MODEL_FOR_CTC_MAPPING_NAMES", "AutoModelForCTC", "automatic-speech-recognition"),
    (
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForAudioClassification",
        "audio-classification",
    ),
    ("MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES", "AutoModelForMaskedImageModeling", None),
)


def task_of(architecture: str | None) -> tuple[str, str | None]:
    """(Auto class, pipeline tag or None) for a model class's name; ("AutoModel", None) where none fits."""
    from transformers.models.auto import modeling_auto

    for mapping, auto_class, tag in TASKS:
        for names in getattr(modeling_auto, mapping, {}).values():
            if architecture == names or (isinstance(names, tuple | list) and architecture in names):
                return auto_class, tag
    return "AutoModel", None


# PEFT's task types, as the Auto classes and tasks they stand for
ADAPTER_TASKS = {
    "CAUSAL_LM": ("AutoModelForCausalLM", "text-generation"),
    "SEQ_2_SEQ_LM": ("AutoModelForSeq2SeqLM", None),
    "SEQ_CLS": ("AutoModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoModelForTokenClassification", "token-classification"),
    "QUESTION_ANS": ("AutoModelForQuestionAnswering", "question-answering"),
    "FEATURE_EXTRACTION": ("AutoModel", "feature-extraction"),
}


def adapter_task(adapter) -> tuple[str, str | None]:
    """(Auto class, pipeline tag or None) for an adapter_config.json, from its task or its base's class."""
    known = ADAPTER_TASKS.get(str(adapter.get("task_type")))
    mapping = adapter.get("auto_mapping")
    return known or task_of(mapping.get("base_model_class") if isinstance(mapping, dict) else None)
