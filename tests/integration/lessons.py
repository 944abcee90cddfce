"""Tiny models with something real to learn: characters of the Zen of Python, and pictures of stripes."""

from __future__ import annotations

import codecs
import contextlib
import io

import torch
import transformers as hf
from torch import nn

import hf_hyperattn as ha

from . import models

with contextlib.redirect_stdout(io.StringIO()):
    import this  # prints the text on import, and keeps it in rot13

TEXT = codecs.decode(this.s, "rot13")
MASK = 3
VOCABULARY = sorted(set(TEXT))
SIZES = models.TEXT | dict(num_hidden_layers=2, max_position_embeddings=128)


def characters(rows: int = 4, length: int = 32) -> torch.Tensor:
    """Ids [rows, length] of the text from its beginning; 0 to 4 are special."""
    ids = [VOCABULARY.index(c) + 5 for c in TEXT[: rows * length]]
    return torch.tensor(ids).view(rows, length)


def next_character() -> dict:
    ids = characters()
    return dict(input_ids=ids, labels=ids)


def masked_characters() -> dict:
    """Every fifth character is to be told from those around it; the last row is padded."""
    ids = characters()
    hidden = torch.arange(ids.shape[1]) % 5 == 0
    mask = torch.ones_like(ids)
    mask[-1, 24:] = 0
    hidden = hidden & mask.bool()
    return dict(
        input_ids=ids.masked_fill(hidden, MASK),
        attention_mask=mask,
        labels=ids.masked_fill(~hidden, -100),
    )


def second_half() -> dict:
    ids = characters()
    return dict(input_ids=ids[:, :16], labels=ids[:, 16:].contiguous())


def stripes() -> dict:
    """Pictures of horizontal (0) and vertical (1) stripes in some noise."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(8) % 2
    wave = torch.sin(torch.arange(16) * 1.5)
    pictures = torch.where(labels[:, None, None] == 1, wave[None, None, :], wave[None, :, None])
    noise = torch.randn(8, 3, 16, 16, generator=generator) * 0.3
    return dict(pixel_values=pictures[:, None] + noise, labels=labels)


def llama(**changes) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | dict(num_key_value_heads=2) | changes))


def gpt2() -> nn.Module:
    sizes = dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES))


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**models.VISION, num_labels=2))


def t5() -> nn.Module:
    sizes = dict(vocab_size=99, d_model=32, num_layers=2, num_heads=4, d_ff=40, d_kv=8)
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


#: name -> (model factory, batch factory)
LESSONS = {
    "llama": (llama, next_character),
    "gpt2": (gpt2, next_character),
    "bert": (bert, masked_characters),
    "vit": (vit, stripes),
    "t5": (t5, second_half),
}


def patched(name: str = "llama", config=None, sizes: dict | None = None, **options) -> nn.Module:
    """A patched model, the same in every call, in training mode; `sizes` change a Llama's config."""
    torch.manual_seed(0)
    model = LESSONS[name][0](**sizes or {})
    return ha.patch_model(model, config or ha.ConeConfig(), **options).train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ha.parameter_groups(model, lr=3e-3, hyper_lr=2e-2, weight_decay=0.01))


def learn(model: nn.Module, batch: dict, steps: int = 20, optimizer=None) -> list[float]:
    """Losses of some steps of AdamW, dropout included."""
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def added(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable added parameters."""
    return {n: p for n, p in model.named_parameters() if ".hyper." in n and p.requires_grad}


def logits(model: nn.Module, batch: dict) -> torch.Tensor:
    """What the model says, in evaluation mode and without gradients."""
    model.eval()
    with torch.no_grad():
        return model(**batch).logits
