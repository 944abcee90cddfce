"""Random calls of every compiled kernel, each from one seed: attention forward and backward, decoding, key-tied
attention over windows, norms. Tensors lie in memory as models have them: transposed, cut out of larger ones, or as
they are.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from hf_hyperattn.engines import attention
from hf_hyperattn.engines.cpu import FEW, norms, squared_norms
from hf_hyperattn.engines.cpu.selected import chosen_pages, selected_attention
from hf_hyperattn.engines.score import upcast_for_grad
from hf_hyperattn.engines.selected import HeadRule
from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.mechanisms.hsa.windowed.native import Levels, pool_levels
from tests.engines.sweep import Call
from tests.mechanisms.hsa.hsa_calls import attend_named

#: torch's default dtype, in turn. Whatever a user has set it to, kernels read and write the dtypes of the call.
DEFAULT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
#: How many calls have a batch of no rows.
EMPTY = 0.05


def run(seed: int) -> str:
    """Make the call of this seed, and return a description of it.

    Raises:
        AssertionError: The compiled kernel did not run, or returned NaN.
    """
    pick = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(pick.choice((1, 1, 2)))
    name = pick.choice(list(KERNELS))
    default = DEFAULT_DTYPES[seed % len(DEFAULT_DTYPES)]
    torch.set_default_dtype(default)
    try:
        return f"{name} {KERNELS[name](pick, seed)} default={default}"
    finally:
        torch.set_default_dtype(torch.float32)


def pick_batch(pick: random.Random) -> int:
    """Draw a batch size: one or two rows, seldom none."""
    return 0 if pick.random() < EMPTY else pick.randint(1, 2)


def draw_leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers, of which a call computes gradients."""
    return torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()


def laid_out(t: Tensor, pick: random.Random) -> Tensor:
    """The same numbers as part of a larger tensor, or with other strides."""
    how = pick.randrange(4)
    if how == 0:
        return t
    if how == 1:  # [B, N, H, d], as projections leave it
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == 2:  # cut out of rows that are longer
        return torch.cat([t, t], -1)[..., t.shape[-1] :]
    return torch.cat([t, t], 2)[:, :, t.shape[2] :]  # the end of a longer cache


def attention_of(call: Call, pick: random.Random, **options) -> tuple:
    """Score, value, options and the leaves of a random call of sweep.py."""
    leaves = call.inputs(call.dtype)
    inputs = leaves | {name: laid_out(leaves[name], pick) for name in ("query", "key", "value")}
    if pick.random() < 0.5:  # as distances have them where they learn
        inputs |= {name: upcast_for_grad(inputs[name]) for name in ("query", "key")}
    return call.pair_score(inputs), inputs["value"], call.option(inputs), leaves


def attention_call(seed: int) -> Call:
    """A random call with tensors that the engine takes."""
    while (call := Call(seed)).dtype == torch.float64:
        seed += 1_000_003
    return call


def forward_and_backward(pick: random.Random, seed: int) -> str:
    call = attention_call(seed)
    score, value, options, leaves = attention_of(call, pick)
    out, _ = attention(score, value, options, backend="cpu")
    assert not out.isnan().any()
    torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
    return str(call)


def decoding(pick: random.Random, seed: int) -> str:
    call = attention_call(seed)
    batch, heads, kv_heads, _, _, d, dv = call.shape
    few, keys = pick.randint(1, FEW), int(math.exp(pick.uniform(math.log(6), math.log(3000))))
    call.shape = (batch, heads, kv_heads, few, keys, d, dv)
    call.hype = False  # its positions are those of the call that was drawn
    for name, length in (("query", few), ("key", keys), ("value", keys)):
        t = call.leaves[name]
        call.leaves[name] = t[:, :, torch.randint(t.shape[2], (length,))]
    if pick.random() < EMPTY:
        call.shape = (0, *call.shape[1:])
        for name in ("query", "key", "value"):
            call.leaves[name] = call.leaves[name][:0]
    call.options, call.tensors = call.asked(pick, seed)
    call.leaves.pop("sinks", None)
    with torch.no_grad():
        score, value, options, _ = attention_of(call, pick)
        out, _ = attention(score, value, options, backend="cpu")
    assert not out.isnan().any()
    return str(call)


def over_windows(pick: random.Random, seed: int) -> str:
    kv_heads, group = pick.randint(1, 3), pick.choice((1, 1, 2, 3))
    batch, heads, causal = pick_batch(pick), kv_heads * group, pick.random() < 0.6
    keys = int(math.exp(pick.uniform(math.log(2), math.log(600))))
    queries = keys if pick.random() < 0.7 else pick.randint(1, keys)
    d, dv = (pick.choice((2, 3, 8, 16, 31, 64, 100)) for _ in range(2))
    sizes = [pick.randint(2, 24)]
    while len(sizes) < 4 and pick.random() < 0.6:
        sizes.append(sizes[-1] * pick.randint(2, 6))
    shapes = (batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv)
    tokens = torch.float32 if pick.random() < 0.6 else torch.bfloat16
    leaves = [draw_leaf(*shape, dtype=tokens) for shape in shapes]
    mask = None
    if pick.random() < 0.3:  # padding, on either side
        seen, kept = torch.arange(keys), pick.randint(1, keys)
        mask = (seen < kept if pick.random() < 0.5 else seen >= keys - kept)[None, None, None]
    per_head = lambda most: [pick.randint(0, most) for _ in range(heads)]
    settings = dict(
        hierarchy=tuple(sizes),
        near=per_head(40),
        sinks=per_head(8),
        refine_top_k=per_head(6),
        block_bias=torch.randn(heads, dtype=torch.float32) if pick.random() < 0.3 else None,
    )
    out = hierarchical_attention(
        *(laid_out(t, pick) for t in leaves),
        mask,
        is_causal=causal,
        enable_gqa=True,
        tying="key",
        **settings,
    )
    assert not out.isnan().any()
    torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    dtype = pick.choice((torch.float32, torch.bfloat16, torch.float16))
    if batch and causal and mask is None:
        over_kept_windows(pick, [t.detach() for t in leaves], dtype, settings)
    return f"{shapes} {tokens} causal={causal} mask={mask is not None} kept={dtype} {settings}"


