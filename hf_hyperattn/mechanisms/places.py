"""Where the queries of a host's call stand among its keys, and which tokens of its rows are padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..engines.options import HIDDEN, read_visible
from .base import FirstKey, Host, HostCall

#: What was read from masks that are alive: all layers of a model share one.
_PADDING, _REAL, _TEXTS = WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary()


def first_query(call: HostCall, mechanism: str, host: Host | None = None) -> int | Tensor:
    """The key that is the first query's own; the next query's is the next one.

    A number where the call says one: queries and keys are of one sequence, or the cache says how many keys there are.
    Else read from the mask, int64 of no axes: a causal query's own key is the last one that it sees. In a host that
    grows (a prefix LM), queries are the last keys that anybody sees.

    Args:
        mechanism: its name, for the error.
        host: where the call is made; None where that is not known, as under a mechanism's name.

    Raises:
        ValueError: the call does not tell.
    """
    n, m = call.query.shape[2], call.key.shape[2]
    if n == m:
        return 0
    grows = host is not None and host.grows
    if not call.is_causal and not grows:
        raise ValueError(
            f"{mechanism} cannot tell which of {m} keys are those of the {n} queries in "
            f"{'this layer' if host is None else host.name}, which is not causal; allowed: self-attention over one "
            "sequence without a cache, choose such layers with layers=..., or for a prefix LM patch_model of the whole "
            "model that generates"
        )
    if call.first.keys is not None:
        return call.first.keys - n
    mask = call.options.mask
    if mask is None:
        return m - n if n == 1 or not call.is_causal else call.options.offset
    _, last, any_seen = seen_ends(mask, m)
    if not call.is_causal:
        return (last.where(any_seen, -1).amax() + 1 - n).clamp(0, m - n)
    last = torch.where(any_seen, last, 0) - torch.arange(n, device=mask.device)
    return last.amax().clamp(0, m - n)


def seen_ends(mask: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last key that a mask [B|1, H|1, N|1, M|1] shows, and whether there is one, each [B|1, H|1, N|1]."""
    seen = read_visible(mask)
    seen = seen.expand(*seen.shape[:3], keys)
    ones = seen.to(torch.uint8)
    return ones.argmax(-1), keys - 1 - ones.flip(-1).argmax(-1), seen.any(-1)


def remembered(known: WeakIdKeyDictionary, mask: Tensor, about: tuple, read: Callable):
    """`read()`, made once for a mask while it lives and is not changed; anew where a change could not be seen."""
    key = about, None if mask.is_inference() else mask._version
    entry = known.get(mask)
    if entry is None or key[1] is None or entry[0] != key:
        entry = known[mask] = (key, read())
    return entry[1]


def padding_of(mask: Tensor, queries: int, is_causal: bool, position_hides: bool = False) -> Tensor | None:
    """Bool [B, M], the keys that are no padding; None where the mask hides something else too.

    Args:
        mask: as in `Options`.
        queries: N; where causal, queries are the last of the M tokens.
        is_causal: whether the mask itself hides from a query the tokens after it.
        position_hides: whether query i sees no token after i, whatever the mask says of them.
    """

    def read() -> Tensor | None:
        try:
            return _padding(mask, queries, is_causal, position_hides)
        except ValueError:
            return None

    return remembered(_PADDING, mask, (queries, is_causal, position_hides), read)


def _padding(mask: Tensor, queries: int, is_causal: bool, position_hides: bool) -> Tensor | None:
    keys = mask.shape[-1]
    if position_hides and 1 < mask.shape[2] <= keys:  # tokens after the last query are seen by none
        later = torch.ones(queries, queries, dtype=torch.bool, device=mask.device).triu(1)
        seen = mask[..., :queries].masked_fill(later, False if mask.dtype == torch.bool else float("-inf"))
        return torch.nn.functional.pad(real_tokens(seen, queries, True), (0, keys - queries), value=True)
    if is_causal or queries == keys:
        return real_tokens(mask, queries, is_causal)
    return real_tokens(mask, keys) if mask.shape[2] == 1 else None


