"""Tiny causal models with every mechanism, and the calls in which a text may come to them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import torch
import transformers as hf
from hypothesis import strategies as st
from torch import Tensor, nn

import hf_hyperattn as ha
from hf_hyperattn.rules import Clusters, Exact, NestedWindows, Pages, VerticalSlash, Window

from .texts import FORMS, Form, Row, assert_near, draw_packed, draw_padded

VOCABULARY = 99
MECHANISMS = {
    "cone": [ha.ConeConfig()],
    "cone, penumbral": [ha.ConeConfig(variant="penumbral", clamp_heights=True)],
    "hyperbolic": [ha.HyperbolicConfig()],
    "hyperbolic, squared": [
        ha.HyperbolicConfig(temperature=8.0, distance="squared_lorentz", aggregation="mean")
    ],
    "hype": [ha.HypeConfig(mu=0.15, tau=3.0)],
    "hsa": [ha.HsaConfig((2, 4), near=1, sinks=1, refine_top_k=0, block_bias=0.3)],
    "hsa, refined": [ha.HsaConfig((2, 4), near=1, sinks=0, refine_top_k=1)],
    "head fusion": [ha.HeadFusionConfig()],
    "talking heads": [ha.TalkingHeadsConfig()],
    "mkl": [ha.MklConfig()],
    "mkl, conditional": [ha.MklConfig(kind="conditional")],
    "mkl, combined": [ha.MklConfig(combine=True)],
    "trilinear": [ha.TrilinearConfig(windows=(4, 3))],
    "trilinear, no windows": [ha.TrilinearConfig(windows=None)],
    "bidaf": [ha.TrilinearConfig(form="bidaf")],
    "exact": [ha.SparseConfig(Exact())],
    "window": [ha.SparseConfig(Window(3, 0))],
    "sinks": [ha.SparseConfig(Window(3, 1))],
    "rules by head": [ha.SparseConfig([Window(3, 1), Window(4, 2), Exact(), Pages(2, 1, 2, 1)])],
    "pages": [ha.SparseConfig(Pages(2, 1, 2, 1))],
    "pages by the chunk before": [ha.SparseConfig(Pages(2, 1, 2, 1, query="previous", chunk=2))],
    "pages by the first query": [ha.SparseConfig(Pages(2, 1, 2, 1, "mean", "first", 3))],
    "clusters": [ha.SparseConfig(Clusters(2, 1, 4, 2, 1))],
    "clusters by the chunk before": [
        ha.SparseConfig(Clusters(2, 1, 4, 2, 1, query="previous", chunk=2))
    ],
    "vertical and slash": [ha.SparseConfig(VerticalSlash(2, 1, 2, 1, 4, 2))],
    "nested windows": [ha.SparseConfig(NestedWindows((2, 4), 2, 1, 1))],
    "nested windows, bounds": [
        ha.SparseConfig(NestedWindows((2, 4), 2, 0, 1, summary="bounds", query="previous", chunk=2))
    ],
    "hype and hsa": [
        ha.HypeConfig(mu=0.15, tau=3.0),
        ha.HsaConfig((2, 4), near=1, sinks=1, refine_top_k=0),
    ],
    "cone and talking heads": [ha.ConeConfig(), ha.TalkingHeadsConfig()],
}
SPARSE = frozenset(
    name for name, configs in MECHANISMS.items() if isinstance(configs[0], ha.SparseConfig)
)
#: Sparse rules that know rows of one whole text.
ONE_TEXT = SPARSE - {"exact", "window"}
#: Sparse rules that select by queries of earlier calls.
EARLIER = frozenset(["vertical and slash"]) | {
    name for name in ONE_TEXT if "the chunk before" in name or "bounds" in name
}
#: Mechanisms whose results depend on where keys stand in their row.
COUNTING = frozenset(["hype", "hsa", "hsa, refined", "trilinear", "hype and hsa"]) | SPARSE - {
    "exact"
}
#: Mechanisms that choose keys by their scores, so that rounding may decide.
CHOOSING = frozenset(["hsa, refined"]) | ONE_TEXT - {"sinks"}
#: Mechanisms whose results change where all rotary positions are shifted: position_ids must count the tokens.
TURNING = frozenset(
    [
        "cone",
        "cone, penumbral",
        "cone and talking heads",
        "trilinear",
        "trilinear, no windows",
        "bidaf",
    ]
    # Bounds of pages are of single channels.
    + ["rules by head", "pages", "pages by the chunk before", "nested windows, bounds"]
)
#: In Triton's interpreter, its engine alone.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENGINES = ("triton",) if INTERPRETED else ("auto", "reference", "blockwise", "cpu")
NO_KERNEL = frozenset(
    ["talking heads", "cone and talking heads", "trilinear", "trilinear, no windows"]
)
#: For each kind of call the mechanisms that may refuse it, and what their sentence says. Nothing else is refused.
REFUSALS = {
    "cpu": (NO_KERNEL, "backend='cpu' is unknown"),
    "sliding window": (
        frozenset(["vertical and slash"]),
        "whose cache drops the columns that it measures",
    ),
    "packed": (ONE_TEXT, "its rules know rows of one whole text"),
    "packed, with a cache": (COUNTING, "allowed:"),
    "padding by itself": (EARLIER, "which are not known"),
    "forgotten, padding inside": (frozenset(["hsa"]), "HierarchicalCache(evict=True)"),
    "pruned": (COUNTING, "counts the keys of the cache, and position_ids="),
}


def assert_refusal(error: ValueError, mechanism: str, kinds: set[str]) -> None:
    """Raise where nothing in a call may be refused, or where a refusal is not one line that says what is allowed."""
    said = str(error)
    parts = [
        part for kind, (those, part) in REFUSALS.items() if kind in kinds and mechanism in those
    ]
    assert "\n" not in said and "allowed:" in said, said
    assert any(part in said for part in parts), f"{mechanism} refuses {sorted(kinds)}: {said}"


SLIDING = 5
HOSTS = ("llama", "sliding", "mixed")


def make_host(name: str) -> nn.Module:
    """Return a model whose layers see all keys, a sliding window of them, or the one and the other."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    sizes |= dict(
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=64,
    )
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval()
    kinds = ["sliding_attention", "sliding_attention" if name == "sliding" else "full_attention"]
    config = hf.Qwen2Config(
        **sizes, sliding_window=SLIDING, layer_types=kinds, use_sliding_window=True
    )
    return hf.Qwen2ForCausalLM(config).eval()


