"""Families of Transformers that neither call the attention interface nor are served here, and why.

One table for the code, the errors and the docs. A reason completes the sentence "this family cannot be used, since".
"""

CONVOLUTIONAL = "it is convolutional and has no attention"
STATE_SPACE = "it is a recurrent or state-space model and has no attention"
LINEAR = "its attention is linear: there is no softmax over pairs to replace"
DEFORMABLE = "its detection layers use deformable attention or nn.MultiheadAttention, which are not routed"
OWN_PATTERN = "its attention scores a pattern of its own (local, hashed, pooled or low-rank), not all pairs"
OWN_CLASS = "it has an attention class of its own, which is not routed yet"
INTEGER = "its attention is computed in integers"
TWO_STREAM = "its attention runs in two or more streams over the same keys, and it is not routed yet"
MULTI_SCALE = "its attention pools queries within the layer, and it is not routed yet"
NO_PAIRS = "it mixes tokens without scoring pairs"
WRAPPER = "its modules come from another package"
CONFORMER = "its speech encoder has a block-wise attention of its own, which is not routed; patch its text model alone"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bit",
            "convnext",
            "convnextv2",
            "dac",
            "dinov3_convnext",
            "efficientnet",
            "encodec",
            "focalnet",
            "hgnet_v2",
            "mobilenet_v1",
            "mobilenet_v2",
            "poolformer",
            "pp_ocrv6_medium_det",
            "pp_ocrv6_small_det",
            "pp_ocrv6_tiny_rec",
            "regnet",
            "resnet",
            "textnet",
            "univnet",
            "uvdoc",
        ),
        CONVOLUTIONAL,
    ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), STATE_SPACE),
    **dict.fromkeys(("mobilevitv2", "swiftformer"), LINEAR),
    **dict.fromkeys(
        ("grounding-dino", "mask2former", "mm-grounding-dino", "omdet-turbo", "oneformer"),
        DEFORMABLE,
    ),
    **dict.fromkeys(
        ("autoformer", "dinat", "led", "longformer", "mra", "nystromformer", "reformer", "yoso"), OWN_PATTERN
    ),
    **dict.fromkeys(
        ("bros", "clvp", "dab-detr", "convbert", "funnel", "layoutlmv2", "levit", "lilt", "vits"), OWN_CLASS
    ),
    **dict.fromkeys(("prophetnet", "xlnet"), TWO_STREAM),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), CONFORMER),
    "fnet": NO_PAIRS,
    "hiera": MULTI_SCALE,
    "ibert": INTEGER,
    "timm_backbone": WRAPPER,
}
