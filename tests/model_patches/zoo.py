"""Tiny models of every served family, with inputs: `MODELS[name]()` gives (model, inputs).

Weights are drawn wider than the families' own initialisation, so that attention is far from uniform and an error in
scaling, bias or mask shows.
"""

import torch
import transformers

TINY = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = TINY | {"intermediate_size": 37, "max_position_embeddings": 64}
PIXELS = {"image_size": 32, "patch_size": 8, "num_channels": 3}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37} | PIXELS


def build(architecture, config, **options):
    """A model of float32 in evaluation mode, the same on every call."""
    torch.manual_seed(0)
    configuration = config(**options) if isinstance(config, type) else config
    model = architecture(configuration).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6 * parameter[0].numel() ** -0.5 if "embed" not in name else 0.5)
            else:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def make(architecture, config, **options):
    """As `build`, by the names Transformers exports."""
    return build(getattr(transformers, architecture), getattr(transformers, config), **options)


def ids(batch=2, length=11):
    return {"input_ids": torch.arange(batch * length).reshape(batch, length) * 7 % 55 + 4}


def padded(side, batch=2, length=11):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(7, length)] = 0
    return ids(batch, length) | {"attention_mask": mask}


def pixels(size=32, batch=2):
    return {"pixel_values": torch.linspace(-1, 1, batch * 3 * size * size).reshape(batch, 3, size, size).sin()}


def boxes(batch=2, length=11):
    corners = torch.arange(batch * length * 4).reshape(batch, length, 4) * 13 % 40
    corners[..., 2:] += 41
    return {"bbox": corners}


def _table_transformer():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_channels=3, out_features=["stage2"]
    )
    return make(
        "TableTransformerModel", "TableTransformerConfig",
        use_timm_backbone=False, backbone=None, backbone_config=backbone, num_queries=5, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=37, decoder_ffn_dim=37,
    )  # fmt: skip


def _falcon(**options):
    return make("FalconForCausalLM", "FalconConfig", **TINY, **options)


def _deberta_v2(**options):
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4} | options
    return make("DebertaV2ForMaskedLM", "DebertaV2Config", **BERT, **options)


def _wavlm(**options):
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    return make(
        "WavLMModel", "WavLMConfig", hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=37, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, num_buckets=16,
        max_bucket_distance=32, layerdrop=0.0, **convolutions, **options,
    )  # fmt: skip


def _swin(architecture, config, **options):
    return make(
        architecture, config, image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4, **options,
    )  # fmt: skip


def _mvp(**options):
    return make(
        "MvpForConditionalGeneration", "MvpConfig", vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37,
        max_position_embeddings=64, pad_token_id=1, decoder_start_token_id=2, **options,
    )  # fmt: skip


