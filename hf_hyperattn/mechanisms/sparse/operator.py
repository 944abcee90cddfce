"""Sparse rules in compiled calls: one operator that the compiler does not look into.

The places of tokens are read from a mask, and they decide which keys a kernel reads. A compiler can
trace neither. Inside the operator a call runs as it does without a compiler: on the compiled kernel
if that takes it, else under masks. It has no gradient, so calls that learn are traced with masks.
"""

from __future__ import annotations

import json
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...engines import Options, attention, dot_score
from ...utils.readable import is_exporting, is_transformed
from ...utils.torch_private import find_packet
from ..selection.places import START, read_mask
from ..selection_layer import SelectingCall
from . import compiled
from .head_rules import HeadRules
from .masking import check_one_text, mask_by_rules, read_text
from .rules import SparseRule


def takes_call(asked: SelectingCall, rules: HeadRules) -> bool:
    """Return whether the operator computes a compiled call.

    Args:
        asked: The call.
        rules: Of its heads.
    """
    call, options = asked.call, asked.options
    if is_exporting() or is_transformed():
        return False
    tensors = call.query, call.key, asked.value
    # CUDA graphs cannot hold the reading of a mask, so a GPU keeps the traced mask.
    if any(t.device.type != "cpu" for t in tensors) or asked.backend not in ("auto", "cpu"):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    # Queries of earlier calls are not kept in compiled calls.
    if not call.is_causal or rules.earlier or asked.whole is not attention or asked.weights:
        return False
    # An indexer's mask hides more than padding, and facts of a mask do not reach the operator.
    is_plain = call.keywords.get("indices") is None and call.first.index == 0
    return (
        is_plain
        and call.first.attention_mask is None
        and call.first.stop is None
        and compiled.can_score(asked.score, options, call.key.shape[2])
    )


def attend(asked: SelectingCall, rules: str, window: int | None) -> Tensor:
    """Return the output [B, H, N, dv] of a call that `takes_call` allows.

    Args:
        asked: The call.
        rules: Of its heads, as `write_rules` writes them.
        window: Sliding window of the attention layer; None: none.
    """
    score, options = asked.score, asked.options
    return sparse(
        asked.call.query,
        asked.call.key,
        score.raw_query,
        score.raw_key,
        asked.value,
        options.mask,
        options.bias,
        options.sinks,
        rules,
        float(score.scale),
        options.softcap,
        window,
        options.window,
        options.offset,
        options.is_causal,
    )


def write_rules(rules: HeadRules) -> str:
    """Return rules as text, since an operator takes no objects."""
    written = [[length, [rule.to_dict() for rule in heads]] for length, heads in rules.by_length]
    return json.dumps(written)


@lru_cache(maxsize=256)
def parse_rules(text: str) -> HeadRules:
    """Return the rules that `write_rules` wrote; the same object for the same text."""
    return HeadRules(
        tuple(
            (length, tuple(SparseRule.from_dict(rule) for rule in heads))
            for length, heads in json.loads(text)
        )
    )


@torch.library.custom_op("hf_hyperattn::sparse", mutates_args=())
def sparse(
    query: Tensor,
    key: Tensor,
    raw_query: Tensor,
    raw_key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    rules: str,
    scale: float,
    softcap: float | None,
    window: int | None,
    own_window: int | None,
    offset: int,
    by_position: bool,
) -> Tensor:
    """Return causal attention under sparse rules, [B, H, N, dv].

    Args:
        query, key: The tensors that rules see.
        raw_query, raw_key: The tensors whose products give the logits.
        value: [B, Hkv, M, dv].
        mask, bias, sinks, scale, softcap, offset: As in `Options` and `PairScore`.
        rules: From `write_rules`.
        window: Sliding window of the attention layer.
        own_window: The part of it that the mask does not hold, as in `Options`.
        by_position: Whether causality is not in the mask.
    """
    options = Options(
        mask=mask,
        bias=bias,
        is_causal=by_position,
        window=own_window,
        offset=offset,
        softcap=softcap,
        sinks=sinks,
    )
    of_heads = parse_rules(rules)
    score = dot_score(raw_query, raw_key, scale)
    reading = read_mask(query, key, options, True, START)
    text = read_text(query, key, reading, of_heads)
    out = compiled.attend_by_kernel(
        query, key, score, value, options, of_heads, text, window, "cpu"
    )
    if out is None:
        check_one_text(reading, of_heads, window)
        masked = mask_by_rules(query, key, scale, options, of_heads, text, window)
        out = attention(score, value, masked)[0].to(query.dtype)
    return out.contiguous()


@sparse.register_fake
def _(query, key, raw_query, raw_key, value, *_):
    return query.new_empty(*query.shape[:3], value.shape[3])


@register_flop_formula(find_packet(sparse))
def _(query, key, raw_query, raw_key, value, mask, bias, sinks, rules, *_, **__) -> int:
    # Queries are the newest tokens, and each sees about the same share of the keys before it.
    (batch, heads, n, width), m = query, key[2]
    last = parse_rules(rules).by_length[-1][1]
    share = sum(rule.share(m) for rule in last) / len(last)
    pairs = batch * heads * share * n * (m - (n - 1) / 2)
    return int(2 * pairs * (width + value[3]))
