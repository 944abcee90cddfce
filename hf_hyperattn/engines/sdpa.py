"""Compute the plain dot product with torch's kernels (SDPA, FlashAttention).

A bias of low rank is a product of a few numbers per query and per key. These numbers are appended
to Q and K, so that the kernel adds the bias in its own product, and no N x M bias is stored. V is
padded with zeros to the same width, because kernels are slow, or missing, for different widths.

Half precision would round the appended numbers to 8 or 11 bits. Each is therefore split into parts
that add up to it, and every product of parts that matters gets a column:

    float32, float64   x·y                                                1 column
    float16            x1·y1 + x1·y2 + x2·y1                              3 columns
    bfloat16           x1·y1 + x1·y2 + x2·y1 + x2·y2 + x1·y3 + x3·y1      6 columns

A number that is constant along a row does not change its softmax and is left out, unless the bias
has learned parameters. Their gradients need the exact log-sum-exp of the row, and the constant
keeps that small. It is one more column, times 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..utils.readable import is_transformed
from .graph_torch import with_first_derivative_only
from .options import Options, position_mask
from .score import DOT, PairScore, ScoreTerm, repeat_heads

#: Products of parts of the two factors that get a column, by dtype: (part of the query, part of the
#: key).
MEETINGS = {
    torch.float16: ((0, 0), (0, 1), (1, 0)),
    torch.bfloat16: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)),
}
#: Up to this many queries, a dense bias is no larger than the extra columns of the keys.
FEW = 16
#: Widths of heads that kernels are fast for are multiples of these numbers of columns.
HALF_OR_GPU_MULTIPLE = 8
FLOAT_CPU_MULTIPLE = 2


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """Compute softmax(S)·V for a call without an `unsupported_reason`.

    Args:
        score, value, options: As in `reference.attend`.

    Returns:
        The output [B, H, N, dv] in the score's dtype, and None for the weights.
    """
    query, key, scale = product_inputs(score)
    dtype = promote_dtypes(query, key, value)
    width = value.shape[-1]
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    extra = score.terms[1:]
    few = bool(extra) and prefers_mask(query.shape[2], dtype, query.device)
    adding = options.bias is not None or few
    mask, causal = kernel_mask(score, options, adding)
    if adding:
        mask = sum_biases(extra, mask, options.bias)
    elif extra:
        query, key, value = append_terms(query, key, value, scale, extra)
    mask = convert_mask(mask, dtype)
    # On a GPU only FlashAttention shares keys between heads. It takes half precision and no mask.
    if key.is_cuda and (mask is not None or dtype not in MEETINGS):
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    if torch.is_grad_enabled() and not (torch.compiler.is_compiling() or is_transformed()):
        query, key, value = with_first_derivative_only("backend='sdpa'", query, key, value)
        mask = None if mask is None else with_first_derivative_only("backend='sdpa'", mask)[0]
    # Autocast would round the extra columns.
    with torch.autocast(query.device.type, enabled=False):
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=options.dropout_p,
            is_causal=causal,
            scale=scale,
            # `bool`, because torch.jit.trace gives shapes as tensors.
            enable_gqa=bool(query.shape[1] != key.shape[1]),
        )
    return out[..., :width].to(score.dtype), None


def convert_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask in the dtype that SDPA expects next to vectors of `dtype`."""
    if mask is None or not mask.is_floating_point():
        return mask
    # CPU kernels add a float32 mask to half precision. They misread any other dtype that differs
    # from the vectors'.
    if mask.device.type == "cpu" and dtype in MEETINGS:
        return mask
    return mask.to(dtype)


def supports(score: PairScore, value: Tensor, options: Options) -> bool:
    """Return whether `auto` may use this engine.

    It may if the call is supported and needs no N x M matrix.
    """
    device = value.device.type
    # On a CPU, torch's kernel with dropout is the dense one.
    lean = device == "cuda" or (device == "cpu" and not options.dropout_p)
    return lean and unsupported_reason(score, value, options) is None


