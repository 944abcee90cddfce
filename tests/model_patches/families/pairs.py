"""Models of several inputs, or of one of their own kind: name -> (model, inputs)."""

import torch
import transformers

from .build import BERT, PIXELS, VIT, boxes, ids, make, padded, pixels


def _mvp(**options):
    return make(
        "MvpForConditionalGeneration",
        "MvpConfig",
        vocab_size=60,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
        max_position_embeddings=64,
        pad_token_id=1,
        decoder_start_token_id=2,
        **options,
    )


def _tvp():
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_channels=3,
        out_features=["stage2"],
    )
    return make(
        "TvpModel",
        "TvpConfig",
        **BERT,
        backbone_config=backbone,
        max_img_size=64,
        num_frames=2,
        max_grid_col_position_embeddings=16,
        max_grid_row_position_embeddings=16,
        visual_prompt_size=8,
        visual_prompter_type="framepad",
    )


PAIRS = {
    "bigbird_pegasus": lambda: (
        make(
            "BigBirdPegasusModel",
            "BigBirdPegasusConfig",
            vocab_size=60,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            max_position_embeddings=64,
            attention_type="original_full",
        ),
        padded("right") | {"decoder_input_ids": ids(length=7)["input_ids"]},
    ),
    "blip": lambda: (
        make(
            "BlipModel",
            "BlipConfig",
            vision_config=VIT,
            projection_dim=16,
            text_config=BERT
            | {"encoder_hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        ),
        padded("right") | pixels(),
    ),
    "blip-caption": lambda: (
        make(
            "BlipForConditionalGeneration",
            "BlipConfig",
            vision_config=VIT,
            projection_dim=16,
            text_config=BERT
            | {"encoder_hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        ),
        ids() | pixels(),
    ),
    "bros": lambda: (
        make("BrosModel", "BrosConfig", **(BERT | {"hidden_size": 64}), dim_bbox=8, bbox_scale=1.0),
        padded("right")
        | {"bbox": boxes()["bbox"].repeat(1, 1, 2)[..., [0, 1, 2, 1, 2, 3, 0, 3]] / 100},
    ),
    "canine": lambda: (
        make(
            "CanineModel",
            "CanineConfig",
            **BERT,
            local_transformer_stride=8,
            num_hash_buckets=64,
            downsampling_rate=2,
        ),
        padded("right", length=16),
    ),
    "flava": lambda: (
        make(
            "FlavaModel",
            "FlavaConfig",
            image_config=VIT,
            text_config=BERT,
            hidden_size=32,
            projection_dim=16,
            multimodal_config={
                k: VIT[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")
            },
        ),
        padded("right") | pixels(),
    ),
    "fsmt": lambda: (
        make(
            "FSMTForConditionalGeneration",
            "FSMTConfig",
            langs=["en", "de"],
            src_vocab_size=60,
            tgt_vocab_size=60,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            max_position_embeddings=64,
        ),
        padded("right") | {"decoder_input_ids": ids(length=7)["input_ids"]},
    ),
    "git": lambda: (
        make("GitForCausalLM", "GitConfig", **BERT, vision_config=VIT),
        padded("left") | pixels(),
    ),
    "groupvit": lambda: (
        make(
            "GroupViTModel",
            "GroupViTConfig",
            projection_dim=16,
            projection_intermediate_dim=16,
            text_config=BERT,
            vision_config=VIT
            | {"depths": [1, 1, 1], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 4]},
        ),
        padded("right") | pixels(),
    ),
    "imagegpt": lambda: (
        make(
            "ImageGPTModel",
            "ImageGPTConfig",
            vocab_size=60,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            scale_attn_by_inverse_layer_idx=True,
        ),
        padded("left"),
    ),
    "imagegpt-upcast": lambda: (
        make(
            "ImageGPTModel",
            "ImageGPTConfig",
            vocab_size=60,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            reorder_and_upcast_attn=True,
        ),
        ids(),
    ),
    "layoutlmv3": lambda: (
        make(
            "LayoutLMv3Model",
            "LayoutLMv3Config",
            **BERT,
            max_2d_position_embeddings=128,
            coordinate_size=6,
            shape_size=4,
            input_size=32,
            patch_size=8,
            rel_pos_bins=8,
            rel_2d_pos_bins=8,
        ),
        padded("right") | boxes() | pixels(),
    ),
    "luke": lambda: (
        make(
            "LukeModel",
            "LukeConfig",
            **BERT,
            entity_vocab_size=9,
            entity_emb_size=16,
            use_entity_aware_attention=True,
        ),
        padded("right")
        | {
            "entity_ids": torch.tensor([[1, 2], [3, 4]]),
            "entity_position_ids": torch.tensor([[[1, 2], [3, -1]], [[0, -1], [5, 6]]]),
            "entity_attention_mask": torch.ones(2, 2),
        },
    ),
    "lxmert": lambda: (
        make(
            "LxmertModel",
            "LxmertConfig",
            **BERT,
            l_layers=1,
            x_layers=1,
            r_layers=1,
            visual_feat_dim=16,
        ),
        padded("right")
        | {
            "visual_feats": torch.linspace(0, 9, 2 * 5 * 16).sin().reshape(2, 5, 16),
            "visual_pos": torch.linspace(0, 1, 2 * 5 * 4).reshape(2, 5, 4),
        },
    ),
    "mvp": lambda: (_mvp(), padded("right") | {"decoder_input_ids": ids(length=7)["input_ids"]}),
    "mvp-prompt": lambda: (
        _mvp(use_prompt=True, prompt_length=3, prompt_mid_dim=16),
        ids() | {"decoder_input_ids": ids(length=7)["input_ids"]},
    ),
    "perceiver": lambda: (
        make(
            "PerceiverModel",
            "PerceiverConfig",
            num_latents=6,
            d_latents=32,
            d_model=24,
            num_blocks=2,
            num_self_attends_per_block=1,
            num_self_attention_heads=4,
            num_cross_attention_heads=2,
            qk_channels=16,
            v_channels=32,
        ),
        {
            "inputs": torch.linspace(0, 9, 2 * 11 * 24).sin().reshape(2, 11, 24),
            "attention_mask": padded("right")["attention_mask"],
        },
    ),
    "tvp": lambda: (_tvp(), ids(batch=1) | {"pixel_values": pixels(64)["pixel_values"][None]}),
    "vilt": lambda: (make("ViltModel", "ViltConfig", **(BERT | VIT)), padded("right") | pixels()),
    "vitdet": lambda: (
        make(
            "VitDetModel",
            "VitDetConfig",
            **(PIXELS | {"patch_size": 4}),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_relative_position_embeddings=True,
            window_block_indices=[0],
            window_size=3,
        ),
        pixels(),
    ),
}
