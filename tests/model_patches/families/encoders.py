"""Encoders of text: name -> model."""

from .build import BERT, make


def _deberta_v2(**options):
    options = {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 4,
    } | options
    return make("DebertaV2ForMaskedLM", "DebertaV2Config", **BERT, **options)


ENCODERS = {
    "big_bird": lambda: make(
        "BigBirdForMaskedLM", "BigBirdConfig", **BERT, attention_type="original_full"
    ),
    "convbert": lambda: make(
        "ConvBertModel",
        "ConvBertConfig",
        **BERT,
        embedding_size=32,
        head_ratio=2,
        conv_kernel_size=3,
    ),
    "deberta": lambda: make(
        "DebertaForMaskedLM",
        "DebertaConfig",
        **BERT,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    ),
    "deberta-c2p": lambda: make(
        "DebertaForMaskedLM",
        "DebertaConfig",
        **BERT,
        relative_attention=True,
        pos_att_type=["c2p"],
        max_relative_positions=5,
    ),
    "deberta-plain": lambda: make(
        "DebertaForMaskedLM", "DebertaConfig", **BERT, relative_attention=False
    ),
    "deberta-v2": _deberta_v2,
    "deberta-v2-p2c": lambda: _deberta_v2(pos_att_type=["p2c"], position_buckets=-1),
    "deberta-v2-plain": lambda: _deberta_v2(relative_attention=False),
    "deberta-v3": lambda: _deberta_v2(
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        conv_kernel_size=3,
    ),
    "flaubert": lambda: make(
        "FlaubertWithLMHeadModel",
        "FlaubertConfig",
        vocab_size=60,
        emb_dim=32,
        n_layers=2,
        n_heads=4,
    ),
    "luke-words": lambda: make(
        "LukeModel",
        "LukeConfig",
        **BERT,
        entity_vocab_size=9,
        entity_emb_size=16,
        use_entity_aware_attention=True,
    ),
    "megatron-bert": lambda: make("MegatronBertModel", "MegatronBertConfig", **BERT),
    "mpnet": lambda: make("MPNetForMaskedLM", "MPNetConfig", **BERT),
    "openai-gpt": lambda: make(
        "OpenAIGPTLMHeadModel",
        "OpenAIGPTConfig",
        vocab_size=60,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
    ),
    "rembert": lambda: make("RemBertModel", "RemBertConfig", **BERT, input_embedding_size=16),
    "roformer": lambda: make("RoFormerModel", "RoFormerConfig", **BERT, embedding_size=32),
    "roformer-values": lambda: make(
        "RoFormerModel", "RoFormerConfig", **BERT, embedding_size=32, rotary_value=True
    ),
    "squeezebert": lambda: make(
        "SqueezeBertModel",
        "SqueezeBertConfig",
        **(BERT | {"intermediate_size": 64}),
        embedding_size=32,
    ),
    "tapas": lambda: make("TapasModel", "TapasConfig", **BERT),
    "visual_bert": lambda: make(
        "VisualBertModel", "VisualBertConfig", **BERT, visual_embedding_dim=16
    ),
    "xlm": lambda: make(
        "XLMWithLMHeadModel", "XLMConfig", vocab_size=60, emb_dim=32, n_layers=2, n_heads=4
    ),
    "xlm-causal": lambda: make(
        "XLMWithLMHeadModel",
        "XLMConfig",
        vocab_size=60,
        emb_dim=32,
        n_layers=2,
        n_heads=4,
        causal=True,
    ),
}
