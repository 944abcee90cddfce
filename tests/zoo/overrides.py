"""What the rules by field name get wrong: data by config class name or model type; ``...`` drops a rule's value."""


class Whole(dict):
    """A dict that takes the place of the rules' sub-config, where a plain dict is merged into it."""


def mrope(*sections, **more):
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(sections),
            **more,
        }
    }


RESNET = Whole(
    model_type="resnet",
    embedding_size=16,
    hidden_sizes=[16, 16, 32, 64],
    depths=[1, 1, 1, 1],
    out_features=["stage4"],
)
SWIN_LEVELS = Whole(
    model_type="swin",
    image_size=64,
    embed_dim=16,
    depths=[1, 1, 1, 1],
    num_heads=[2, 2, 2, 2],
    window_size=2,
    out_features=["stage1", "stage2", "stage3", "stage4"],
)
RESNET_LEVELS = Whole(RESNET, out_features=["stage2", "stage3", "stage4"])

# Types whose widths follow from each other in code: only depth and vocabulary shrink.
WIDE = {
    "align",
    "bit",
    "efficientnet",
    "textnet",
    "uvdoc",
    "pp_ocrv5_mobile_rec",
    "pp_ocrv6_small_det",
    "pp_ocrv6_medium_det",
    "pocket_tts_audio_tokenizer_decoder",
    "fastspeech2_conformer_with_hifigan",
    "xclip",
    "lilt",
    "layoutlmv3",
    "mimi",
    "mimi_decoder",
    "pocket_tts",
    "pocket_tts_audio_tokenizer",
    "clap",
}

