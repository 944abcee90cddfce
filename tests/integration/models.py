"""Tiny random models with inputs they run on, and a complete record of a model's state to compare it with later."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedConfig

TEXT = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=48,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
VISION = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=16,
    patch_size=8,
)
SEQ2SEQ = dict(
    vocab_size=99,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
)


def llama(**changes) -> nn.Module:
    """A Llama with two query heads for each key head."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**TEXT | dict(num_key_value_heads=2) | changes)
    ).eval()


def bert(cls=hf.BertModel, **changes) -> nn.Module:
    return cls(hf.BertConfig(**TEXT | changes)).eval()


def clip() -> nn.Module:
    text, vision = hf.CLIPTextConfig(**TEXT), hf.CLIPVisionConfig(**VISION)
    return hf.CLIPModel(
        hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict())
    ).eval()


def llava() -> nn.Module:
    text, vision = hf.LlamaConfig(**TEXT, num_key_value_heads=2), hf.CLIPVisionConfig(**VISION)
    # the last vision layer is read, not the one before it, so that every layer reaches the output
    config = hf.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=98, vision_feature_layer=-1
    )
    return hf.LlavaForConditionalGeneration(config).eval()


def of_type(model_type: str, auto=hf.AutoModel, **sizes):
    return lambda: auto.from_config(hf.AutoConfig.for_model(model_type, **sizes)).eval()


def set_implementation(model: nn.Module, name: str) -> None:
    """As `set_attn_implementation`; that of Transformers 5.17 passes over parts with a config of the same class."""
    for part in model.modules():
        if isinstance(part, hf.PreTrainedModel):
            part.set_attn_implementation(name)


def text_inputs() -> dict:
    """Two rows, the first one padded at its left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return dict(input_ids=ids, attention_mask=mask)


def pair_inputs() -> dict:
    inputs = text_inputs()
    return inputs | dict(decoder_input_ids=inputs["input_ids"][:, :7])


def image_inputs() -> dict:
    return dict(pixel_values=torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2)))


def llava_inputs() -> dict:
    ids = text_inputs()["input_ids"].clone()
    ids[:, 1:5] = 98
    return dict(input_ids=ids) | image_inputs()


def whisper_inputs() -> dict:
    features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3))
    return dict(input_features=features, decoder_input_ids=text_inputs()["input_ids"][:, :7])


CAUSAL, SEQ = hf.AutoModelForCausalLM, hf.AutoModelForSeq2SeqLM
_T5 = dict(
    vocab_size=99, d_model=32, num_layers=2, num_heads=4, d_ff=40, d_kv=8, decoder_start_token_id=0
)
_GPT = dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
_WINDOWED = TEXT | dict(num_key_value_heads=2, head_dim=8, sliding_window=4)
_WHISPER = SEQ2SEQ | dict(num_mel_bins=8, max_source_positions=10)

#: name -> (model factory, inputs factory). The last six call the interface only through `model_patches`.
FAMILIES = {
    "llama": (llama, text_inputs),
    "mistral": (of_type("mistral", CAUSAL, **_WINDOWED), text_inputs),
    "gemma2": (of_type("gemma2", CAUSAL, **_WINDOWED, query_pre_attn_scalar=8), text_inputs),
    "qwen3": (of_type("qwen3", CAUSAL, **TEXT, num_key_value_heads=2, head_dim=8), text_inputs),
    "gpt_oss": (
        of_type("gpt_oss", CAUSAL, **_WINDOWED, num_local_experts=2, num_experts_per_tok=1),
        text_inputs,
    ),
    "gpt2": (of_type("gpt2", CAUSAL, **_GPT), text_inputs),
    "bert": (bert, text_inputs),
    "distilbert": (
        of_type("distilbert", vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=40),
        text_inputs,
    ),
    "vit": (of_type("vit", **VISION), image_inputs),
    "clip": (clip, lambda: text_inputs() | image_inputs()),
    "llava": (llava, llava_inputs),
    "bart": (of_type("bart", SEQ, **SEQ2SEQ), pair_inputs),
    "t5": (of_type("t5", SEQ, **_T5), pair_inputs),
    "whisper": (of_type("whisper", hf.AutoModelForSpeechSeq2Seq, **_WHISPER), whisper_inputs),
    "bloom": (
        of_type("bloom", CAUSAL, vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
        text_inputs,
    ),
    "falcon": (of_type("falcon", CAUSAL, **TEXT), text_inputs),
    "mpt": (of_type("mpt", CAUSAL, vocab_size=99, d_model=32, n_layers=2, n_heads=4), text_inputs),
    "gptj": (of_type("gptj", CAUSAL, **_GPT, rotary_dim=4), text_inputs),
    "deberta-v2": (
        of_type("deberta-v2", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        text_inputs,
    ),
    "mpnet": (of_type("mpnet", **TEXT), text_inputs),
}


def skip_without_native_adapters() -> None:
    """Skip a test if Transformers refuses the PEFT that is installed for its own adapters."""
    from transformers.integrations import peft

    try:
        peft.check_peft_version(min_version=peft.MIN_PEFT_VERSION)
    except ValueError as refusal:
        pytest.skip(f"native adapters: {refusal}")


def tensors(output) -> dict[str, torch.Tensor]:
    """All floating-point tensors of a model's output, by path; caches left out."""
    found: dict[str, torch.Tensor] = {}

    def walk(path: str, value) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[path] = value.detach()
        elif isinstance(value, dict):
            for key, inner in value.items():
                if key != "past_key_values":
                    walk(f"{path}.{key}", inner)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                walk(f"{path}.{index}", inner)

    walk("", output)
    return found


