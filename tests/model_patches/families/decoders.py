"""Decoders that generate with a cache: name -> model."""

from .build import BERT, TINY, make


def _falcon(**options):
    return make("FalconForCausalLM", "FalconConfig", **TINY, **options)


DECODERS = {
    "bloom": lambda: make(
        "BloomForCausalLM", "BloomConfig", vocab_size=60, hidden_size=32, n_layer=2, n_head=4
    ),
    "bloom-6-heads-in-slices": lambda: make(
        "BloomForCausalLM",
        "BloomConfig",
        vocab_size=60,
        hidden_size=48,
        n_layer=2,
        n_head=6,
        pretraining_tp=2,
        slow_but_exact=True,
        apply_residual_connection_post_layernorm=True,
    ),
    "codegen": lambda: make(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        vocab_size=60,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_positions=64,
        n_ctx=64,
    ),
    "cpmant": lambda: make(
        "CpmAntForCausalLM",
        "CpmAntConfig",
        vocab_size=90,
        hidden_size=32,
        num_attention_heads=4,
        dim_head=8,
        dim_ff=37,
        num_hidden_layers=2,
        prompt_length=4,
        prompt_types=4,
        segment_types=4,
        position_bias_num_buckets=16,
        position_bias_max_distance=32,
    ),
    "falcon-alibi": lambda: _falcon(alibi=True, multi_query=False, bias=True),
    "falcon-grouped": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-multi-head": lambda: _falcon(multi_query=False, parallel_attn=False),
    "falcon-multi-query": lambda: _falcon(multi_query=True),
    "falcon-multi-query-alibi": lambda: _falcon(multi_query=True, alibi=True),
    "gpt_neo": lambda: make(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=60,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    ),
    "gpt_neox_japanese": lambda: make(
        "GPTNeoXJapaneseForCausalLM",
        "GPTNeoXJapaneseConfig",
        **TINY,
        intermediate_multiple_size=2,
        max_position_embeddings=64,
    ),
    "gptj": lambda: make(
        "GPTJForCausalLM",
        "GPTJConfig",
        vocab_size=60,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        n_positions=64,
    ),
    "megatron-bert-decoder": lambda: make(
        "MegatronBertForCausalLM", "MegatronBertConfig", **BERT, is_decoder=True
    ),
    "mpt": lambda: make(
        "MptForCausalLM",
        "MptConfig",
        vocab_size=60,
        d_model=32,
        n_layers=2,
        n_heads=4,
        max_seq_len=64,
    ),
    "mpt-6-heads-clipped": lambda: make(
        "MptForCausalLM",
        "MptConfig",
        vocab_size=60,
        d_model=48,
        n_layers=2,
        n_heads=6,
        max_seq_len=64,
        attn_config={"clip_qkv": 0.5, "softmax_scale": 0.7, "alibi_bias_max": 4},
    ),
    "rembert-decoder": lambda: make(
        "RemBertForCausalLM",
        "RemBertConfig",
        **BERT,
        is_decoder=True,
        input_embedding_size=16,
        output_embedding_size=16,
    ),
    "roformer-decoder": lambda: make(
        "RoFormerForCausalLM", "RoFormerConfig", **BERT, is_decoder=True, embedding_size=32
    ),
    "trocr": lambda: make(
        "TrOCRForCausalLM",
        "TrOCRConfig",
        vocab_size=60,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=37,
        max_position_embeddings=64,
    ),
    "xglm": lambda: make(
        "XGLMForCausalLM",
        "XGLMConfig",
        vocab_size=60,
        d_model=32,
        num_layers=2,
        attention_heads=4,
        ffn_dim=37,
        max_position_embeddings=64,
    ),
}
