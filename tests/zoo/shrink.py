"""From a config class to the keyword arguments of a tiny instance of it, by the names of its fields."""

import dataclasses

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.overrides import OVERRIDES, WIDE, Whole

HIDDEN, HEADS, HEAD_DIM, VOCABULARY = 64, 4, 16, 128

# Exact names first: what they become in a tiny config.
SIZES = {
    **dict.fromkeys(
        "hidden_size d_model n_embd dim hidden_dim embed_dim embedding_size embedding_dim emb_dim d_embed "
        "decoder_hidden_size encoder_hidden_size backbone_hidden_size hidden_size_global cross_hidden_size "
        "text_hidden_size projection_dim output_dim out_hidden_size projector_hidden_size encoder_hidden_dim "
        "fpn_hidden_size memory_attention_hidden_size memory_encoder_hidden_size memory_fuser_embed_dim "
        "mask_downsampler_embed_dim output_channels mm_embed_dim audio_embed_dim image_text_hidden_size "
        "fusion_hidden_size cross_attention_hidden_size neck_out_channels mask_feature_size output_size "
        "perceiver_resampler_hidden_size d_latents feature_size projection_size lm_hidden_size "
        "downsample_hidden_size query_dim_size adapter_out_dim vision_output_dim pooler_output_size "
        "lru_width attention_hidden_size".split(),
        HIDDEN,
    ),
    **dict.fromkeys(
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner mlp_dim ffn_hidden_size d_inner "
        "decoder_intermediate_size moe_intermediate_size shared_expert_intermediate_size dim_feedforward dff dim_ff "
        "intermediate_size_mlp encoder_feedforward_dim memory_attention_feed_forward_hidden_size "
        "memory_fuser_intermediate_dim expert_ffn_hidden_size speech_encoder_intermediate_size "
        "t2u_encoder_ffn_dim t2u_decoder_ffn_dim iou_head_hidden_dim shared_intermediate_size "
        "projection_intermediate_size perceiver_resampler_mlp_intermediate_size prefix_dense_intermediate_size "
        "alignment_intermediate_size shared_experts_intermediate_size decoder_ffn_dim projection_intermediate_dim "
        "dense_intermediate_size memory_attention_mlp_hidden_size encoder_linear_units decoder_linear_units".split(),
        HIDDEN,
    ),
    **dict.fromkeys(
        "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
        "attention_heads decoder_num_attention_heads encoder_num_attention_heads decoder_num_heads "
        "cross_num_attention_heads index_n_heads speech_encoder_attention_heads t2u_encoder_attention_heads "
        "t2u_decoder_attention_heads decoder_self_attention_heads decoder_cross_attention_heads "
        "conf_num_attention_heads swa_num_attention_heads resampler_n_heads linear_num_value_heads "
        "linear_num_heads".split(),
        HEADS,
    ),
    **dict.fromkeys(
        "num_key_value_heads num_kv_heads kv_n_heads cross_num_key_value_heads swa_num_key_value_heads "
        "encoder_num_key_value_heads decoder_num_key_value_heads linear_num_key_heads "
        "num_global_key_value_heads".split(),
        2,
    ),
    **dict.fromkeys(
        "head_dim d_kv cross_head_dim swa_head_dim resampler_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim global_head_dim v_head_dim_full index_head_dim d_head dim_head "
        "perceiver_resampler_attention_head_dim resampler_dim_head kv_channels attention_head_dim".split(),
        HEAD_DIM,
    ),
    **dict.fromkeys(
        "num_hidden_layers num_layers n_layer n_layers depth encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers layers memory_attention_num_layers "
        "memory_fuser_num_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers conf_num_hidden_layers "
        "num_blocks resampler_depth perceiver_resampler_num_layers num_adapter_layers decoder_depth "
        "num_attention_layers".split(),
        2,
    ),
    **dict.fromkeys(
        "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
        "max_2d_position_embeddings context_length max_pos_emb t2u_max_position_embeddings "
        "position_embedding_size rel_extent max_rel_pos left_max_position_embeddings".split(),
        128,
    ),
    **dict.fromkeys(
        "vocab_size src_vocab_size tgt_vocab_size text_vocab_size input_vocab_size output_vocab_size "
        "vocab_size_per_layer_input t2u_vocab_size unit_hifi_gan_vocab_size audio_vocab_size codebook_size "
        "num_embeddings vision_vocab_size head_out_channels".split(),
        VOCABULARY,
    ),
    **dict.fromkeys(
        "n_routed_experts num_experts num_local_experts moe_num_experts n_experts".split(), 4
    ),
    **dict.fromkeys(
        "num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts num_experts_per_token "
        "top_k_routed_experts".split(),
        2,
    ),
    **dict.fromkeys(
        "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts "
        "first_k_dense_replace num_dense_layers num_mtp_layers num_nextn_predict_layers".split(),
        1,
    ),
    **dict.fromkeys(
        "q_lora_rank kv_lora_rank o_lora_rank hidden_size_per_layer_input laurel_rank".split(), 16
    ),
    **dict.fromkeys(
        "qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim mamba_d_state state_size "
        "codevector_dim proj_codevector_dim".split(),
        8,
    ),
    **dict.fromkeys(
        "sliding_window sliding_window_size local_attention attention_chunk_size index_topk "
        "attention_window local_attention_window_len".split(),
        4,
    ),
    **dict.fromkeys("num_mel_bins input_feat_size".split(), 16),
    **dict.fromkeys(
        "image_size pretrain_image_size crop_size max_image_size max_img_size anchor_image_size input_size".split(),
        32,
    ),
    **dict.fromkeys(
        "num_queries num_query_tokens two_stage_num_proposals num_denoising".split(), 6
    ),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "sep_token_id": 4,
    "cls_token_id": 5,
    "mask_token_id": 6,
    "unk_token_id": 7,
    "num_position_embeddings": 64,
    "mamba_n_heads": HEADS,
    "num_frames": 4,
    "frames": 4,
    "num_conv_pos_embedding_groups": 4,
    "num_conv_pos_embeddings": 16,
    "mamba_d_head": 32,
    "num_codevectors_per_group": 8,
    "mamba_chunk_size": 8,
    "insert_layer_id": 1,
    "max_window_layers": 1,
    "num_filters": 8,
    "cross_attention_frequency": 1,
}
CAPS = {"patch_size": 8, "max_batch_size": 2}
# Lists keep their length; the entries become these.
LISTS = {
    **dict.fromkeys("depths num_block_repeats layers_per_stage stage_num_blocks".split(), 1),
    **dict.fromkeys("num_attention_heads num_heads encoder_attention_heads".split(), 2),
    **dict.fromkeys(
        "hidden_sizes embed_dim embed_dims encoder_hidden_sizes conv_dim decoder_hidden_size "
        "tdnn_dim encoder_in_channels decoder_in_channels neck_hidden_sizes".split(),
        32,
    ),
}