def real(values: dict[str, torch.Tensor], inputs: dict) -> dict[str, torch.Tensor]:
    """The same without rows of padding, whose content no model defines."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return values
    return {n: t[mask.bool()] if t.shape[:2] == mask.shape else t for n, t in values.items()}


def run(model: nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    """What the model returns for real tokens, without gradients."""
    with torch.no_grad():
        return real(tensors(model(**inputs)), inputs)


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of two outputs with the same tensors."""
    assert left.keys() == right.keys() and left
    return max((left[n].double() - right[n].double()).abs().max().item() for n in left)


def rounding(values: dict[str, torch.Tensor]) -> float:
    """How far another order of sums may move outputs: 1e-5 of their largest number, which counts as 1 at least."""
    return 1e-5 * max(1.0, *(t.abs().max().item() for t in values.values()))


def perturb(model: nn.Module, amount: float = 0.3) -> None:
    """Give every added parameter a random value, the same in every run."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                noise = torch.randn(parameter.shape, generator=generator) * amount
                parameter.copy_(noise.to(parameter.dtype))


def train(model: nn.Module, inputs: dict, steps: int = 3, rate: float = 0.05) -> list[float]:
    """Losses of a few steps of Adam on all trainable parameters, on the next token where there are logits."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        output = model(**inputs)
        loss = (
            output.loss if getattr(output, "loss", None) is not None else output[0].square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class State:
    """All that can be known of a model: classes, attributes, hooks, configs, parameters by object and by value."""

    def __init__(self, model: nn.Module):
        self.facts: dict[str, object] = {}
        for name, module in model.named_modules():
            self._module(name or "model", module)
        self.values = {n: t.detach().clone() for n, t in model.state_dict().items()}
        self.requires_grad = {n: p.requires_grad for n, p in model.named_parameters()}
        self.order = list(model.state_dict())

    def _module(self, name: str, module: nn.Module) -> None:
        self.facts[f"{name}:class"] = type(module)
        for key, value in module.__dict__.items():
            if isinstance(value, PreTrainedConfig):
                self._config(f"{name}.{key}", value)
            elif isinstance(value, dict):
                self.facts[f"{name}.{key}"] = {k: _fact(v) for k, v in value.items()}
            else:
                self.facts[f"{name}.{key}"] = _fact(value)

    def _config(self, path: str, config: PreTrainedConfig) -> None:
        self.facts[path] = (id(config), config.to_dict())
        for key, value in config.__dict__.items():
            if isinstance(value, PreTrainedConfig):
                self._config(f"{path}.{key}", value)
            else:
                self.facts[f"{path}.{key}"] = _fact(value)

    def differences(self, other: State) -> list[str]:
        """What the other state has otherwise, in words."""
        keys = self.facts.keys() | other.facts.keys()
        found = sorted(
            k for k in keys if self.facts.get(k, "absent") != other.facts.get(k, "absent")
        )
        found += [] if self.order == other.order else ["state-dict keys"]
        found += [] if self.requires_grad == other.requires_grad else ["requires_grad"]
        both = self.values.keys() & other.values.keys()
        found += [
            f"value of {n}" for n in sorted(both) if not same(self.values[n], other.values[n])
        ]
        return found


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, as far as dtype and values go."""
    if left.is_meta or right.is_meta:
        return left.is_meta == right.is_meta and left.shape == right.shape
    return left.dtype == right.dtype and torch.equal(left, right)


def _fact(value) -> object:
    if isinstance(value, int | float | str | bool | bytes | type(None)):
        return value
    if isinstance(value, list | tuple | set) and all(
        isinstance(v, int | float | str | bool) for v in value
    ):
        return value.copy() if isinstance(value, list | set) else value
    return (type(value), id(value))
