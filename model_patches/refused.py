"""Families of Transformers that neither call the attention interface nor are served here, and why.

One table for the code, the errors and the docs. A reason completes the sentence "this family cannot be used, since".
"""

CONVOLUTIONAL = "it is convolutional and has no attention"
STATE_SPACE = "it is a recurrent or state-space model and has no attention"
NO_PAIRS = "it mixes tokens without scoring pairs of them"
LINEAR = "its attention is linear: there is no softmax over pairs to replace"
OWN_PATTERN = "its attention scores a pattern of its own (local, hashed or low-rank), not all pairs"
FREQUENCIES = "its attention correlates whole series in the frequency domain"
DEFORMABLE = (
    "its detection layers use deformable attention or nn.MultiheadAttention, which are not routed"
)
CONFORMER = "its speech encoder has a block-wise attention of its own, which is not routed; patch its text model alone"
TWO_STREAM = "its attention runs several streams over the same keys, and is not routed yet"
RELATIVE_VALUES = (
    "its attention adds relative positions to the values too, which no attention call can express"
)
COUPLED = "its text and layout streams share one score matrix between two attentions, and it is not routed yet"
POOLED = "its attention pools queries or keys within the layer, and is not routed yet"
INTEGER = "its attention is computed in integers"
DETECTRON = "it needs detectron2, which was not at hand to test a route with"
WRAPPER = "its modules come from another package"
AUDIO_CHUNKS = (
    "its attention scores chunks of audio against their surroundings, and is not routed yet"
)
OWN_CLASS = "it has an attention class of its own, which is not routed yet"

_BY_REASON = {
    CONVOLUTIONAL: "bit convnext convnextv2 dac dinov3_convnext efficientnet encodec hgnet_v2 mobilenet_v1 "
    "mobilenet_v2 pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_tiny_rec regnet resnet textnet univnet uvdoc "
    "vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder "
    "wavtokenizer_encoder",
    STATE_SPACE: "falcon_mamba mamba mamba2 rwkv xlstm",
    NO_PAIRS: "fnet focalnet poolformer",
    LINEAR: "mobilevitv2 swiftformer",
    OWN_PATTERN: "dinat led longformer mra nystromformer reformer yoso",
    FREQUENCIES: "autoformer",
    DEFORMABLE: "grounding-dino mask2former mm-grounding-dino omdet-turbo oneformer",
    CONFORMER: "granite_speech granite_speech_plus",
    TWO_STREAM: "prophetnet xlnet",
    RELATIVE_VALUES: "vits",
    COUPLED: "lilt",
    POOLED: "funnel hiera",
    INTEGER: "ibert",
    DETECTRON: "layoutlmv2",
    AUDIO_CHUNKS: "gemma3n_audio gemma4_audio",
    WRAPPER: "gemma3n_vision timm_backbone timm_wrapper",
    OWN_CLASS: "clvp dab-detr levit wavtokenizer",
}

# Classes that stay as they are in families which otherwise call the interface or are served
_STAYING_BY_REASON = {
    "pools a sequence by learned queries": "Aimv2AttentionPoolingHead EsmFold2RowAttentionPooling "
    "Idefics2MultiheadAttentionPoolingHead Phi4MultimodalVisionMultiheadAttentionPoolingHead "
    "Siglip2MultiheadAttentionPoolingHead SiglipMultiheadAttentionPoolingHead",
    "is torch's fused nn.MultiheadAttention": "AriaCrossAttention BridgeTowerResidualAttention",
    "scores a pattern of its own (local or global blocks)": "LongT5LocalAttention LongT5TransientGlobalAttention "
    "PegasusXGlobalLocalAttention",
    "scores chunks of audio against their surroundings": "Gemma3nAudioAttention Gemma4AudioAttention",
    "gives weights as masks, and averages no values": "ConditionalDetrMHAttentionMap DetrMHAttentionMap "
    "MaskFormerDetrMHAttentionMap",
    "attends over pixels of a codec in convolutions": "Apertus1p5VisionTokenizerAttnBlock "
    "ChameleonVQVAEEncoderAttnBlock JanusVQVAEAttnBlock",
    "assigns tokens to groups by a hard choice": "GroupViTAssignAttention",
    "compresses a protein to latents": "EvollaSequenceCompressorAttention",
    "weighs the outputs of earlier layers": "Inkling2BlockAttentionResidual",
}


def _inverted(by_reason: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in by_reason.items() for name in names.split()}


REFUSED: dict[str, str] = _inverted(_BY_REASON)
STAYING: dict[str, str] = _inverted(_STAYING_BY_REASON)
