"""Rules of one's own that choose pages by a score in torch: on the kernel, what a definition in plain loops gives."""

import logging
import sys
import types
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from transformers.utils import logging as hf_logging

import hf_hyperattn as ha
from hf_hyperattn.functional import sparse_attention
from hf_hyperattn.mechanisms.sparse import compiled
from hf_hyperattn.rules import PageRule, Pages, SparseRule, rule
from tests.engines.test_native import needs_compiler

pytestmark = needs_compiler


@rule("test_loud_pages")
@dataclass(frozen=True)
class LoudPages(PageRule):
    """Pages whose longest key, plus its product with the query, is largest."""

    near: int = 6
    sinks: int = 2
    page: int = 4
    top: int = 2
    query: str = "own"
    chunk: int = 1

    def score_pages(self, query, pages, real=None):
        longest = pages.square().sum(-1).amax(-1)
        return longest[:, :, None] + torch.einsum("bhrd,bhpkd->bhrp", query, pages)


@rule("test_no_checks")
@dataclass(frozen=True)
class NoChecks(LoudPages):
    """Leaves out what PageRule does with its fields."""

    chunk: int = 4

    def __post_init__(self):
        pass


@rule("test_same_for_all_heads")
@dataclass(frozen=True)
class SameForAllHeads(LoudPages):
    wrong: bool = False

    def score_pages(self, query, pages, real=None):
        scores = pages.square().sum((1, 3, 4))[:, None, None]
        return scores[..., :1, :-1] if self.wrong else scores


@rule("test_only_new_pages")
@dataclass(frozen=True)
class OnlyNewPages(Pages):
    """Changes what the kernel knows of `Pages`: nothing before token 10 is seen."""

    def visible(self, call):
        return super().visible(call) & (call.tokens >= 10)


@rule("test_every_third")
@dataclass(frozen=True)
class EveryThird(SparseRule):
    """Without lists."""

    near: int = 2

    def share(self, length):
        return 0.5

    def visible(self, call):
        return (call.tokens > call.places - self.near) | (call.tokens % 3 == 0)


RULES = [
    LoudPages(),
    LoudPages(near=3, sinks=0, page=1, top=5),
    LoudPages(near=5, page=3, top=3, query="first", chunk=4),
    LoudPages(near=9, page=4, top=2, query="previous", chunk=8),
    LoudPages(near=4, page=2, top=4, query="chunk", chunk=6),
]


@pytest.fixture
def runs(monkeypatch):
    """Whether the kernel ran, call by call."""
    found, attend = [], compiled.attend_by_kernel

    def watched(*arguments, **keywords):
        out = attend(*arguments, **keywords)
        found.append(out is not None)
        return out

    monkeypatch.setattr(compiled, "attend_by_kernel", watched)
    return found


