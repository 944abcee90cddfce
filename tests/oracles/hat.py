"""HAT from its definition, text by text and segment by segment in loops, with the weights of a model of ours.

Texts are lists of token ids, their CLS token first. Nothing is padded or batched.
"""

import torch
from torch.nn import functional as F


def cut(ids, length, groups=None):
    """The segments of a text, each led by the text's first token; `groups` has a number for every token."""
    groups = [0] * len(ids) if groups is None else groups
    parts = []
    for i in range(1, len(ids)):
        if i == 1 or groups[i] != groups[i - 1] or len(parts[-1]) == length - 1:
            parts.append([])
        parts[-1].append(ids[i])
    return [[ids[0], *part] for part in parts or [[]]]


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(weights, name, x, eps):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(weights, name, x, heads):
    q, k, v = (
        linear(weights, f"{name}.{part}", x).chunk(heads, -1) for part in ("query", "key", "value")
    )
    found = []
    for h in range(heads):
        logits = q[h] @ k[h].T / q[h].shape[-1] ** 0.5
        found.append(torch.exp(logits - logits.logsumexp(-1, keepdim=True)) @ v[h])
    return linear(weights, f"{name}.out", torch.cat(found, -1))


def block(weights, name, x, config):
    """A post-norm block over the rows of [n, width]."""
    eps = config.layer_norm_eps
    attended = attention(weights, f"{name}.attention", x, config.num_attention_heads)
    x = norm(weights, f"{name}.attention_norm", x + attended, eps)
    inner = F.gelu(linear(weights, f"{name}.up", x))
    return norm(weights, f"{name}.norm", x + linear(weights, f"{name}.down", inner), eps)


def embed(weights, ids, config):
    x = weights["embeddings.words.weight"][ids] + weights["embeddings.positions.weight"][: len(ids)]
    if config.type_vocab_size:
        x = x + weights["embeddings.kinds.weight"][0]
    return norm(weights, "embeddings.norm", x, config.layer_norm_eps)


def encode(model, ids, groups=None):
    """Segments' states at the end, a list of [n, width], and the pooled vector, of one text by a `HatModel`."""
    weights, config = dict(model.named_parameters()), model.config
    segments = [embed(weights, part, config) for part in cut(ids, config.segment_length, groups)]
    done = 0
    for number, crossing in enumerate(config.cross_blocks):
        segments = [block(weights, f"segment_blocks.{number}", x, config) for x in segments]
        for _ in range(crossing):
            rows = torch.stack([x[0] for x in segments])
            read = rows + weights["segment_positions.weight"][: len(rows)]
            new = block(weights, f"cross_blocks.{done}", read, config)
            if config.gated:
                new = rows + weights[f"cross_blocks.{done}.gate"] * (new - rows)
            segments = [torch.cat([row[None], x[1:]]) for row, x in zip(new, segments)]
            done += 1
    return segments, pooled(weights, config, segments)


def pooled(weights, config, segments):
    rows = torch.stack([x[0] for x in segments])
    found = {
        "max": lambda: rows.max(0).values,
        "mean": lambda: rows.mean(0),
        "tokens": lambda: tokens(segments).mean(0),
    }[config.pooling]()
    return torch.tanh(linear(weights, "pooler", found))


def tokens(segments):
    """The states of the text's own tokens: CLS tokens that were put before later segments are left out."""
    return torch.cat([x if i == 0 else x[1:] for i, x in enumerate(segments)])
