"""A reference attention to register, and how outputs are compared."""

import contextlib
import math

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hf_hyperattn.integration.patching.versions import TESTED

NAME = "reference64"
TOLERANCE = 1e-5
#: Whether the tables of model_patches, which are written for the newest tested Transformers, hold to the letter.
NEWEST = transformers.__version__ == TESTED["transformers"][1]


def softmax_attention(query, key, value, mask, scaling, is_causal, position_bias=None):
    """Softmax attention in float64, written out: `[B, H, Q, D]` in, `[B, H, Q, D]` and weights out."""
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scaling
    if position_bias is not None:
        assert position_bias.shape[1:] == scores.shape[1:], "a bias has every head, row and column"
        scores = scores + position_bias.double()
    if mask is None and is_causal and scores.shape[2] > 1:
        rows, columns = (torch.arange(n) for n in scores.shape[2:])
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    elif mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -1e300)
    elif mask is not None:
        scores = scores + mask.double()
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value), weights


@contextlib.contextmanager
def reference():
    """Registers the reference with bool masks; gives the calls, each (module, mask, is_causal, position_bias)."""
    calls = []

    def forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=0.0,
        scaling=None,
        is_causal=None,
        position_bias=None,
        **other,
    ):
        assert query.dim() == key.dim() == value.dim() == 4
        assert query.shape[1] % key.shape[1] == 0 and key.shape[:3] == value.shape[:3]
        calls.append((module, attention_mask, is_causal, position_bias))
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output, weights = softmax_attention(
            query, key, value, attention_mask, scaling, causal, position_bias
        )
        return output.to(value.dtype).transpose(1, 2).contiguous(), weights.to(value.dtype)

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        yield calls
    finally:
        AttentionInterface._global_mapping.pop(NAME)
        AttentionMaskInterface._global_mapping.pop(NAME)


def switch(model, name):
    """Name an implementation in the config and its parts, past the checks of the setters; gives the one before."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    return before


def outputs(model, inputs):
    """All floating tensors of the output by path; the random draws inside, if any, are the same every time."""
    torch.manual_seed(1)
    with torch.no_grad():
        return dict(_tensors(model(**inputs), ""))


def _tensors(value, path):
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _tensors(part, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for name, part in enumerate(value):
            yield from _tensors(part, f"{path}.{name}")


def distance(one, other, mask=None):
    """Largest difference over tensors `[B, T, ...]`, at real tokens only where a mask `[B, T]` is given."""
    assert one.keys() == other.keys() and one
    return max(_distance(one[path], other[path], mask) for path in one)


def _distance(one, other, mask):
    assert one.shape == other.shape
    if mask is not None and one.shape[:2] == mask.shape:
        one, other = one[mask.bool()], other[mask.bool()]
    return (one - other).abs().max().item()