NARROW = {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320}
BANDS = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]} | {
    f"{kind}_{ratio}ratio": [
        [size * tall + 1 - tall, size * wide + 1 - wide],
        1,
        [size // 2 * tall, size // 2 * wide],
    ]
    for kind, tall, wide in (
        ("vertical_long_to_small_conv", 1, 0),
        ("horizontal_small_to_long_conv", 0, 1),
        ("symmetric_conv_long", 1, 1),
    )
    for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
}

OVERRIDES = {
    "align": {"projection_dim": 80, "vision_config": NARROW},
    "efficientnet": NARROW,
    "uvdoc": {
        "bridge_connector": [128, 128],
        "backbone_config": {
            "out_features": ["stage1", "stage2", "stage3", "stage4", "stage5", "stage6"]
        },
    },
    "pp_ocrv6_medium_det": {
        "intraclass_block_config": BANDS,
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 4, 8],
    },
    "pp_ocrv6_small_det": {"layer_list_out_channels": [48, 96, 192, 384]},
    # rotary sections of three axes fill half a head of 16
    **dict.fromkeys(
        "glm4v_text glm_image_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text "
        "cosmos3_edge_text hunyuan_vl_text ernie4_5_vl_moe_text qwen3_vl_text qwen3_vl_moe_text "
        "qwen3_omni_moe_text".split(),
        mrope(2, 2, 4),
    ),
    "glm4v_moe_text": mrope(1, 1, 2, partial_rotary_factor=0.5),
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # hybrids whose pattern the rules cannot see
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "layers_block_type": ...,
        "attention_hidden_size": ...,
        "head_dim": ...,
        "attention_head_dim": ...,
    },
    "moonshine_streaming_encoder": {"sliding_windows": [[4, 1], [4, 0]], "num_key_value_heads": 4},
    # sizes that must agree
    "esmc": {"num_key_value_heads": 4},
    "deepseek_v2": {"head_dim": 8},
    "longcat_flash": {"head_dim": 8, "num_layers": 1, "zero_expert_num": 2},
    "efficientloftr": {
        "hidden_size": 64,
        "out_features": [16, 16, 32, 64],
        "num_attention_heads": 8,
        "stage_num_blocks": [1, 1, 1, 1],
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "glm5_next_text": {
        "index_kpool": 2,
        "head_dim": 0,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "GradiumPhononTTSFlowHeadConfig": {"condition_dim": 64},
    "mamba2": {"head_dim": 32, "n_groups": 2},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "Nemotron3DiarizationHeadConfig": {"audio_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        "swin donut-swin maskformer-swin".split(),
        {"window_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]},
    ),
    **dict.fromkeys(
        "swinv2 swin2sr".split(),
        {"window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]},
    ),
    "granite_speech_encoder": {"context_size": 8},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    **dict.fromkeys(
        ("lw_detr", "rf_detr"),
        {
            "backbone_config": {
                "image_size": 32,
                "num_windows": 4,
                "window_block_indices": [0],
                "out_indices": [1, 2],
            },
            "projector_scale_factors": [1.0],
        },
    ),
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "emu3": {"vocabulary_map": {"<image>": 120}},
    "step3p5": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "qformer_config": {"cross_attention_frequency": 1},
    },
    "granite_speech5_encoder": {"num_key_value_heads": 4, "context_size": 8},
    "granite_speech_plus_encoder": {"context_size": 8},
    "fun_asr_nano_encoder": {
        "num_stacked_frames": 1,
        "num_timestamp_prediction_layers": 1,
        "fsmn_kernel_size": 3,
    },
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 2, 1, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 2, 4],
        "window_size_per_stage": [4, 4, 4, 4],
        "global_attention_blocks": [2],
        "window_positional_embedding_background_size": [2, 2],
        "num_attention_heads": 1,
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 32,
    },
    "sam2": {
        "prompt_encoder_config": {"hidden_size": 32, "patch_size": 16, "image_size": 64},
        "mask_decoder_config": {"hidden_size": 32},
    },
    **dict.fromkeys(
        ("sam_vision_model", "sam_hq_vision_model"),
        {"output_channels": 32, "num_pos_feats": 16, "window_size": 2, "global_attn_indexes": [1]},
    ),
    **dict.fromkeys(
        ("sam", "sam_hq"),
        {
            "prompt_encoder_config": {"hidden_size": 32, "image_embedding_size": 4},
            "mask_decoder_config": {"hidden_size": 32, "vit_dim": 64},
        },
    ),
    "sam3_tracker": {
        "vision_config": {
            "fpn_hidden_size": 32,
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        "prompt_encoder_config": {"hidden_size": 32},
        "mask_decoder_config": {"hidden_size": 32},
    },
    "clvp_encoder": {"use_rotary_embedding": False},
    "depth_pro": {
        "patch_size": 16,
        "scaled_images_ratios": [0.5, 1],
        "scaled_images_overlap_ratios": [0.0, 0.0],
        "scaled_images_feature_dims": [64, 32],
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "fusion_hidden_size": 32,
        **dict.fromkeys(
            ("image_model_config", "patch_model_config", "fov_model_config"), {"image_size": 16}
        ),
    },
    "kyutai_speech_to_text": {"num_codebooks": 2, "codebook_vocab_size": 32},
    "tvp": {"max_img_size": 128, "visual_prompt_size": 8, "backbone_config": RESNET},
    "mimi": {"sliding_window": 8},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "seggpt": {
        "image_size": [64, 32],
        "patch_size": 8,
        "merge_index": 0,
        "intermediate_hidden_state_indices": [0, 1],
        "pretrain_image_size": 32,
    },
    "funnel": {"block_sizes": [1, 1], "architectures": ["FunnelModel"]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "molmo2_vision": {"image_size": [32, 32]},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "moshi": {"num_codebooks": 2},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0},
    "timesfm": {"patch_length": 8, "horizon_length": 4},
    "timesfm2_5": {"patch_length": 8, "output_patch_length": 4},
    "qwen3_asr_encoder": {"n_window": 50, "n_window_infer": 100},
    "lightglue": {"descriptor_dim": 64},
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [4, 8],
        "attn_layers": ["local", "lsh"],
        "is_decoder": True,
        "num_buckets": 2,
        "attention_head_size": 16,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "feed_forward_size": 64,
    },
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 4], "adapter_in_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "downsample_hidden_size": 32},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe_text": mrope(2, 2, 4) | {"moe_intermediate_size": [64, 64]},
    **dict.fromkeys(
        "autoformer informer time_series_transformer".split(),
        {
            "prediction_length": 4,
            "context_length": 8,
            "label_length": 4,
            "input_size": 1,
            "scaling": "mean",
        },
    ),
    # backbones: timm's are not needed
    **dict.fromkeys(
        "detr conditional_detr table-transformer dab-detr".split(), {"backbone_config": RESNET}
    ),
    "deformable_detr": {"backbone_config": RESNET_LEVELS},
    **dict.fromkeys(
        "d_fine deimv2 pp_doclayout_v3 pp_doclayout_v4".split(),
        {"anchor_image_size": ..., "encoder_in_channels": ..., "decoder_in_channels": [64, 64, 64]},
    ),
    **dict.fromkeys(
        "rt_detr rt_detr_v2".split(),
        {"anchor_image_size": ..., "decoder_in_channels": [64, 64, 64]},
    ),
    **dict.fromkeys(
        "grounding-dino mm-grounding-dino oneformer mask2former maskformer".split(),
        {"backbone_config": SWIN_LEVELS},
    ),
    "omdet-turbo": {
        "backbone_config": Whole(SWIN_LEVELS, out_features=["stage2", "stage3", "stage4"]),
        "encoder_in_channels": [32, 64, 128],
        "text_projection_in_dim": 64,
        "apply_layernorm_after_vision_backbone": False,
        "text_projection_out_dim": 64,
        "class_embed_dim": 64,
        "image_size": 64,
        "vision_features_channels": [32] * 3,
        "task_encoder_hidden_dim": 64,
        "decoder_hidden_dim": 32,
        "encoder_hidden_dim": 32,
        "d_model": ...,
        "encoder_dim_feedforward": 64,
        "decoder_dim_feedforward": 64,
    },
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0, "attention_dropout": 0.0}},
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},
    "kosmos-2": {"latent_query_num": 4},
    "hgnet_v2": {"hidden_sizes": ...},
    **dict.fromkeys(("neucodec", "xcodec2"), {"quantization_dim": 128, "num_key_value_heads": 4}),
    **dict.fromkeys("glpn pvt_v2 pvt segformer".split(), {"sr_ratios": [4, 2, 1, 1]}),
    **dict.fromkeys("big_bird bigbird_pegasus".split(), {"attention_type": "original_full"}),
    "InformerConfig": {"attention_type": "full"},
    "diffusion_gemma_text": {"global_head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [32, 32]},
    "vjepa2": {
        "frames_per_clip": 4,
        "pred_hidden_size": 64,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
    },
}

SESSION = "its forward takes a video session, not tensors"
LENDER = (
    "it reads the cache of the model that it assists, which AutoModelForCausalLM does not build"
)
BROKEN = "AutoModel cannot build it from its own config in this version of Transformers: "

# Why a type is not built, where the error alone would not tell.
REASONS = {
    "bark": "it is four models in a row without a forward of its own",
    "glm_image_vqmodel": "it encodes and decodes without a forward of its own",
    **dict.fromkeys("edgetam_video sam2_video sam3_tracker_video sam3_video".split(), SESSION),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), LENDER),
    "evolla": BROKEN + "the class that its mapping names does not take it",
    **dict.fromkeys(
        ("musicgen", "musicgen_melody"),
        BROKEN + "the class that its mapping names wants the decoder's config",
    ),
    "rf_detr": BROKEN + "the type of its backbone's config is not registered",
    "voxtral_realtime_text": BROKEN + "the class that its mapping names does not exist",
}