# Decoders that generate with a cache: called with ids, with padding on either side, and step by step
DECODERS = {
    "bloom": lambda: make("BloomForCausalLM", "BloomConfig", vocab_size=60, hidden_size=32, n_layer=2, n_head=4),
    "bloom-6-heads-in-slices": lambda: make(
        "BloomForCausalLM", "BloomConfig", vocab_size=60, hidden_size=48, n_layer=2, n_head=6, pretraining_tp=2,
        slow_but_exact=True, apply_residual_connection_post_layernorm=True,
    ),
    "codegen": lambda: make(
        "CodeGenForCausalLM", "CodeGenConfig", vocab_size=60, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
        n_positions=64, n_ctx=64,
    ),
    "cpmant": lambda: make(
        "CpmAntForCausalLM", "CpmAntConfig", vocab_size=90, hidden_size=32, num_attention_heads=4, dim_head=8,
        dim_ff=37, num_hidden_layers=2, prompt_length=4, prompt_types=4, segment_types=4,
        position_bias_num_buckets=16, position_bias_max_distance=32,
    ),
    "falcon-alibi": lambda: _falcon(alibi=True, multi_query=False, bias=True),
    "falcon-grouped": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-multi-head": lambda: _falcon(multi_query=False, parallel_attn=False),
    "falcon-multi-query": lambda: _falcon(multi_query=True),
    "falcon-multi-query-alibi": lambda: _falcon(multi_query=True, alibi=True),
    "gpt_neo": lambda: make(
        "GPTNeoForCausalLM", "GPTNeoConfig", vocab_size=60, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=64,
    ),
    "gpt_neox_japanese": lambda: make(
        "GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", **TINY, intermediate_multiple_size=2,
        max_position_embeddings=64,
    ),
    "gptj": lambda: make(
        "GPTJForCausalLM", "GPTJConfig", vocab_size=60, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64,
    ),
    "megatron-bert-decoder": lambda: make(
        "MegatronBertForCausalLM", "MegatronBertConfig", **BERT, is_decoder=True
    ),
    "mpt": lambda: make(
        "MptForCausalLM", "MptConfig", vocab_size=60, d_model=32, n_layers=2, n_heads=4, max_seq_len=64
    ),
    "mpt-6-heads-clipped": lambda: make(
        "MptForCausalLM", "MptConfig", vocab_size=60, d_model=48, n_layers=2, n_heads=6, max_seq_len=64,
        attn_config={"clip_qkv": 0.5, "softmax_scale": 0.7, "alibi_bias_max": 4},
    ),
    "rembert-decoder": lambda: make(
        "RemBertForCausalLM", "RemBertConfig", **BERT, is_decoder=True, input_embedding_size=16,
        output_embedding_size=16,
    ),
    "roformer-decoder": lambda: make(
        "RoFormerForCausalLM", "RoFormerConfig", **BERT, is_decoder=True, embedding_size=32
    ),
    "trocr": lambda: make(
        "TrOCRForCausalLM", "TrOCRConfig", vocab_size=60, d_model=32, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=37, max_position_embeddings=64,
    ),
    "xglm": lambda: make(
        "XGLMForCausalLM", "XGLMConfig", vocab_size=60, d_model=32, num_layers=2, attention_heads=4, ffn_dim=37,
        max_position_embeddings=64,
    ),
}  # fmt: skip

