"""Speech models: name -> (model, inputs)."""

import torch

from .build import TINY, make, padded


def _wavlm(**options):
    convolutions = {
        "conv_dim": (8, 8),
        "conv_stride": (4, 4),
        "conv_kernel": (8, 4),
        "num_feat_extract_layers": 2,
    }
    return make(
        "WavLMModel",
        "WavLMConfig",
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=37,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        num_buckets=16,
        max_bucket_distance=32,
        layerdrop=0.0,
        **convolutions,
        **options,
    )


SPEECH = {
    "bark-semantic": lambda: (
        make(
            "BarkSemanticModel",
            "BarkSemanticConfig",
            block_size=64,
            input_vocab_size=60,
            output_vocab_size=60,
            num_layers=2,
            num_heads=4,
            hidden_size=32,
        ),
        padded("left"),
    ),
    "clap-audio": lambda: (
        make(
            "ClapAudioModelWithProjection",
            "ClapAudioConfig",
            patch_size=2,
            patch_stride=[2, 2],
            patch_embeds_hidden_size=16,
            depths=[2, 2],
            num_attention_heads=[2, 4],
            window_size=4,
            spec_size=32,
            num_mel_bins=16,
            hidden_size=32,
            enable_fusion=False,
        ),
        {"input_features": torch.linspace(0, 9, 2 * 64 * 16).sin().reshape(2, 1, 64, 16)},
    ),
    "sew-d": lambda: (
        make(
            "SEWDModel",
            "SEWDConfig",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=37,
            conv_dim=(8, 8),
            conv_stride=(4, 4),
            conv_kernel=(8, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            squeeze_factor=2,
            position_buckets=4,
            max_position_embeddings=64,
            layerdrop=0.0,
            feat_extract_norm="layer",
        ),
        {
            "input_values": torch.linspace(0, 99, 2 * 400).sin().reshape(2, 400),
            "attention_mask": torch.ones(2, 400, dtype=torch.long).index_fill(
                1, torch.arange(300, 400), 0
            ),
        },
    ),
    "speecht5": lambda: (
        make(
            "SpeechT5Model",
            "SpeechT5Config",
            **TINY,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            encoder_max_relative_position=5,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
        {
            "input_values": torch.linspace(0, 9, 2 * 11 * 32).sin().reshape(2, 11, 32),
            "decoder_input_values": torch.linspace(0, 5, 2 * 7 * 32).sin().reshape(2, 7, 32),
            "attention_mask": padded("right")["attention_mask"],
        },
    ),
    "wavlm": lambda: (
        _wavlm(),
        {"input_values": torch.linspace(0, 99, 2 * 400).sin().reshape(2, 400)},
    ),
    "wavlm-padded-stable": lambda: (
        _wavlm(do_stable_layer_norm=True, feat_extract_norm="layer"),
        {
            "input_values": torch.linspace(0, 99, 2 * 400).sin().reshape(2, 400),
            "attention_mask": torch.ones(2, 400, dtype=torch.long).index_fill(
                1, torch.arange(300, 400), 0
            ),
        },
    ),
}
