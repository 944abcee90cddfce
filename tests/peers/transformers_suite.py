"""Transformers' common tests of models, on testers of ours: tiny models of five families."""

from __future__ import annotations

import sys
import unittest

import torch
import transformers as hf

from .patched import MECHANISM, patch_all
from .source import suite

sys.path.insert(0, str(suite("transformers")))
from transformers_tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor  # noqa: E402

TEXT = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=37,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Tester:
    """What the common tests ask of a model's tester."""

    batch_size, seq_length, is_training = 4, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 4, 99
    encoder_seq_length = decoder_seq_length = key_length = seq_length
    image_size, num_channels, num_labels, type_sequence_label_size = 16, 3, 3, 3

    def get_config(self):
        raise NotImplementedError

    def inputs(self) -> dict:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 10) + 5
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), self.inputs()


class Llama(Tester):
    def get_config(self):
        return hf.LlamaConfig(**TEXT, num_key_value_heads=2)


class Gpt2(Tester):
    def get_config(self):
        drop = dict(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
        return hf.GPT2Config(
            vocab_size=99,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **drop,
        )


class Bert(Tester):
    def get_config(self):
        return hf.BertConfig(**TEXT)


class Vit(Tester):
    seq_length = encoder_seq_length = key_length = 17

    def get_config(self):
        sizes = {
            k: TEXT[k]
            for k in (
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "intermediate_size",
            )
        }
        return hf.ViTConfig(
            **sizes,
            image_size=16,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )

    def inputs(self) -> dict:
        return {"pixel_values": floats_tensor([self.batch_size, 3, 16, 16])}


class Whisper(Tester):
    encoder_seq_length, decoder_seq_length, key_length = 30, 7, 7

    def get_config(self):
        return hf.WhisperConfig(
            vocab_size=99,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            num_mel_bins=8,
            dropout=0.0,
            max_source_positions=30,
            max_target_positions=40,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )

    def inputs(self) -> dict:
        ids = ids_tensor([self.batch_size, self.seq_length], 80) + 5
        features = floats_tensor([self.batch_size, 8, 60], scale=1.0)
        return {
            "input_features": features,
            "decoder_input_ids": ids,
            "decoder_attention_mask": torch.ones_like(ids),
        }


FAMILIES = {
    "llama": (
        Llama,
        [hf.LlamaModel, hf.LlamaForCausalLM, hf.LlamaForSequenceClassification],
        hf.LlamaConfig,
    ),
    "gpt2": (
        Gpt2,
        [hf.GPT2Model, hf.GPT2LMHeadModel, hf.GPT2ForSequenceClassification],
        hf.GPT2Config,
    ),
    "bert": (
        Bert,
        [hf.BertModel, hf.BertForMaskedLM, hf.BertForTokenClassification],
        hf.BertConfig,
    ),
    "vit": (Vit, [hf.ViTModel, hf.ViTForImageClassification], hf.ViTConfig),
    "whisper": (Whisper, [hf.WhisperModel, hf.WhisperForConditionalGeneration], hf.WhisperConfig),
}


def case(family: str) -> type:
    """The test case of a family."""
    tester, classes, _ = FAMILIES[family]

    def set_up(self):
        self.model_tester = tester()

    body = {
        "setUp": set_up,
        "all_model_classes": tuple(classes),
        "is_encoder_decoder": family == "whisper",
    }
    body |= {"test_resize_embeddings": family != "vit", "pipeline_model_mapping": {}}
    return type(f"Test_{family}", (ModelTesterMixin, unittest.TestCase), body)


if MECHANISM != "stock":
    patch_all()
globals().update({f"Test_{family}": case(family) for family in FAMILIES})