def over_kept_windows(
    pick: random.Random, inputs: list[Tensor], dtype: torch.dtype, settings: dict
) -> None:
    """The forward pass as a cache calls it: tokens in a dtype of their own, means in float32."""
    query, *tokens = inputs
    sizes = settings["hierarchy"]
    wide = pool_levels(*(t.to(dtype) for t in tokens), sizes)
    keys, values = (
        (laid_out(t.to(dtype), pick), *means[1:])
        for t, means in zip(tokens, (wide.keys, wide.values), strict=True)
    )
    rule = {name: value for name, value in settings.items() if name != "hierarchy"}
    how = {"is_causal": True, "offset": tokens[0].shape[2] - query.shape[2], "backend": "native"}
    query = laid_out(query.to(pick.choice((torch.float32, dtype))), pick)
    with torch.no_grad():
        lse = pick.random() < 0.5  # without it, a few queries that refine go another way
        out, _ = attend_named(query, Levels(sizes, keys, values), **rule, **how, lse=lse)
    assert not out.isnan().any()


def of_rows(pick: random.Random, seed: int) -> str:
    shape = [int(math.exp(pick.uniform(0, math.log(most)))) for most in (4, 9, 300, 300)]
    dtype = pick.choice((torch.float32, torch.bfloat16))
    leaf = draw_leaf(*shape, dtype=dtype)
    x = laid_out(leaf, pick)
    root, width = pick.random() < 0.5, pick.randint(1, shape[-1])
    out = norms(x, torch.float32) if root else squared_norms([x], torch.float32, width)[0]
    torch.autograd.grad(out.sum(), leaf)
    return f"{shape} {dtype} root={root} width={width}"


def by_rules(pick: random.Random, seed: int) -> str:
    kv_heads, group = pick.randint(1, 3), pick.choice((1, 2, 3))
    batch, heads = pick_batch(pick), kv_heads * group
    keys = int(math.exp(pick.uniform(math.log(2), math.log(600))))
    queries = keys if pick.random() < 0.6 else pick.randint(1, keys)
    d, dv = (pick.choice((2, 3, 8, 16, 31, 64, 100)) for _ in range(2))
    starts = [pick.randint(0, keys - 1) if pick.random() < 0.3 else 0 for _ in range(batch)]
    spans = starts, [pick.randint(start, keys) if pick.random() < 0.3 else keys for start in starts]
    paged = lambda: (
        pick.randint(1, 40),
        pick.randint(1, 70),
        pick.randint(0, 9),
        pick.randint(0, 1),
        pick.randint(0, 3),
        pick.choice((0, 1, 5, 200)),
    )
    plain = lambda: (0, 1, 0, 0, 0, 0)
    rules = [
        HeadRule(pick.randint(1, 700), pick.randint(0, 9), *pick.choice((paged, plain))())
        for _ in range(heads)
    ]
    dtype, offset = pick.choice((torch.float32, torch.bfloat16)), keys - queries
    shapes = (batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv)
    leaves = [draw_leaf(*shape, dtype=dtype) for shape in shapes]
    q, k, v = (laid_out(t, pick) for t in leaves)
    earlier = pick.randint(0, queries - 1)
    window = pick.randint(1, 700) if pick.random() < 0.3 else None
    chosen = chosen_pages(q, k, rules, spans=spans, offset=offset, earlier=earlier, window=window)
    extras: dict = {"window": window, "softcap": pick.choice((None, None, 0.5, 30.0))}
    if pick.random() < 0.3:
        extras["sinks"] = draw_leaf(heads)
        leaves.append(extras["sinks"])
    if pick.random() < 0.3:
        extras["bias"] = laid_out(torch.randn(batch, heads, keys, dtype=torch.float32), pick)
    places = {"spans": spans, "offset": offset + earlier}
    out = selected_attention(q[:, :, earlier:], k, v, rules, chosen, **places, **extras)
    assert not out.isnan().any()
    torch.autograd.grad(out.float().sum(), leaves, allow_unused=True)
    return f"{shapes} {dtype} spans={spans} earlier={earlier} {rules} {list(extras)}"


KERNELS = {
    "attention": forward_and_backward,
    "decoding": decoding,
    "windows": over_windows,
    "rules": by_rules,
    "norms": of_rows,
}