def define_output(rule, query, key, value, scale):
    """The attention of one head over one text without padding, in loops: query, key and value [N, ...] in float64."""
    out = []
    for i in range(len(query)):
        start = i // rule.chunk * rule.chunk
        asking = choose_by(rule, query, start, i)
        opening = max(0, start - rule.near + 1) // rule.page * rule.page
        scored = []
        for page in range(len(key) // rule.page):
            first, stop = page * rule.page, (page + 1) * rule.page
            if stop <= opening and stop > rule.sinks:
                keys = key[first:stop]
                score = max(float(k @ k) for k in keys) + sum(float(asking @ k) for k in keys)
                scored.append((-score, page))
        pages = {page for _, page in sorted(scored)[: rule.top]}
        seen = [
            j for j in range(i + 1) if j < rule.sinks or j >= opening or j // rule.page in pages
        ]
        weights = torch.softmax(torch.stack([scale * query[i] @ key[j] for j in seen]), 0)
        out.append(sum(w * value[j] for w, j in zip(weights, seen, strict=True)))
    return torch.stack(out)


def choose_by(rule, query, start, i):
    if rule.query == "own":
        return query[i]
    if rule.query == "first":
        return query[start]
    if rule.query == "chunk":
        return query[start : start + rule.chunk].mean(0)
    return (
        query[start - rule.chunk : start].mean(0) if start else query[0]
    )  # nothing is chosen in the first chunk


def draw(kind, *shape):
    if kind == "random":
        return torch.randn(shape)
    if kind == "round":  # sums of products are exact, and many scores equal
        return torch.randint(-2, 3, shape).float()
    return torch.randn(*shape[:2], 1, shape[3]).expand(shape).clone()  # all tokens alike


@pytest.mark.parametrize("kind", ["random", "round", "equal"])
@pytest.mark.parametrize("each", RULES, ids=lambda r: r.query + str(r.page))
def test_against_a_definition_in_loops(each, kind, runs):
    torch.manual_seed(3)
    q, k, v = (draw(kind, 1, heads, 45, 8).requires_grad_() for heads in (4, 2, 2))
    out = sparse_attention(q, k, v, is_causal=True, enable_gqa=True, rules=each, scale=0.25)
    weights = torch.randn_like(out)
    found = [out, *torch.autograd.grad((out * weights).sum(), (q, k, v))]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    heads = [
        define_output(each, wide[0][0, h], wide[1][0, h // 2], wide[2][0, h // 2], 0.25)
        for h in range(4)
    ]
    defined = torch.stack(heads)[None]
    expected = [defined, *torch.autograd.grad((defined * weights).sum(), wide)]
    assert runs == [True]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_moves_nothing(padding, runs):
    """Each row gives what its text alone gives; a row of padding alone gives 0."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 40, 8) for heads in (5, 5, 5))
    real = torch.ones(3, 40, dtype=torch.bool)
    real[1, :11] = real[2] = False
    real = real if padding == "left" else real.flip(1)
    out = sparse_attention(q, k, v, real[:, None, None], is_causal=True, rules=RULES)
    assert runs == [True] and not out[2].any()
    text = slice(11, None) if padding == "left" else slice(0, 29)
    alone = sparse_attention(*(t[1:2, :, text] for t in (q, k, v)), is_causal=True, rules=RULES)
    torch.testing.assert_close(out[1:2, :, text], alone)
    whole = sparse_attention(*(t[:1] for t in (q, k, v)), is_causal=True, rules=RULES)
    torch.testing.assert_close(out[:1], whole)


def test_bfloat16(runs):
    q, k, v = (draw("round", 1, 5, 60, 16).bfloat16() for _ in range(3))
    out = sparse_attention(q, k, v, is_causal=True, rules=RULES)
    expected = sparse_attention(
        q.float(), k.float(), v.float(), is_causal=True, rules=RULES, backend="reference"
    )
    assert runs == [True, False] and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def model_of(rules, window=None, **more):
    sizes = dict(
        vocab_size=64, hidden_size=40, intermediate_size=32, num_hidden_layers=2, pad_token_id=0
    )
    sizes |= dict(num_attention_heads=5, num_key_value_heads=1, head_dim=8)
    torch.manual_seed(0)
    if window is None:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval()
    else:
        model = hf.MistralForCausalLM(hf.MistralConfig(**sizes, sliding_window=window)).eval()
    return ha.patch_model(model, ha.SparseConfig(rules, **more), mode="replace")


#: The kernel chooses the pages of the second and fourth head.
MIXED = [
    RULES[0],
    Pages(near=4, page=4, top=2, query="previous", chunk=8),
    RULES[3],
    Pages(near=4, page=2),
    RULES[2],
]


@pytest.mark.parametrize("kind", [hf.DynamicCache, ha.HierarchicalCache])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_model_generates_by_the_kernel(padded, kind, runs):
    """In one call, in chunks and in single steps alike, beside heads whose pages the kernel chooses."""
    model = model_of(MIXED)
    ids, mask = torch.randint(1, 64, (2, 50)), torch.ones(2, 50, dtype=torch.long)
    mask[1, : 7 if padded else 0] = 0
    logits = lambda *given, **call: model(*given, **call).logits
    with torch.no_grad():
        ha.set_backend(model, "reference")
        expected = logits(ids, attention_mask=mask, use_cache=False) * mask[..., None]
        ha.set_backend(model, "auto")
        runs.clear()
        whole = logits(ids, attention_mask=mask, use_cache=False) * mask[..., None]
        cache, parts, place = (
            kind() if kind is ha.HierarchicalCache else kind(config=model.config),
            [],
            0,
        )
        for size in (21, 9, *[1] * 20):
            call = dict(attention_mask=mask[:, : place + size], past_key_values=cache)
            parts.append(logits(ids[:, place : place + size], **call))
            place += size
    assert all(runs) and len(runs) == 2 * 23
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.cat(parts, 1) * mask[..., None], expected, rtol=1e-4, atol=1e-5
    )


def test_with_rules_for_several_lengths(runs):
    model = model_of([MIXED, RULES], lengths=(22, 64))
    ids, found = torch.randint(1, 64, (1, 48)), []
    for backend in ("auto", "reference"):
        ha.set_backend(model, backend)
        with torch.no_grad():
            found.append(model(ids).logits)
    assert runs == [True] * 2 + [False] * 2
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_saved_and_reloaded(tmp_path):
    model, ids = model_of(MIXED), torch.randint(1, 64, (1, 30))
    model.save_pretrained(tmp_path)
    again = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.hyperattn == model.config.hyperattn
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_rule_from_another_module_by_patch_and_generate(runs):
    """As somebody's own package would bring it."""
    module = types.ModuleType("somebodys_rules")
    sys.modules[module.__name__] = module
    source = """
from dataclasses import dataclass
from hf_hyperattn.rules import PageRule, rule

@rule("test_somebodys")
@dataclass(frozen=True)
class Newest(PageRule):
    near: int = 4
    sinks: int = 1
    page: int = 4
    top: int = 3
    query: str = "own"
    chunk: int = 1

    def score_pages(self, query, pages, real=None):
        return pages.new_ones(*query.shape[:3], pages.shape[2]).cumsum(-1)
"""
    exec(source, module.__dict__)
    model = model_of(module.Newest())
    ids = torch.randint(1, 64, (1, 40))
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert all(runs) and len(runs) == 2 * 6
    ha.set_backend(model, "reference")
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(written, expected)


@pytest.mark.parametrize("window", [9, 14, 20])
def test_a_sliding_window(window, runs):
    """Pages that the window hides before a chunk ends are no candidates."""
    found = []
    for backend in ("auto", "reference"):
        model = model_of(MIXED, window=window)
        ha.set_backend(model, backend)
        with torch.no_grad():
            found.append(model(torch.arange(1, 51)[None], use_cache=False).logits)
    assert runs == [True] * 2 + [False] * 2
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["opening", "choose_pages"])
def test_a_rule_that_overrides_a_step_of_the_choice_goes_by_a_mask(
    method, runs, caplog, monkeypatch
):
    hf_logging.warning_once.cache_clear()
    monkeypatch.setattr(
        LoudPages, method, lambda self, given: getattr(PageRule, method)(self, given), raising=False
    )
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        sparse_attention(q, k, v, is_causal=True, rules=LoudPages())
    assert runs == [False] and f"overrides PageRule.{method}" in caplog.text


def test_one_line_says_that_the_call_is_not_served(caplog):
    hf_logging.warning_once.cache_clear()
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        for _ in range(2):
            sparse_attention(q, k, v, rules=LoudPages())
    assert caplog.text.count("The kernel does not take this call") == 1


@pytest.mark.parametrize("each, by_kernel", [(NoChecks(), False), (SameForAllHeads(), True)])
def test_odd_rules_give_what_masks_give(each, by_kernel, runs):
    q, k, v = (torch.randn(2, 4, 37, 8) for _ in range(3))
    found = [
        sparse_attention(q, k, v, is_causal=True, rules=each, backend=b)
        for b in ("auto", "reference")
    ]
    assert runs == [by_kernel, False]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_scores_of_another_shape_are_refused():
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    with pytest.raises(
        ValueError,
        match=r"SameForAllHeads\.score_pages returned \[1, 1, 1, 9\]; allowed: \[1, 2, \d+, 10\]",
    ):
        sparse_attention(q, k, v, is_causal=True, rules=SameForAllHeads(wrong=True))


def test_a_rule_that_changes_what_is_seen_goes_by_a_mask(runs):
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    each = OnlyNewPages(near=4, page=4, top=3)
    out = sparse_attention(q, k, v, is_causal=True, rules=each)
    changed = sparse_attention(
        q,
        torch.randn_like(k).where(torch.arange(40)[:, None] < 10, k),
        v,
        is_causal=True,
        rules=each,
    )
    assert runs == [False, False] and not each.mask(q, k)[..., :10].any()
    torch.testing.assert_close(
        out[:, :, 10:14], changed[:, :, 10:14]
    )  # later queries may choose other pages


@pytest.mark.parametrize(
    "each, calls", [(EveryThird(), [False]), (LoudPages(), [True])], ids=["mask", "lists"]
)
def test_one_line_says_that_a_rule_runs_under_a_mask(each, calls, runs, caplog):
    hf_logging.warning_once.cache_clear()
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        for _ in range(2):
            sparse_attention(q, k, v, is_causal=True, rules=each)
        lines = [record.message for record in caplog.records if "under a mask" in record.message]
        assert runs == calls * 2 and len(lines) == (not calls[0])
        if lines:
            assert "test_every_third" in lines[0] and "PageRule" in lines[0]


@pytest.mark.parametrize("call", ["both sides", "float64", "engine"])
def test_where_the_kernel_does_not_serve_the_mask_gives_the_same(call, runs):
    torch.manual_seed(1)
    q, k, v = (draw("round", 1, 2, 40, 8) for _ in range(3))
    if (
        call == "both sides"
    ):  # the definition: every page that is not near is a candidate, by the same scores
        out = sparse_attention(q, k, v, rules=LoudPages(near=1, sinks=0, page=1, top=40))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    else:
        given = [t.double() for t in (q, k, v)] if call == "float64" else [q, k, v]
        backend = "sdpa" if call == "engine" else "auto"
        out = sparse_attention(*given, is_causal=True, rules=RULES[3], backend=backend).float()
        expected = sparse_attention(q, k, v, is_causal=True, rules=RULES[3])
    assert runs[0] is False
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{"page": 0}, {"near": 0}, {"top": -1}, {"chunk": 0, "query": "first"}, {"query": "x"}],
)
def test_fields_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=rf"LoudPages\.{list(fields)[0]}.*allowed"):
        LoudPages(**fields)
