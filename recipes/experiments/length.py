"""Length generalisation: byte-level language models trained on 128 tokens of the King James Bible and read at up to
2,048, alike in all but their positions: HyPE fixed and learned, ALiBi fixed and with learned slopes, rotary, none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import hf_hyperattn as ha
from hf_hyperattn.analysis import perplexity

from .debian import bible_text
from .fitting import fit, key_of, size_of
from .store import Experiment

SETTINGS = {
    "positions": {
        "none": {},
        "rotary": {"rotary": True},
        "ALiBi": {"alibi": True},
        "ALiBi, learned slopes": {"slopes": True},
        "HyPE fixed, max_length 2048": {"hype": 2048, "learned": False},
        "HyPE fixed, max_length 128": {"hype": 128, "learned": False},
        "HyPE learned, from max_length 2048": {"hype": 2048, "learned": True},
        "HyPE learned, from max_length 128": {"hype": 128, "learned": True},
    },
    "seeds": [0, 1, 2],
    "train_length": 128,
    "lengths": [128, 256, 512, 1024, 2048],
    "steps": 350,
    "batch": 16,
    "learning_rate": 4e-3,
    "weight_decay": 0.1,
    "width": 96,
    "layers": 3,
    "heads": 4,
    "held_out": 0.05,
    "held_out_bytes": 65536,
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    for name in settings["positions"]:
        for seed in settings["seeds"]:
            yield key_of(name, seed), functools.partial(train, settings, name, seed)


@functools.cache
def bytes_of_the_bible() -> Tensor:
    """The text without the places of the verses, a token each byte."""
    return torch.tensor(list(re.sub(r"(?m)^\S+ ", "", bible_text()).encode()))


def model_of(settings: dict, name: str) -> hf.PreTrainedModel:
    """A SmolLM3, which is a Llama whose config can switch rotary positions off, with positions of the named kind."""
    kind = settings["positions"][name]
    layers, width, heads = settings["layers"], settings["width"], settings["heads"]
    config = hf.SmolLM3Config(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(settings["lengths"]),
        no_rope_layers=[int(kind.get("rotary", False))] * layers,  # 1: with rotary
        initializer_range=0.04,
        tie_word_embeddings=True,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = hf.SmolLM3ForCausalLM(config)
    if "hype" in kind:
        ha.patch_model(model, ha.HypeConfig(max_length=kind["hype"]), mode="replace")
        for parameter in added(model).values():
            parameter.requires_grad_(kind["learned"])
    if "alibi" in kind:
        model.register_forward_pre_hook(add_alibi, with_kwargs=True)
    if "slopes" in kind:
        for layer in model.model.layers:
            layer.self_attn.slopes = LearnedSlopes(heads)
            layer.self_attn.register_forward_pre_hook(LearnedSlopes.add, with_kwargs=True)
    return model


def added(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of learned positions."""
    names = (".hyper.", ".slopes.")
    return {name: p for name, p in model.named_parameters() if any(n in name for n in names)}


class LearnedSlopes(nn.Module):
    """ALiBi whose slopes start as its authors' and are learned: HyPE without the bend.

    A slope's logarithm is the sum of two numbers, as log mu + log tau is for HyPE, so that an optimizer moves it as far
    in a step.

    Args:
        heads: of the layer.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.first = nn.Parameter(alibi_slopes(heads).log())
        self.second = nn.Parameter(torch.zeros(heads))

    def forward(self, length: int) -> Tensor:
        """The additive mask [1, heads, length, length]."""
        return slope_mask((self.first + self.second).exp(), length)

    @staticmethod
    def add(attention: nn.Module, args: tuple, keywords: dict) -> tuple[tuple, dict]:
        """Before an attention module is called: the mask for as many tokens as there are hidden states."""
        hidden = args[0] if args else keywords["hidden_states"]
        return args, keywords | {"attention_mask": attention.slopes(hidden.shape[1])}


def add_alibi(model: hf.PreTrainedModel, args: tuple, keywords: dict) -> tuple[tuple, dict]:
    """ALiBi as its authors have it: an additive mask, slope_h · (j - i), through stock attention."""
    length = (args[0] if args else keywords["input_ids"]).shape[1]
    return args, keywords | {"attention_mask": alibi_mask(model.config.num_attention_heads, length)}


@functools.lru_cache(maxsize=1)
def alibi_mask(heads: int, length: int) -> Tensor:
    """[1, heads, length, length], float32, -inf for the future (Press et al., arXiv 2108.12409)."""
    return slope_mask(alibi_slopes(heads), length)


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slope of every head."""
    return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])


def slope_mask(slopes: Tensor, length: int) -> Tensor:
    """slope_h · (j - i) and -inf for the future, [1, heads, length, length]."""
    at = torch.arange(length)
    distance = (at[None, :] - at[:, None]).float()
    return (slopes[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)[None]


def train(settings: dict, name: str, seed: int) -> dict:
    """One run: as many steps for every kind of position, then perplexity at every length on the same bytes."""
    ids, length = bytes_of_the_bible(), settings["train_length"]
    end = len(ids) - int(settings["held_out"] * len(ids))
    torch.manual_seed(seed)
    model = model_of(settings, name)
    draw = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        at = torch.randint(end - length, (settings["batch"], 1), generator=draw)
        rows = ids[at + torch.arange(length)]
        return F.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    loss = fit(
        model, batch_loss, settings["steps"], settings["learning_rate"], settings["weight_decay"]
    )
    kept = ids[end : end + settings["held_out_bytes"]]
    return {
        "perplexity": {str(n): perplexity(model, kept, n).value for n in settings["lengths"]},
        "loss": loss,
        "parameters": size_of(model),
        "added": {name: [round(v, 4) for v in p.tolist()] for name, p in added(model).items()},
    }


EXPERIMENT = Experiment("length", SETTINGS, runs, rows=("positions", "seeds"), hours=0.3)