def unsupported_reason(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Return why this engine cannot compute the call, or None if it can."""
    first, *rest = score.terms
    n, m = score.shape[2:]
    masks = [t for t in (options.mask, options.bias) if t is not None]
    if first.term is not DOT or first.gate is not None:
        return "its score is not the plain dot product"
    if any(t.low_rank_factors is None for t in rest):
        return f"{next(t.term.name for t in rest if t.low_rank_factors is None)} has no exact form as columns here"
    if options.softcap is not None or options.sinks is not None:
        return "softcap and sinks are not available"
    if needs_grad(masks):
        return "masks get no gradient"
    query, key, scale = product_inputs(score)
    # `not >` instead of `<=` also rejects NaN.
    if rest and not abs(scale) > torch.finfo(torch.float32).tiny:
        return "its scale is 0, which columns are divided by"
    dtype = promote_dtypes(query, key, value)
    if options.bias is not None and not prefers_mask(n, dtype, value.device):
        return "it has a bias"
    if dtype in MEETINGS and value.device.type != "cpu" and is_rounded(options.mask, dtype):
        return "half precision would round the numbers of its mask"
    if m == 0:
        return "there are no keys"
    # For few queries a mask of all pairs is small. For more, it is only used if the caller has made
    # one.
    covers_pairs = bool(masks) and masks[0].shape[-2:] == (n, m)
    if n > FEW and not is_simply_hidden(options) and not covers_pairs:
        return "windows, offsets and causality beside a mask of keys need a mask of all pairs"
    if dtype in MEETINGS and needs_grad(learned_numbers(rest)):
        return "half precision is too coarse for the gradients of the bias's parameters"
    return None


def is_rounded(mask: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether `dtype` would round numbers of an additive mask.

    Biases of the caller may have such numbers.
    """
    if mask is None or not mask.is_floating_point():
        return False
    return not torch.equal(mask.to(dtype).to(mask.dtype), mask)


def learned_numbers(terms) -> list[Tensor]:
    """Return the head parameters and gates of terms.

    Gradients of everything learned pass through these.
    """
    return [t for term in terms for t in (*term.head, term.gate) if t is not None]


def needs_grad(tensors: list[Tensor]) -> bool:
    """Return whether a backward pass will need the gradient of at least one tensor."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def product_inputs(score: PairScore) -> tuple[Tensor, Tensor, float]:
    """Return query, key and scale for the kernel.

    They have the caller's dtype if their product equals the product of the features.
    """
    if score.is_product:
        return score.raw_query, score.raw_key, score.scale
    return score.query, score.key, 1.0


def promote_dtypes(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that holds all tensors without rounding."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def prefers_mask(queries: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether biases are passed as a mask.

    That needs few queries, and a kernel that adds the mask in float32.
    """
    return queries <= FEW and (dtype not in MEETINGS or device.type == "cpu")


def is_simply_hidden(options: Options) -> bool:
    """Return whether the kernel's causal flag can express what position hides."""
    if options.window is not None:
        return False
    return not options.is_causal or (options.mask is None and options.offset == 0)


def kernel_mask(score: PairScore, options: Options, adding: bool) -> tuple[Tensor | None, bool]:
    """Return the mask and the causal flag for the kernel.

    Args:
        score: The pair score.
        options: Masks, causality and window.
        adding: Whether biases will be added to the mask. SDPA does not allow a mask with the causal
            flag.

    Returns:
        Mask [B|1, H|1, N|1, M], bool or additive, or None; and the flag, which is only set without
        a mask.
    """
    if is_simply_hidden(options) and not (adding and options.is_causal):
        return options.mask, options.is_causal
    n, m = score.shape[2:]
    visible = position_mask(options, (0, n), (0, m), score.device)
    assert visible is not None  # position hides something here
    if options.mask is None:
        return visible[None, None], False
    if options.mask.dtype == torch.bool:
        return options.mask & visible, False
    return options.mask.masked_fill(~visible, float("-inf")), False


def sum_biases(extra: tuple[ScoreTerm, ...], mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return one additive mask with everything that is added to the product.

    Args:
        extra: Terms besides the product.
        mask: Bool or additive mask, or None.
        bias: Additive bias, or None.
    """
    total: Any = 0.0 if bias is None else bias  # a tensor from the first term on
    for term in extra:
        part = term.definition()
        total = total + (part if term.gate is None else term.gate[:, None, None] * part)
    if mask is None:
        return total
    return total + mask if mask.dtype != torch.bool else torch.where(mask, total, float("-inf"))


def append_terms(
    query: Tensor, key: Tensor, value: Tensor, scale: float, extra: tuple[ScoreTerm, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Append columns for the extra terms to queries and keys.

    All three tensors are padded with zeros to one width.

    Args:
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d].
        value: Values [B, Hkv, M, dv].
        scale: Factor of the kernel's product.
        extra: Terms besides the product.

    Returns:
        Queries, keys and values of one width. Keys and values are repeated to H heads if the
        columns differ in a group.
    """
    learned = needs_grad(learned_numbers(extra))
    columns = [make_columns(term, scale, query.dtype, learned) for term in extra]
    left, right = (join_columns(sides) for sides in zip(*columns, strict=True))
    if right.shape[1] not in (1, key.shape[1]):
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    width = max(query.shape[-1] + left.shape[-1], value.shape[-1])
    half_or_gpu = query.is_cuda or query.dtype in MEETINGS
    width += -width % (HALF_OR_GPU_MULTIPLE if half_or_gpu else FLOAT_CPU_MULTIPLE)
    return (
        append_columns(query, left, width),
        append_columns(key, right, width),
        pad(value, (0, width - value.shape[-1])),
    )


def append_columns(x: Tensor, columns: Tensor, width: int) -> Tensor:
    """Return [B, H, L, width]: vectors, their columns, zeros."""
    columns = columns.expand(*x.shape[:3], -1)
    # An expanded scalar: no buffer of zeros is made before `cat` writes them.
    zeros = x.new_zeros(()).expand(*x.shape[:3], width - x.shape[-1] - columns.shape[-1])
    return torch.cat([x, columns, zeros], -1)


def join_columns(sides: tuple[Tensor, ...]) -> Tensor:
    """Return the columns of several terms next to each other, [B|1, H|1, L, c]."""
    batch, heads = (max(t.shape[axis] for t in sides) for axis in (0, 1))
    return torch.cat([t.expand(batch, heads, -1, -1) for t in sides], -1)


def make_columns(
    term: ScoreTerm, scale: float, dtype: torch.dtype, with_row: bool
) -> tuple[Tensor, Tensor]:
    """Return the columns of queries and keys for a term.

    Their product, times the scale, is the term with its gate.

    Args:
        term: A term with `low_rank_factors`.
        scale: Factor of the kernel's product.
        dtype: Dtype of the columns.
        with_row: Include the numbers that are constant along a row.

    Returns:
        Columns [B|1, H|1, N, c] and [B|1, H|1, M, c].
    """
    assert term.low_rank_factors is not None  # `unsupported_reason` has checked it
    left, right, row = term.low_rank_factors()
    gate = (1.0 if term.gate is None else term.gate.to(left.dtype)[:, None, None]) / scale
    if with_row:
        left = torch.cat([left, row[..., None]], -1)
        right = torch.cat([right, right.new_ones(*right.shape[:-1], 1)], -1)
    left = left * gate
    if dtype not in MEETINGS:
        return left.to(dtype), right.to(dtype)
    pairs = MEETINGS[dtype]
    count = 1 + max(i for i, _ in pairs)
    balance = balance_factors(left, right)
    lefts = split_parts(left / balance, dtype, count)
    rights = split_parts(right * balance, dtype, count)
    return torch.cat([lefts[i] for i, _ in pairs], -1), torch.cat([rights[j] for _, j in pairs], -1)


def balance_factors(left: Tensor, right: Tensor) -> Tensor:
    """Return a power of 2 per column that makes both sides equally large.

    Both sides then stay in the range of float16. Powers of 2 add no rounding.
    """
    # The balance cancels in the product, so it needs no gradient. The bound avoids log2(0).
    size_left, size_right = (
        t.abs().amax((0, 1, 2)).clamp_min(1e-30) for t in (left.detach(), right.detach())
    )
    return torch.exp2(torch.round(torch.log2(size_left / size_right) / 2))


def split_parts(x: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Return `count` tensors of `dtype` that add up to x, the largest first."""
    parts = []
    for _ in range(count):
        parts.append(x.to(dtype))
        x = x - parts[-1].to(x.dtype)
    return parts