def real_tokens(mask: Tensor, queries: int, is_causal: bool = False) -> Tensor:
    """Bool [B, M]: the keys that are no padding. The rows of padded queries are not looked at.

    Args:
        mask: bool (True = take part) or additive (0, or what `read_visible` takes for hidden),
            [B, 1 or H, 1 or N, M]. With fewer queries than keys, queries are the last ones.
        queries: N.
        is_causal: whether the mask hides from a query the tokens after it.

    Raises:
        ValueError: the mask hides a real token from a real query, or adds other numbers.
    """
    seen, keys = read_visible(mask), mask.shape[-1]
    odd = mask[seen & (mask != 0)] if mask.dtype != torch.bool else mask[:0]
    if odd.numel():
        raise ValueError(
            f"the attention mask adds {float(odd[0]):g} to a logit; allowed: 0 where visible and "
            f"{HIDDEN:,.0f} or less elsewhere; terms of the logits come as position_bias"
        )
    real = seen.any(1).any(1)
    place = torch.arange(keys, device=mask.device)
    expected = real[:, None, None, :]
    if is_causal:
        expected = expected & (place <= place[keys - queries :, None])
    wrong = ((seen != expected) & real[:, None, keys - queries :, None]).nonzero()[:1].tolist()
    if wrong:
        b, h, i, j = wrong[0]
        shown = bool(seen.expand(-1, -1, queries, -1)[b, h, i, j])
        raise ValueError(
            f"the attention mask {'shows' if shown else 'hides'} token {j} {'to' if shown else 'from'} query {i} of "
            f"row {b}; allowed: masks that hide padding{', and the tokens after a query,' if is_causal else ''} and "
            "nothing else"
        )
    return real


@dataclass(frozen=True, eq=False)
class Texts:
    """Which tokens of a row belong together, where a mask packs several texts into one.

    Args:
        number: int64 [B, M], the text that each key is of; -1 for padding.
        place: int64 [B, M], the number of each key in its text.
    """

    number: Tensor
    place: Tensor


def seen_by_queries(mask: Tensor, queries: int, is_causal: bool) -> Tensor:
    """Bool [B|1, N, M]: which keys each query sees in some head; arguments as in `read_texts`."""
    seen = read_visible(mask).any(1).expand(-1, queries, -1)
    return seen.tril(mask.shape[-1] - queries) if is_causal else seen


def read_texts(mask: Tensor, real: Tensor, queries: int, is_causal: bool, chunk: int | None = None) -> Texts | None:
    """The texts of rows that hold several; None where no row does.

    A text begins where no query sees tokens on both sides: neither itself nor through another token.

    Args:
        mask: as in `Options`; with fewer queries than keys, queries are the last ones.
        real: bool [B, M], the keys that are no padding.
        queries: N.
        is_causal: whether query i sees no token after i, whatever the mask says of them.
        chunk: after every so many tokens of a row the host's own attention begins again; no text begins there.

    Raises:
        ValueError: a text begins among the queries, and keys before them come from a cache.
    """
    keys = mask.shape[-1]
    if chunk is not None and queries < keys:  # where chunks begin among cached keys is not known
        return None

    def read() -> Texts | None:
        seen = seen_by_queries(mask, queries, is_causal) & real[:, None]
        bits = seen.to(torch.uint8)
        sees = seen.any(-1)
        first = bits.argmax(-1).where(sees, keys)
        last = (keys - 1 - bits.flip(-1).argmax(-1)).where(sees, -1)
        own, place = real[:, keys - queries :], real.cumsum(1) - 1
        starts = text_starts(first, last, keys) & own & (place[:, keys - queries :] > 0)
        if chunk is not None:
            starts &= place[:, keys - queries :] % chunk != 0
        if not bool(starts.any()):
            return None
        if queries < keys:
            raise ValueError(
                "a mask packs several texts into one row, whose earlier keys come from a cache; allowed: packed texts "
                "in one call with use_cache=False, or one text a row"
            )
        number = starts.cumsum(1).masked_fill(~real, -1)
        return Texts(number, place - (place * starts).cummax(1).values)

    return remembered(_TEXTS, mask, (queries, is_causal, chunk), read)


def text_starts(first: Tensor, last: Tensor, keys: int) -> Tensor:
    """Bool [B, N]: at which of the last N tokens no query sees from one side to the other.

    Args:
        first, last: int64 [B, N], the first and the last key that each query sees; `keys` and -1 where it sees none.
        keys: M.
    """
    token = torch.arange(keys - first.shape[1], keys, device=first.device)
    query = token[:, None]
    back = (first[..., None] < token) & (token <= query)
    ahead = (query < token) & (token <= last[..., None])
    return ~(back | ahead).any(1)


def real_of(first: FirstKey, keys: int) -> Tensor | None:
    """Bool [B, keys]: the real ones of the first tokens of a row, by the model's attention_mask."""
    mask = first.attention_mask
    if mask is None:
        return None
    pad = torch.nn.functional.pad
    read = lambda: pad(mask[:, :keys].bool(), (0, max(0, keys - mask.shape[1])), value=True)
    return remembered(_REAL, mask, (keys,), read)