# Encoders of text: called with ids, and with padding on either side
ENCODERS = {
    "big_bird": lambda: make(
        "BigBirdForMaskedLM", "BigBirdConfig", **BERT, attention_type="original_full"
    ),
    "deberta": lambda: make(
        "DebertaForMaskedLM", "DebertaConfig", **BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "deberta-c2p": lambda: make(
        "DebertaForMaskedLM", "DebertaConfig", **BERT, relative_attention=True, pos_att_type=["c2p"],
        max_relative_positions=5,
    ),
    "deberta-plain": lambda: make("DebertaForMaskedLM", "DebertaConfig", **BERT, relative_attention=False),
    "deberta-v2": _deberta_v2,
    "deberta-v2-p2c": lambda: _deberta_v2(pos_att_type=["p2c"], position_buckets=-1),
    "deberta-v2-plain": lambda: _deberta_v2(relative_attention=False),
    "deberta-v3": lambda: _deberta_v2(
        share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False, conv_kernel_size=3
    ),
    "flaubert": lambda: make(
        "FlaubertWithLMHeadModel", "FlaubertConfig", vocab_size=60, emb_dim=32, n_layers=2, n_heads=4
    ),
    "luke-words": lambda: make(
        "LukeModel", "LukeConfig", **BERT, entity_vocab_size=9, entity_emb_size=16, use_entity_aware_attention=True
    ),
    "megatron-bert": lambda: make("MegatronBertModel", "MegatronBertConfig", **BERT),
    "mpnet": lambda: make("MPNetForMaskedLM", "MPNetConfig", **BERT),
    "openai-gpt": lambda: make(
        "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4
    ),
    "rembert": lambda: make("RemBertModel", "RemBertConfig", **BERT, input_embedding_size=16),
    "roformer": lambda: make("RoFormerModel", "RoFormerConfig", **(BERT | {"intermediate_size": 64}), embedding_size=32),
    "roformer-values": lambda: make("RoFormerModel", "RoFormerConfig", **BERT, embedding_size=32, rotary_value=True),
    "squeezebert": lambda: make("SqueezeBertModel", "SqueezeBertConfig", **(BERT | {"intermediate_size": 64}), embedding_size=32),
    "tapas": lambda: make("TapasModel", "TapasConfig", **BERT),
    "visual_bert": lambda: make("VisualBertModel", "VisualBertConfig", **BERT, visual_embedding_dim=16),
    "xlm": lambda: make("XLMWithLMHeadModel", "XLMConfig", vocab_size=60, emb_dim=32, n_layers=2, n_heads=4),
    "xlm-causal": lambda: make(
        "XLMWithLMHeadModel", "XLMConfig", vocab_size=60, emb_dim=32, n_layers=2, n_heads=4, causal=True
    ),
}  # fmt: skip

# Everything else: model and inputs
OTHERS = {
    "bark-semantic": lambda: (
        make(
            "BarkSemanticModel", "BarkSemanticConfig", block_size=64, input_vocab_size=60, output_vocab_size=60,
            num_layers=2, num_heads=4, hidden_size=32,
        ),
        padded("left"),
    ),
    "blip": lambda: (
        make(
            "BlipModel", "BlipConfig", vision_config=VIT, projection_dim=16,
            text_config=BERT | {"encoder_hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        ),
        padded("right") | pixels(),
    ),
    "blip-caption": lambda: (
        make(
            "BlipForConditionalGeneration", "BlipConfig", vision_config=VIT, projection_dim=16,
            text_config=BERT | {"encoder_hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        ),
        ids() | pixels(),
    ),
    "canine": lambda: (
        make(
            "CanineModel", "CanineConfig", **BERT, local_transformer_stride=8, num_hash_buckets=64,
            downsampling_rate=2,
        ),
        padded("right", length=16),
    ),
    "clap-audio": lambda: (
        make(
            "ClapAudioModelWithProjection", "ClapAudioConfig", patch_size=2, patch_stride=[2, 2],
            patch_embeds_hidden_size=16, depths=[2, 2], num_attention_heads=[2, 4], window_size=4, spec_size=32,
            num_mel_bins=16, hidden_size=32, enable_fusion=False,
        ),
        {"input_features": torch.linspace(0, 9, 2 * 64 * 16).sin().reshape(2, 1, 64, 16)},
    ),
    "data2vec-vision": lambda: (
        make(
            "Data2VecVisionModel", "Data2VecVisionConfig", **VIT, use_relative_position_bias=True,
        ),
        pixels(),
    ),
    "data2vec-vision-shared": lambda: (
        make(
            "Data2VecVisionModel", "Data2VecVisionConfig", **VIT, use_shared_relative_position_bias=True,
        ),
        pixels(),
    ),
    "donut-swin": lambda: (_swin("DonutSwinModel", "DonutSwinConfig"), pixels()),
    "fastspeech2_conformer": lambda: (
        make(
            "FastSpeech2ConformerModel", "FastSpeech2ConformerConfig", hidden_size=32, vocab_size=60, num_mel_bins=8,
            encoder_num_attention_heads=4, encoder_layers=1, encoder_linear_units=37, decoder_layers=1,
            decoder_num_attention_heads=4, decoder_linear_units=37, speech_decoder_postnet_units=16,
        ),
        {"input_ids": padded("right")["input_ids"], "attention_mask": padded("right")["attention_mask"]},
    ),
    "flava": lambda: (
        make(
            "FlavaModel", "FlavaConfig", image_config=VIT, text_config=BERT, hidden_size=32, projection_dim=16,
            multimodal_config={k: VIT[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
        ),
        padded("right") | pixels(),
    ),
    "fsmt": lambda: (
        make(
            "FSMTForConditionalGeneration", "FSMTConfig", langs=["en", "de"], src_vocab_size=60, tgt_vocab_size=60,
            d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=64,
        ),
        padded("right") | {"decoder_input_ids": ids(length=7)["input_ids"]},
    ),
    "git": lambda: (
        make("GitForCausalLM", "GitConfig", **BERT, vision_config=VIT), padded("left") | pixels()
    ),
    "glpn": lambda: (
        make(
            "GLPNModel", "GLPNConfig", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
        ),
        pixels(),
    ),
    "got_ocr2-vision": lambda: (
        build(_got_ocr2(), transformers.GotOcr2Config().vision_config.__class__(**_SAM)), pixels()
    ),
    "groupvit": lambda: (
        make(
            "GroupViTModel", "GroupViTConfig", projection_dim=16, projection_intermediate_dim=16,
            text_config=BERT, vision_config=VIT | {"depths": [1, 1, 1], "num_group_tokens": [8, 4, 0],
                                                   "num_output_groups": [8, 4, 4]},
        ),
        padded("right") | pixels(),
    ),
    "imagegpt": lambda: (
        make(
            "ImageGPTModel", "ImageGPTConfig", vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4,
            scale_attn_by_inverse_layer_idx=True,
        ),
        padded("left"),
    ),
    "imagegpt-upcast": lambda: (
        make(
            "ImageGPTModel", "ImageGPTConfig", vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4,
            reorder_and_upcast_attn=True,
        ),
        ids(),
    ),
    "layoutlmv3": lambda: (
        make(
            "LayoutLMv3Model", "LayoutLMv3Config", **BERT, max_2d_position_embeddings=128, coordinate_size=6,
            shape_size=4, input_size=32, patch_size=8, rel_pos_bins=8, rel_2d_pos_bins=8,
        ),
        padded("right") | boxes() | pixels(),
    ),
    "luke": lambda: (
        make(
            "LukeModel", "LukeConfig", **BERT, entity_vocab_size=9, entity_emb_size=16,
            use_entity_aware_attention=True,
        ),
        padded("right") | {
            "entity_ids": torch.tensor([[1, 2], [3, 4]]),
            "entity_position_ids": torch.tensor([[[1, 2], [3, -1]], [[0, -1], [5, 6]]]),
            "entity_attention_mask": torch.ones(2, 2),
        },
    ),
    "lxmert": lambda: (
        make(
            "LxmertModel", "LxmertConfig", **BERT, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16,
        ),
        padded("right") | {
            "visual_feats": torch.linspace(0, 9, 2 * 5 * 16).sin().reshape(2, 5, 16),
            "visual_pos": torch.linspace(0, 1, 2 * 5 * 4).reshape(2, 5, 4),
        },
    ),
    "maskformer-swin": lambda: (_swin("MaskFormerSwinModel", "MaskFormerSwinConfig"), pixels()),
    "mgp-str": lambda: (
        make(
            "MgpstrModel", "MgpstrConfig", image_size=[16, 32], patch_size=4, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, max_token_length=5,
        ),
        {"pixel_values": pixels()["pixel_values"][:, :, :16]},
    ),
    "mobilevit": lambda: (
        make(
            "MobileViTModel", "MobileViTConfig", image_size=64, hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32], num_attention_heads=4,
        ),
        pixels(128, batch=1),
    ),
    "mvp": lambda: (_mvp(), padded("right") | {"decoder_input_ids": ids(length=7)["input_ids"]}),
    "mvp-prompt": lambda: (
        _mvp(use_prompt=True, prompt_length=3, prompt_mid_dim=16),
        ids() | {"decoder_input_ids": ids(length=7)["input_ids"]},
    ),
    "perceiver": lambda: (
        make(
            "PerceiverModel", "PerceiverConfig", num_latents=6, d_latents=32, d_model=24, num_blocks=2,
            num_self_attends_per_block=1, num_self_attention_heads=4, num_cross_attention_heads=2, qk_channels=16,
            v_channels=32,
        ),
        {
            "inputs": torch.linspace(0, 9, 2 * 11 * 24).sin().reshape(2, 11, 24),
            "attention_mask": padded("right")["attention_mask"],
        },
    ),
    "pvt": lambda: (
        make(
            "PvtModel", "PvtConfig", image_size=32, num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[16, 32],
            sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
        ),
        pixels(),
    ),
    "pvt_v2": lambda: (_pvt_v2(), pixels(64)),
    "pvt_v2-linear": lambda: (_pvt_v2(linear_attention=True), pixels(64)),
    "sam-vision": lambda: (
        make("SamVisionModel", "SamVisionConfig", **_SAM), pixels()
    ),
    "sam_hq-vision": lambda: (
        make("SamHQVisionModel", "SamHQVisionConfig", **_SAM), pixels()
    ),
    "seggpt": lambda: (
        make(
            "SegGptModel", "SegGptConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            image_size=[32, 16], patch_size=4, intermediate_hidden_state_indices=[1], pretrain_image_size=16,
            decoder_hidden_size=8, merge_index=0,
        ),
        {n: pixels(16)["pixel_values"] for n in ("pixel_values", "prompt_pixel_values", "prompt_masks")},
    ),
    "speecht5": lambda: (
        make(
            "SpeechT5Model", "SpeechT5Config", **TINY, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37,
            encoder_max_relative_position=5, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        ),
        {
            "input_values": torch.linspace(0, 9, 2 * 11 * 32).sin().reshape(2, 11, 32),
            "decoder_input_values": torch.linspace(0, 5, 2 * 7 * 32).sin().reshape(2, 7, 32),
            "attention_mask": padded("right")["attention_mask"],
        },
    ),
    "swin2sr": lambda: (
        make(
            "Swin2SRModel", "Swin2SRConfig", image_size=16, patch_size=1, embed_dim=16, depths=[2, 2],
            num_heads=[2, 4], window_size=8,
        ),
        pixels(),
    ),
    "swinv2": lambda: (_swin("Swinv2Model", "Swinv2Config"), pixels()),
    "table-transformer": lambda: (_table_transformer(), pixels(64)),
    "timesformer": lambda: (
        make("TimesformerModel", "TimesformerConfig", **VIT, num_frames=3),
        {"pixel_values": torch.linspace(-1, 9, 2 * 3 * 3 * 32 * 32).sin().reshape(2, 3, 3, 32, 32)},
    ),
    "tvp": lambda: (_tvp(), ids(batch=1) | {"pixel_values": pixels(64)["pixel_values"][None]}),
    "vilt": lambda: (make("ViltModel", "ViltConfig", **(BERT | VIT)), padded("right") | pixels()),
    "vitdet": lambda: (
        make(
            "VitDetModel", "VitDetConfig", **(PIXELS | {"patch_size": 4}), hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, use_relative_position_embeddings=True, window_block_indices=[0], window_size=3,
        ),
        pixels(),
    ),
    "wavlm": lambda: (_wavlm(), {"input_values": torch.linspace(0, 99, 2 * 400).sin().reshape(2, 400)}),
    "wavlm-padded-stable": lambda: (
        _wavlm(do_stable_layer_norm=True, feat_extract_norm="layer"),
        {
            "input_values": torch.linspace(0, 99, 2 * 400).sin().reshape(2, 400),
            "attention_mask": torch.ones(2, 400, dtype=torch.long).index_fill(1, torch.arange(300, 400), 0),
        },
    ),
}  # fmt: skip

_SAM = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 4, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 37, "num_pos_feats": 8,
}  # fmt: skip


def _got_ocr2():
    from transformers.models.got_ocr2.modeling_got_ocr2 import GotOcr2VisionEncoder

    return GotOcr2VisionEncoder


def _pvt_v2(**options):
    return make(
        "PvtV2Model", "PvtV2Config", image_size=64, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
        **options,
    )  # fmt: skip


def _tvp():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_channels=3, out_features=["stage2"]
    )
    return make(
        "TvpModel", "TvpConfig", **BERT, backbone_config=backbone, max_img_size=64, num_frames=2,
        max_grid_col_position_embeddings=16, max_grid_row_position_embeddings=16, visual_prompt_size=8,
        visual_prompter_type="framepad",
    )  # fmt: skip