@cache
def make_model(host: str, mechanism: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the patched model, its added parameters away from where they start.

    Raises:
        ValueError: the mechanism refuses the host.
    """
    model = ha.patch_model(make_host(host), *MECHANISMS[mechanism], mode="replace")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


@cache
def make_exact(host: str, mechanism: str, dtype: torch.dtype) -> nn.Module:
    """Return a copy, with the numbers of that dtype, that computes in float64 on the engine "reference"."""
    model = copy.deepcopy(make_model(host, mechanism, dtype)).double()
    return ha.set_backend(model, "reference")


@lru_cache(maxsize=4096)
@torch.no_grad()
def read_alone(
    host: str, mechanism: str, tokens: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the logits [n, vocabulary] of a text alone, in one call without a mask or a cache."""
    model = make_exact(host, mechanism, dtype)
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


CACHES: dict[str, Callable] = {
    "dynamic": lambda model, slots: hf.DynamicCache(config=model.config),
    "plain dynamic": lambda model, slots: hf.DynamicCache(),
    "static": lambda model, slots: hf.StaticCache(config=model.config, max_cache_len=slots),
    "hierarchical": lambda model, slots: ha.HierarchicalCache(model),
    "forgetful": lambda model, slots: ha.HierarchicalCache(model, evict=True),
}


@dataclass(frozen=True)
class Talk:
    """A batch of texts as it comes to a model, call by call.

    Args:
        rows: what the slots of each row hold.
        sizes: how many slots come with each call.
        cache: a name in CACHES; None for one call without a cache.
        form: of 4D masks; "2D" for an attention_mask of numbers; None for none at all.
        places: whether position_ids are given.
        chosen: the rows that go on before each call, as beams do; empty for all as they are.
        room: empty slots behind the texts of a static cache.
        blind: whether queries that are padding see nothing in a 4D mask, or every token before them. With a cache
            the last key that a query sees is its own, so that padding sees nothing.
        seed: of the tokens.
    """

    rows: tuple[Row, ...]
    sizes: tuple[int, ...]
    cache: str | None
    form: Form | str | None
    places: bool
    chosen: tuple[tuple[int, ...], ...]
    room: int
    blind: bool
    seed: int
    tokens: Tensor = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        shape = len(self.rows), len(self.rows[0].texts)
        object.__setattr__(self, "tokens", torch.randint(1, VOCABULARY, shape, generator=generator))


@st.composite
def draw_packed_talks(draw) -> Talk:
    """Draw several texts in a row, in one call or in several."""
    length = draw(st.integers(2, 12))
    rows = tuple(draw_packed(draw, length) for _ in range(draw(st.integers(1, 2))))
    cache = draw(st.sampled_from((None, None, "dynamic", "static", "hierarchical")))
    sizes = draw_sizes(draw, length) if cache else (length,)
    by_places = cache is None and all(bool(row.real.all()) for row in rows)
    form = draw(st.sampled_from([None, None]) | FORMS) if by_places else draw(FORMS)
    plain = dict(chosen=((),) * len(sizes), room=draw(st.integers(0, 3)), blind=True)
    return Talk(rows, sizes, cache, form, places=True, seed=draw(st.integers(0, 10**6)), **plain)


@st.composite
def draw_talks(draw, host: str, mechanism: str) -> Talk:
    length = draw(st.integers(7, 14) | st.integers(1, 14))
    # A window of slots would change what the model itself means where padding stands inside a row.
    counts_slots = host != "llama"
    kinds = [draw_whole, draw_left if counts_slots else draw_padded]
    kind = draw(st.sampled_from(kinds))
    rows = tuple(kind(draw, length) for _ in range(draw(st.integers(1, 3))))
    cache = draw(st.sampled_from((None, "hierarchical", *CACHES)))
    sizes = draw_sizes(draw, length) if cache else (length,)
    forms = [None, "2D"] if all(bool(row.real.all()) for row in rows) else ["2D"]
    # With a sliding window, caches of layers differ in length, and no 4D mask fits all of them.
    form = draw(st.sampled_from(forms) if host != "llama" else st.sampled_from(forms) | FORMS)
    count, one_shape = len(rows), len({row.texts for row in rows}) == 1
    orders = st.just(()) | st.tuples(*[st.integers(0, count - 1)] * count)
    beams = (one_shape or not counts_slots) and draw(st.booleans())
    chosen = ((), *(draw(orders) for _ in sizes[1:])) if beams else ((),) * len(sizes)
    counted_alike = all(
        is_whole(row) if mechanism not in TURNING else starts_at_once(row) for row in rows
    )
    return Talk(
        rows,
        sizes,
        cache,
        form,
        places=not counted_alike or (any(chosen) and not one_shape) or draw(st.booleans()),
        chosen=chosen,
        room=draw(st.integers(0, 3)),
        blind=cache is not None or draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


def draw_whole(draw, length: int) -> Row:
    return Row((0,) * length)


def draw_left(draw, length: int) -> Row:
    left = draw(st.integers(0, length - 1))
    return Row((-1,) * left + (0,) * (length - left))


def draw_sizes(draw, length: int) -> tuple[int, ...]:
    """Draw whole prompt, prompt in chunks, or a prompt and single steps."""
    first = draw(st.integers(1, length))
    rest = length - first
    if draw(st.booleans()):
        return (first, *[1] * rest)
    sizes = [first]
    while rest:
        sizes.append(draw(st.integers(1, rest)))
        rest -= sizes[-1]
    return tuple(sizes)


def is_whole(row: Row) -> bool:
    """Whether a row is one text without padding inside, whose tokens may be counted by slots."""
    slots = row.real.nonzero()[:, 0]
    return max(row.texts) == 0 and int(slots[-1] - slots[0]) + 1 == len(slots)


def starts_at_once(row: Row) -> bool:
    """Whether a row is one text without padding before its end."""
    return is_whole(row) and row.texts[0] == 0


def has_padding_inside(talk: Talk) -> bool:
    """Whether a row has padding behind its first token, or may get it from another row."""
    return any(talk.chosen) or not all(is_whole(row) and row.texts[-1] >= 0 for row in talk.rows)


def has_padding_by_itself(talk: Talk) -> bool:
    """Whether all queries of a row are padding in some call, whose mask then says nothing of the row."""
    parts = (row.real.split(talk.sizes) for row in talk.rows)
    return not all(bool(part.any()) for row in parts for part in row)


def kinds_of(host: str, engine: str, talk: Talk) -> set[str]:
    """Return the kinds of REFUSALS that a talk is of."""
    kinds = {engine} | ({"sliding window"} if host != "llama" else set())
    if max(max(row.texts) for row in talk.rows) > 0:
        kinds.add("packed, with a cache" if talk.cache else "packed")
    if talk.cache and isinstance(talk.form, Form) and has_padding_by_itself(talk):
        kinds.add("padding by itself")
    if talk.cache == "forgetful" and has_padding_inside(talk):
        kinds.add("forgotten, padding inside")
    return kinds


@torch.no_grad()
def hold_talk(
    model: nn.Module, talk: Talk, check: Callable[[Tensor, list, range], None]
) -> Iterator[None]:
    """Make the calls of a talk, one for each step of the iterator.

    Args:
        check: is called with the logits [B, n, vocabulary] of a call, the rows as they are by then, each with its
            tokens, and the slots of the call.
    """
    rows, tokens, length = list(talk.rows), talk.tokens, len(talk.rows[0].texts)
    slots = length + talk.room
    cache = CACHES[talk.cache](model, slots) if talk.cache else None
    start = 0
    for size, chosen in zip(talk.sizes, talk.chosen, strict=True):
        if chosen:
            cache.reorder_cache(torch.tensor(chosen))
            rows = [join(rows[c], row, start) for c, row in zip(chosen, rows, strict=True)]
            tokens = torch.cat([tokens[list(chosen), :start], tokens[:, start:]], 1)
        stop = start + size
        call = dict(use_cache=False) if cache is None else dict(past_key_values=cache)
        if talk.places:
            call["position_ids"] = torch.stack([row.places for row in rows])[:, start:stop]
        if talk.form is not None:
            call["attention_mask"] = write_mask(talk, rows, start, stop, slots)
        logits = model(tokens[:, start:stop], **call).logits
        check(logits, list(zip(rows, tokens.tolist(), strict=True)), range(start, stop))
        start = stop
        yield


def join(before: Row, after: Row, at: int) -> Row:
    """Return a row of the first slots of one and the rest of another. Rows of several texts stay as they are."""
    return replace(after, texts=before.texts[:at] + after.texts[at:])


def write_mask(talk: Talk, rows: list[Row], start: int, stop: int, slots: int) -> Tensor:
    """Return the mask of the queries of slots [start, stop)."""
    if talk.form == "2D":
        return torch.stack([row.real for row in rows])[:, :stop].long()
    seen = torch.stack([row.sees(True) for row in rows])
    if not talk.blind:
        real = torch.stack([row.real for row in rows])
        seen = seen | (~real[:, :, None] & real[:, None]).tril()
    seen = seen[:, None, start:stop, :stop]
    if talk.cache == "static":
        seen = torch.nn.functional.pad(seen, (0, slots - stop))
    return talk.form.write(seen)


def check_against_alone(
    host: str, mechanism: str, dtype: torch.dtype, share: float, case: object
) -> Callable:
    """Return the check of `hold_talk`: logits of real tokens are those of their text alone."""

    def check(logits: Tensor, rows: list[tuple[Row, list[int]]], slots: range) -> None:
        for (row, tokens), found in zip(rows, logits, strict=True):
            for at in row.of_texts():
                at = at[at < slots.stop]
                here = at >= slots.start
                if not bool(here.any()):
                    continue
                text = tuple(tokens[i] for i in at.tolist())
                expected = read_alone(host, mechanism, text, dtype)
                assert_near(found[at[here] - slots.start], expected[here], share, case)

    return check


@torch.no_grad()
def prune(model: nn.Module, tokens: Tensor, gone: set[int], **call) -> hf.DynamicCache:
    """Return the cache of a prompt without the keys of some of its tokens."""
    past = hf.DynamicCache()
    model(tokens, past_key_values=past, **call)
    left = torch.tensor([place for place in range(tokens.shape[1]) if place not in gone])
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, left], layer.values[:, :, left]
    return past