def fields_of(config_class):
    """Field name -> default of a config class (``None`` where there is none), without those every config has."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {
        "chunk_size_feed_forward"
    }
    found = {}
    for field in dataclasses.fields(config_class):
        if field.name not in common:
            made = (
                field.default_factory()
                if field.default_factory is not dataclasses.MISSING
                else None
            )
            found[field.name] = made if field.default is dataclasses.MISSING else field.default
    return found


SHORT = 2, VOCABULARY, 128


def small(name, default, keep_widths=False):
    """The tiny value of one field, None to leave the default; `keep_widths` shrinks depth and vocabulary only."""
    if keep_widths and SIZES.get(name) not in SHORT:
        return None
    if isinstance(default, bool) or isinstance(default, str):
        return None
    if isinstance(default, (list, tuple)):
        return [LISTS[name]] * len(default) if name in LISTS else None
    if name in CAPS:
        return CAPS[name] if isinstance(default, int) and default > CAPS[name] else None
    if default is None and name in ("embedding_size", "n_inner", "sliding_window"):
        return None
    if name in SIZES:
        return SIZES[name]
    return None


def token_ids(fields):
    """Ids above the ordinary words for every other special token, each its own."""
    names = [n for n in fields if n.endswith(("_token_id", "_token_index")) and n not in SIZES]
    return {name: VOCABULARY - 1 - i for i, name in enumerate(names)}


def kwargs_of(config_class, model_type=None, keep_widths=False):
    """Keyword arguments of a tiny config: rules by field name, sub-configs alike, then the table of overrides."""
    keep_widths = keep_widths or not {config_class.model_type, model_type}.isdisjoint(WIDE)
    fields = fields_of(config_class)
    sub = sub_configs(config_class, keep_widths)
    kwargs = {
        n: v
        for n, d in fields.items()
        if n not in sub and (v := small(n, d, keep_widths)) is not None
    }
    kwargs |= {
        n: v
        for n, v in token_ids(fields).items()
        if fields[n] is not None or n.startswith(("image", "video"))
    }
    kwargs |= sub
    if not keep_widths and {"kv_lora_rank", "num_key_value_heads"} <= fields.keys():
        kwargs["num_key_value_heads"] = HEADS
    kwargs |= layer_kinds(config_class, fields)
    for key in (config_class.model_type, model_type, config_class.__name__):
        kwargs = merge(kwargs, OVERRIDES.get(key, {}))
    return {n: v for n, v in kwargs.items() if v is not ...}


def layer_kinds(config_class, fields):
    """One layer of every kind that the default config mixes, so that a hybrid model keeps its attention layers."""
    name = next((n for n in ("layer_types", "layers_block_type") if n in fields), None)
    if name is None:
        return {}
    try:
        kinds = list(dict.fromkeys(getattr(config_class(), name) or []))
    except Exception:  # a config class without a default instance: the table of overrides says it
        return {}
    if len(kinds) < 2:
        return {}
    count = next((n for n in ("num_hidden_layers", "num_layers") if n in fields), None)
    return {name: kinds} | ({count: len(kinds)} if count else {})


def sub_configs(config_class, keep_widths):
    """Tiny sub-configs as dicts, of the class the default config has there."""
    names = getattr(config_class, "sub_configs", None) or {}
    specs = getattr(config_class, "sub_configs_defaults", {})  # Transformers 5.17 has none
    found, default = {}, None
    for name, sub_class in names.items():
        spec = specs.get(name)
        extra = dict(spec.init_kwargs) if spec is not None else {}
        if not dataclasses.is_dataclass(sub_class):
            known = spec is not None and spec.model_type in CONFIG_MAPPING
            sub_class = CONFIG_MAPPING[spec.model_type] if known else None
        if sub_class is None:
            default = default if default is not None else config_class()
            sub_class = type(getattr(default, name, None))
            if sub_class is type(None):
                continue
        made = merge(extra, kwargs_of(sub_class, None, keep_widths))
        if not dataclasses.is_dataclass(names[name]):
            made["model_type"] = spec.model_type if spec is not None else sub_class.model_type
        found[name] = made
    return found


def merge(base, over):
    """`over` on `base`, dict values merged; ``...`` in `over` drops a key so that the default stands."""
    out = dict(base)
    for key, value in over.items():
        both = (
            isinstance(value, dict)
            and isinstance(out.get(key), dict)
            and not isinstance(value, Whole)
        )
        out[key] = merge(out[key], value) if both else value
    return out
