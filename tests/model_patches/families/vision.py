"""Vision models: name -> (model, inputs)."""

import torch
import transformers

from .build import VIT, build, make, padded, pixels

_SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
    "window_size": 3,
    "global_attn_indexes": [1],
    "mlp_dim": 37,
    "num_pos_feats": 8,
}


def _table_transformer():
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_channels=3,
        out_features=["stage2"],
    )
    return make(
        "TableTransformerModel",
        "TableTransformerConfig",
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=5,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
    )


def _swin(architecture, config, **options):
    return make(
        architecture,
        config,
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        **options,
    )


def _got_ocr2():
    from transformers.models.got_ocr2.modeling_got_ocr2 import GotOcr2VisionEncoder

    return GotOcr2VisionEncoder


def _pvt_v2(**options):
    return make(
        "PvtV2Model",
        "PvtV2Config",
        image_size=64,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        **options,
    )


VISION = {
    "cvt": lambda: (
        make(
            "CvtModel",
            "CvtConfig",
            embed_dim=[16, 32],
            num_heads=[2, 4],
            depth=[1, 2],
            patch_sizes=[7, 3],
            patch_stride=[4, 2],
            patch_padding=[2, 1],
            mlp_ratio=[2.0, 2.0],
            attention_drop_rate=[0.0, 0.0],
            drop_rate=[0.0, 0.0],
            drop_path_rate=[0.0, 0.0],
            qkv_bias=[True, True],
            cls_token=[False, True],
            qkv_projection_method=["dw_bn", "dw_bn"],
            kernel_qkv=[3, 3],
            padding_kv=[1, 1],
            stride_kv=[2, 2],
            padding_q=[1, 1],
            stride_q=[1, 1],
        ),
        pixels(),
    ),
    "data2vec-vision": lambda: (
        make(
            "Data2VecVisionModel",
            "Data2VecVisionConfig",
            **VIT,
            use_relative_position_bias=True,
        ),
        pixels(),
    ),
    "data2vec-vision-shared": lambda: (
        make(
            "Data2VecVisionModel",
            "Data2VecVisionConfig",
            **VIT,
            use_shared_relative_position_bias=True,
        ),
        pixels(),
    ),
    "donut-swin": lambda: (_swin("DonutSwinModel", "DonutSwinConfig"), pixels()),
    "fastspeech2_conformer": lambda: (
        make(
            "FastSpeech2ConformerModel",
            "FastSpeech2ConformerConfig",
            hidden_size=32,
            vocab_size=60,
            num_mel_bins=8,
            encoder_num_attention_heads=4,
            encoder_layers=1,
            encoder_linear_units=37,
            decoder_layers=1,
            decoder_num_attention_heads=4,
            decoder_linear_units=37,
            speech_decoder_postnet_units=16,
        ),
        {
            "input_ids": padded("right")["input_ids"],
            "attention_mask": padded("right")["attention_mask"],
        },
    ),
    "glpn": lambda: (
        make(
            "GLPNModel",
            "GLPNConfig",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
        ),
        pixels(),
    ),
    "got_ocr2-vision": lambda: (
        build(_got_ocr2(), transformers.GotOcr2Config().vision_config.__class__(**_SAM)),
        pixels(),
    ),
    "maskformer-swin": lambda: (_swin("MaskFormerSwinModel", "MaskFormerSwinConfig"), pixels()),
    "mgp-str": lambda: (
        make(
            "MgpstrModel",
            "MgpstrConfig",
            image_size=[16, 32],
            patch_size=4,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_token_length=5,
        ),
        {"pixel_values": pixels()["pixel_values"][:, :, :16]},
    ),
    "mobilevit": lambda: (
        make(
            "MobileViTModel",
            "MobileViTConfig",
            image_size=64,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
            num_attention_heads=4,
        ),
        pixels(128, batch=1),
    ),
    "pvt": lambda: (
        make(
            "PvtModel",
            "PvtConfig",
            image_size=32,
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[16, 32],
            sequence_reduction_ratios=[2, 1],
            patch_sizes=[4, 2],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
        ),
        pixels(),
    ),
    "pvt_v2": lambda: (_pvt_v2(), pixels(64)),
    "pvt_v2-linear": lambda: (_pvt_v2(linear_attention=True), pixels(64)),
    "sam-vision": lambda: (make("SamVisionModel", "SamVisionConfig", **_SAM), pixels()),
    "sam_hq-vision": lambda: (make("SamHQVisionModel", "SamHQVisionConfig", **_SAM), pixels()),
    "seggpt": lambda: (
        make(
            "SegGptModel",
            "SegGptConfig",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=[32, 16],
            patch_size=4,
            intermediate_hidden_state_indices=[1],
            pretrain_image_size=16,
            decoder_hidden_size=8,
            merge_index=0,
        ),
        {
            n: pixels(16)["pixel_values"]
            for n in ("pixel_values", "prompt_pixel_values", "prompt_masks")
        },
    ),
    "swin2sr": lambda: (
        make(
            "Swin2SRModel",
            "Swin2SRConfig",
            image_size=16,
            patch_size=1,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=8,
        ),
        pixels(),
    ),
    "swinv2": lambda: (_swin("Swinv2Model", "Swinv2Config"), pixels()),
    "table-transformer": lambda: (_table_transformer(), pixels(64)),
    "timesformer": lambda: (
        make("TimesformerModel", "TimesformerConfig", **VIT, num_frames=3),
        {"pixel_values": torch.linspace(-1, 9, 2 * 3 * 3 * 32 * 32).sin().reshape(2, 3, 3, 32, 32)},
    ),
}
