"""Hierarchical attention injected into a pretrained sentence encoder, without training: three layers of MiniLM's six.

For every way to tie, each layer is first patched alone and read on texts kept for that; the three that move the
sentence embeddings least are then patched together and read on 500 other texts. The paper's own choice, interleaved
late layers, stands beside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.hsa.reference import find_cover, list_kin

from .hsa_texts import minilm_folder, sample
from .store import Experiment

PAPER = [2, 8, 64, 1024]
SETTINGS = {
    "ways": {
        "key, 16-64, near 32, top 4": {
            "tying": "key",
            "windows": [16, 64],
            "near": 32,
            "sinks": 1,
            "refine_top_k": 4,
        },
        "key, 8, near 16, top 4": {
            "tying": "key",
            "windows": [8],
            "near": 16,
            "sinks": 1,
            "refine_top_k": 4,
        },
        "both, 2-8-64-1024": {"tying": "both", "windows": PAPER},
        "both, 16": {"tying": "both", "windows": [16]},
        "key, 8, near 16": {
            "tying": "key",
            "windows": [8],
            "near": 16,
            "sinks": 1,
            "refine_top_k": 0,
        },
        "both, sentences and words": {"tying": "both", "text": ["sentence", "word"]},
        "both, 2-8-64-1024 beside CLS and SEP": {"tying": "both", "beside": PAPER},
        "both, 2-8-64-1024, diagonal masked": {
            "tying": "both",
            "windows": PAPER,
            "keep_diagonal": False,
        },
        "both, 16 beside CLS and SEP": {"tying": "both", "beside": [16]},
        "key, 2-8-64-1024": {
            "tying": "key",
            "windows": PAPER,
            "near": 0,
            "sinks": 1,
            "refine_top_k": 0,
        },
    },
    "interleaved": [1, 3, 5],
    "interleaved_in": ["both, 2-8-64-1024", "both, 2-8-64-1024, diagonal masked"],
    "layers": 3,
    "length": 256,
    "chosen_on": {"verses": 8, "glosses": 8, "reviews": 8},
    "read_on": {"verses": 200, "glosses": 150, "reviews": 150},
    "batch": 16,
}
#: Seeds of the texts that layers are chosen on, and of those that are read.
CHOSEN, READ = 1, 2


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    for way in settings["ways"]:
        for layer in range(6):
            yield (
                f"{way}; layer {layer}",
                functools.partial(fidelity, settings, way, [layer], "chosen_on"),
            )
        layers = best_layers(settings, found, way)
        yield f"{way}; chosen", functools.partial(fidelity, settings, way, layers, "read_on")
        if way in settings["interleaved_in"]:
            interleaved = functools.partial(
                fidelity, settings, way, settings["interleaved"], "read_on"
            )
            yield f"{way}; interleaved", interleaved


def best_layers(settings: dict, found: dict, way: str) -> list[int]:
    """The layers that, each patched alone, leave the embeddings most alike."""
    alike = [found[f"{way}; layer {layer}"]["mean"] for layer in range(6)]
    return sorted(sorted(range(6), key=lambda layer: -alike[layer])[: settings["layers"]])


@functools.cache
def encoder():
    """The tokenizer and the model, loaded once."""
    torch.manual_seed(0)
    folder = minilm_folder()
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def config_of(way: dict) -> ha.HsaConfig:
    """The mechanism of a way; trees that are no windows come with the call."""
    known = {
        k: tuple(v) if k == "windows" else v for k, v in way.items() if k not in ("beside", "text")
    }
    return ha.HsaConfig(**known)


def windows_beside(mask: Tensor, sizes: list[int]) -> Tensor:
    """Group ids [B, L, levels] of windows over the tokens between CLS and SEP, which stand alone under the root.

    Args:
        mask: [B, L], with padding on the right.
    """
    at = torch.arange(mask.shape[1]).expand_as(mask)
    special = (at == 0) | (at == mask.sum(1, keepdim=True) - 1)
    levels = [
        torch.where(special, mask.shape[1] + at, (at - 1) // size) for size in reversed(sizes)
    ]
    return torch.stack(levels, -1).masked_fill(mask[..., None] == 0, -1)


def hierarchy_of(way: dict, texts: list[str], encoding) -> Tensor | ha.Hierarchy | None:
    """What the model is given for these texts; None where the config says it."""
    if "beside" in way:
        return windows_beside(encoding["attention_mask"], way["beside"])
    if "text" in way:
        offsets = encoding["offset_mapping"]
        return ha.Hierarchy.from_text(texts, offsets, way["text"], encoding["attention_mask"])
    return None


@torch.no_grad()
def embeddings(settings: dict, texts: list[str], way: dict | None) -> Tensor:
    """Sentence embeddings [texts, 384]: means over the tokens, of length 1. The model is patched where `way` is."""
    tokenizer, model = encoder()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = torch.zeros(len(texts), model.config.hidden_size)
    for start in range(0, len(order), settings["batch"]):
        rows = order[start : start + settings["batch"]]
        batch = [texts[i] for i in rows]
        encoding = tokenizer(
            batch,
            padding=True,
            truncation=True,
            max_length=settings["length"],
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        hierarchy = None if way is None else hierarchy_of(way, batch, encoding)
        asked = {} if hierarchy is None else {"hierarchy": hierarchy}
        mask = encoding["attention_mask"]
        hidden = model(encoding["input_ids"], attention_mask=mask, **asked).last_hidden_state
        found[rows] = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(found, dim=-1)


def patched_embeddings(settings: dict, texts: list[str], way: dict, layers: list[int]) -> Tensor:
    """`embeddings` with these layers patched; the model is left as it was."""
    model = encoder()[1]
    ha.patch_model(model, config_of(way), mode="replace", layers=layers)
    try:
        return embeddings(settings, texts, way)
    finally:
        ha.unpatch_model(model)


@functools.cache
def stock(which: str, kind: str, length: int, batch: int, count: int) -> tuple[list[str], Tensor]:
    """Texts of one kind and what the model as it is makes of them."""
    texts = sample({kind: count}, CHOSEN if which == "chosen_on" else READ)[kind]
    return texts, embeddings({"length": length, "batch": batch}, texts, None)


def fidelity(settings: dict, way: str, layers: list[int], which: str) -> dict:
    """Cosine of the patched model's embeddings with its own, over all texts and by kind."""
    found, every = {}, []
    for kind, count in settings[which].items():
        texts, before = stock(which, kind, settings["length"], settings["batch"], count)
        after = patched_embeddings(settings, texts, settings["ways"][way], layers)
        alike = (before * after).sum(-1)
        every.append(alike)
        found[kind] = round(alike.mean().item(), 5)
    every = torch.cat(every)
    found = {
        "layers": layers,
        "mean": round(every.mean().item(), 5),
        "least": round(every.min().item(), 5),
    } | found
    if len(layers) > 1:
        found["pairs"] = round(share_of_pairs(settings, settings["ways"][way]), 4)
    return found


