"""Inputs of the types whose forward takes something of its own: model type -> arguments, given the config."""

import torch

from tests.zoo.inputs import BATCH, GRID, LENGTH, TIME, hidden, noise, ones, pixels, words


def series(config):
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": noise(BATCH, past),
        "past_time_features": noise(BATCH, past, config.num_time_features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": noise(BATCH, config.prediction_length),
        "future_time_features": noise(BATCH, config.prediction_length, config.num_time_features),
    }


def decisions(config):
    return {
        "states": noise(BATCH, LENGTH, config.state_dim),
        "actions": noise(BATCH, LENGTH, config.act_dim),
        "rewards": noise(BATCH, LENGTH, 1),
        "returns_to_go": noise(BATCH, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).repeat(BATCH, 1),
        "attention_mask": ones(BATCH, LENGTH),
    }


def positions():
    rows = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij"), -1)
    return rows.reshape(1, GRID * GRID, 2).repeat(BATCH, 1, 1)


def detections(config):
    ids = words(config)
    return {
        "pixel_values": noise(BATCH, 3, 64, 64),
        "classes_input_ids": ids,
        "classes_attention_mask": torch.ones_like(ids),
        "tasks_input_ids": ids,
        "tasks_attention_mask": torch.ones_like(ids),
        "classes_structure": torch.tensor([1, 1]),
    }


INPUTS = {
    "blt": lambda c: {"input_ids": words(c), "use_cache": False},
    "gemma4_audio": lambda c: {
        "input_features": noise(BATCH, TIME, 128),
        "attention_mask": ones(BATCH, TIME).bool(),
    },
    "idefics": lambda c: {
        "input_ids": words(c),
        "pixel_values": noise(BATCH, 1, 3, 32, 32),
        "image_attention_mask": ones(BATCH, LENGTH, 1),
    },
    "inkling2_vision": lambda c: {
        "pixel_values": noise(BATCH * GRID * GRID, 2 * c.patch_size, 2 * c.patch_size, 3),
        "image_grid_thw": torch.tensor([[1, GRID, GRID]] * BATCH),
    },
    "kosmos-2": lambda c: {
        "input_ids": words(c),
        "pixel_values": pixels(c)[0],
        "image_embeds_position_mask": (torch.arange(LENGTH) < c.latent_query_num).repeat(BATCH, 1),
    },
    "kyutai_speech_to_text": lambda c: {
        "input_ids": torch.randint(
            8, 30, (BATCH, LENGTH, c.num_codebooks + 1), generator=torch.Generator().manual_seed(0)
        )
    },
    **dict.fromkeys(
        ("neucodec", "xcodec2"),
        lambda c: {"input_values": noise(BATCH, 1, 3840), "input_features": noise(BATCH, 12, 16)},
    ),
    "qwen3_asr_encoder": lambda c: {
        "input_features": noise(BATCH, c.num_mel_bins, 100),
        "input_features_mask": ones(BATCH, 100),
    },
    "mobilevit": lambda c: {"pixel_values": noise(BATCH, 3, 128, 128)},
    "speecht5": lambda c: {"input_values": hidden(c), "decoder_input_values": hidden(c)},
    "omdet-turbo": detections,
    "reformer": lambda c: {"input_ids": words(c, length=8)},
    "vibevoice_acoustic_tokenizer_encoder": lambda c: {"hidden_states": noise(BATCH, 1, 3200)},
    "vibevoice_acoustic_tokenizer_decoder": lambda c: {
        "hidden_states": noise(BATCH, c.hidden_size, 4)
    },
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), series),
    "decision_transformer": decisions,
    "blip_2_qformer": lambda c: {
        "query_embeds": hidden(c),
        "encoder_hidden_states": noise(BATCH, LENGTH, c.encoder_hidden_size),
    },
    "timesfm": lambda c: {
        "past_values": noise(BATCH, 32),
        "past_values_padding": torch.zeros(BATCH, 32).long(),
        "freq": torch.zeros(BATCH, 1).long(),
    },
    "pi0": lambda c: {
        "action_embeds": noise(BATCH, 3, c.dit_config.hidden_size),
        "input_ids": words(c),
        "pixel_values": noise(BATCH, 1, 3, 32, 32),
        "pixel_attention_mask": ones(BATCH, 1).bool(),
    },
    "seggpt": lambda c: {
        n: noise(BATCH, 3, 32, 32) for n in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    },
    "muse_glimmer_assistant": lambda c: {
        "noise_embeds": hidden(c),
        "context_hidden_states": noise(BATCH, LENGTH, 5 * c.hidden_size),
        "position_ids": torch.arange(2 * LENGTH).repeat(BATCH, 1),
        "attention_mask": ones(BATCH, 2 * LENGTH),
    },
    "gemma3n_audio": lambda c: {
        "audio_mel": noise(BATCH, TIME, c.input_feat_size),
        "audio_mel_mask": torch.zeros(BATCH, TIME).bool(),
    },
    "gemma4_vision": lambda c: {
        "pixel_values": noise(BATCH, GRID * GRID, 3 * c.patch_size**2),
        "pixel_position_ids": positions(),
    },
    **dict.fromkeys(
        ("mimi_decoder", "pocket_tts_audio_tokenizer_decoder"),
        lambda c: {"latents": noise(BATCH, c.hidden_size, LENGTH)},
    ),
    "tvp": lambda c: {
        "input_ids": words(c)[:1],
        "pixel_values": noise(1, c.num_frames, 3, 128, 128),
        "attention_mask": ones(1, LENGTH),
    },
    "voxtral_realtime": lambda c: {
        "input_ids": words(c),
        "input_features": noise(BATCH, 16, 8 * LENGTH),
    },
    "pp_ocrv5_mobile_rec": lambda c: {"pixel_values": noise(BATCH, 3, 96, 320)},
    "perceiver": lambda c: {"inputs": noise(BATCH, LENGTH, c.d_model)},
    "lxmert": lambda c: {
        "input_ids": words(c),
        "visual_feats": noise(BATCH, 5, c.visual_feat_dim),
        "visual_pos": torch.rand(BATCH, 5, c.visual_pos_dim),
    },
    "oneformer": lambda c: {
        "pixel_values": noise(BATCH, 3, 64, 64),
        "task_inputs": noise(BATCH, c.task_seq_len),
    },
    **dict.fromkeys(
        ("minicpm_ocr_vision", "minicpmv4_7_vision"),
        lambda c: {
            "pixel_values": noise(1, 3, c.patch_size, BATCH * GRID * GRID * c.patch_size),
            "target_sizes": torch.tensor([[GRID, GRID]] * BATCH),
        },
    ),
    **dict.fromkeys(
        ("muse_glimmer_vision", "muse_spark_vision"),
        lambda c: {
            "pixel_values": noise(BATCH * GRID * GRID, 3 * 2 * c.patch_size**2),
            "grid_thw": torch.tensor([[1, GRID, GRID]] * BATCH),
        },
    ),
}