def share_of_pairs(settings: dict, way: dict) -> float:
    """Logits that a head of a patched layer computes for a text of full length, as a share of N², by the definition."""
    tokenizer, _ = encoder()
    text = next(
        t
        for t in sample({"reviews": 50}, CHOSEN)["reviews"]
        if len(tokenizer(t)["input_ids"]) > 300
    )
    encoding = tokenizer(
        [text],
        truncation=True,
        max_length=settings["length"],
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    n = encoding["input_ids"].shape[1]
    ids = hierarchy_of(way, [text], encoding)
    hierarchy = ha.Hierarchy.from_ids(ids) if isinstance(ids, Tensor) else ids
    tree = (hierarchy or ha.Hierarchy.windows(n, [s for s in way["windows"] if s < n])).tree(0)
    if way["tying"] == "both":
        b = tree.branching[tree.leaves :]
        return (int((b * (b - 1)).sum()) + n) / n**2
    facts, seen, zero = list_kin(tree), torch.ones(n, dtype=torch.bool), torch.zeros(n)
    total = 0
    for i in range(n):
        closed = find_cover(zero, i, tree, facts, seen, way["near"], way["sinks"], 0)[1]
        tokens, blocks = find_cover(
            zero, i, tree, facts, seen, way["near"], way["sinks"], way["refine_top_k"]
        )
        total += (
            len(tokens) + len(blocks) + min(len(closed), way["refine_top_k"])
        )  # those opened were looked at
    return total / n**2


EXPERIMENT = Experiment("hsa_minilm", SETTINGS, runs)
