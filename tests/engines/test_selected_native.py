"""Attention by rules of the heads against its definition: a mask, and softmax in float64."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hyperattn.engines import native
from hf_hyperattn.engines.cpu.selected import (
    chosen_pages,
    kernel,
    selected_attention,
)
from hf_hyperattn.engines.selected import BY, KEPT, HeadRule, shapes_of_choice
from hf_hyperattn.engines.selection import Lists
from tests.engines.test_native import needs_compiler

pytestmark = needs_compiler
EXACT = 10**6
#: A head for each kind: exact, window, pages with windows of several sizes and chunks, nothing but pages.
RULES = [
    HeadRule(EXACT),
    HeadRule(20, 3),
    HeadRule(7, 2, page=16, chunk=16, top=3),
    HeadRule(16, 4, page=8, chunk=4, top=3),
    HeadRule(16, 0, page=10, chunk=1, top=3),
    HeadRule(1, 0, page=16, chunk=64, top=2),
    HeadRule(3, 5, page=1, chunk=16, top=20),
    HeadRule(2, 1, page=1, chunk=2, top=5),
    HeadRule(4, 0, page=4, chunk=1, top=6),
    HeadRule(1, 2, page=2, chunk=8, top=3),
]
#: Queries, keys, place of the first query, widths, and what is no padding.
SHAPES = {
    "square": (100, 100, 0, 64, 64, None),
    "later": (37, 90, 53, 20, 31, None),
    "padded": (75, 75, 0, 16, 48, ([5, 0], [75, 70])),
    "short padded cache": (9, 80, 71, 33, 16, ([76, 17], [80, 80])),
    "three queries": (3, 50, 47, 20, 70, ([0, 48], [50, 50])),
    "one query": (1, 200, 199, 64, 80, ([0, 41], [200, 200])),
}


def visible(rules, chosen, queries, keys, offset, start, stop):
    """[H, N, M], from the sentence of the definition, for one batch element; `chosen`: of each head [chunks, most]."""
    place = torch.arange(queries)[:, None] + offset - start
    key = torch.arange(keys)[None] - start
    real = (key >= 0) & (key < stop - start) & (key <= place)
    seen = []
    for rule, pages in zip(rules, chosen, strict=True):
        mask = (key < rule.sinks) | (key > place - rule.near)
        if rule.page:
            opening = (
                (place // rule.chunk * rule.chunk - rule.near + 1).clamp(min=0)
                // rule.page
                * rule.page
            )
            mask = (key < rule.sinks) | (key >= opening)
            first = max(0, offset - start) // rule.chunk
            of = pages[(place.clamp(min=0) // rule.chunk - first).squeeze(1)]
            mask = mask | (of[:, None] == (key // rule.page)[..., None]).any(-1)
        seen.append(mask & real)
    return torch.stack(seen)


def defined(
    q, k, v, rules, chosen, offset, spans, softcap=None, window=None, sinks=None, bias=None
):
    """The definition in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    lengths = q.shape[2], k.shape[2], offset
    pages = chosen.of_heads()
    spans = enumerate(zip(*spans, strict=True))
    mask = torch.stack(
        [visible(rules, [of[b] for of in pages], *lengths, *span) for b, span in spans]
    )
    if window is not None:
        mask = mask & (
            torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + offset - window
        )
    logits = q.double() @ k.mT * q.shape[-1] ** -0.5
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits if bias is None else logits + bias.double()[:, :, None]
    logits = logits.masked_fill(~mask, float("-inf"))
    some = mask.any(-1, keepdim=True)
    logits = torch.where(some, logits, 0.0)
    if sinks is not None:
        logits = torch.cat(
            [logits, sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)], -1
        )
    return torch.where(some, logits.softmax(-1)[..., : k.shape[2]], 0.0) @ v


def inputs(name, rules=RULES, kv_heads=2, round_numbers=False, alike=False):
    queries, keys, offset, d, dv, spans = SHAPES[name]
    heads, batch = len(rules), 2
    shapes = (batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv)
    q, k, v = (torch.randint(-2, 3, s).float() if round_numbers else torch.randn(s) for s in shapes)
    spans = spans or ([0] * batch, [keys] * batch)
    return q, k, v, rules, some_pages(rules, queries, keys, offset, spans, alike), offset, spans


def some_pages(rules, queries, keys, offset, spans, alike=False):
    """Pages before each chunk's opening, drawn at random and in any order, each once.

    Args:
        alike: all chunks of a head take the first pages of one order that they may, but for every third, so that
            neighbours share most of them.
    """
    starts, stops = spans
    shapes = shapes_of_choice(rules, queries, keys)
    places = sum(chunks * most for chunks, most in shapes)
    chosen = Lists(torch.full((len(starts), places), -1, dtype=torch.int32), shapes)
    for rule, of_head in zip(rules, chosen.of_heads(), strict=True):
        for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            first, order = (
                max(0, offset - start) // rule.chunk,
                torch.randperm(keys // (rule.page or keys)),
            )
            for i, to in enumerate(of_head[b]):
                opening = min(max(0, (first + i) * rule.chunk - rule.near + 1), stop - start)
                pages = torch.randperm(opening // rule.page)[
                    : int(torch.randint(0, len(to) + 1, ()))
                ]
                if alike and i % 3:
                    pages = order[order < opening // rule.page][: len(to)]
                to[: len(pages)] = pages
    return chosen


#: Rules that choose, of every kind.
CHOOSING = [
    HeadRule(EXACT),
    HeadRule(8, 2, page=4, chunk=1, top=3, bounds=1, by=BY.index("own")),
    HeadRule(16, 4, page=8, chunk=16, top=4, bounds=1, by=BY.index("first")),
    HeadRule(5, 0, page=2, chunk=8, top=7, bounds=0, by=BY.index("previous")),
    HeadRule(10, 9, page=8, chunk=4, top=2, bounds=0, by=BY.index("first")),
    HeadRule(1, 0, page=16, chunk=16, top=2, bounds=1, by=BY.index("chunk")),
    HeadRule(3, 1, page=1, chunk=1, top=5, bounds=0, by=BY.index("own"), channels=2),
    HeadRule(6, 3, page=3, chunk=4, top=4, bounds=1, by=BY.index("previous"), channels=5),
]


def choices(q, k, rules, offset, earlier, start, stop):
    """Of one batch element, [H][chunk]: the set of chosen pages, by the sentence of the definition."""
    k = k.repeat_interleave(len(q) // len(k), 0).double()[:, start:stop]
    lowest, last = max(0, offset + earlier - start), q.shape[1] - 1 + offset - start
    for h, rule in enumerate(rules):
        for chunk in range(lowest // rule.chunk, last // rule.chunk + 1) if rule.page else ():
            first = chunk * rule.chunk
            own, before = range(first, first + rule.chunk), range(first - rule.chunk, first)
            reads = {"own": own, "first": own[:1], "previous": before, "chunk": own}[BY[rule.by]]
            real = [
                p for p in reads if p < stop - start
            ] or reads  # what padding alone chooses, nobody sees
            rows = [p - offset + start for p in real if 0 <= p - offset + start < q.shape[1]]
            by = q[h, rows].double().mean(0)
            if rule.channels:
                largest = sorted(range(len(by)), key=lambda e, by=by: -abs(float(by[e])))[
                    : rule.channels
                ]
                by = torch.tensor(
                    [float(x) * (e in largest) for e, x in enumerate(by)], dtype=by.dtype
                )
            scored = []
            for page in range(len(k[h]) // rule.page):
                of = k[h, page * rule.page : (page + 1) * rule.page]
                low, high, mean = of.amin(0), of.amax(0), of.mean(0)
                score = torch.maximum(by * low, by * high).sum() if rule.bounds else by @ mean
                end = (page + 1) * rule.page
                if (
                    end > rule.sinks
                    and end <= max(0, first - rule.near + 1) // rule.page * rule.page
                ):
                    scored.append((-float(score), page))
            yield h, chunk - lowest // rule.chunk, {page for _, page in sorted(scored)[: rule.top]}


@pytest.mark.parametrize("name", SHAPES)
def test_choice_is_that_of_the_definition(name):
    queries, keys, offset, d, _, spans = SHAPES[name]
    earlier = min(offset, 31)
    q = torch.randint(
        -2, 3, (2, 8, queries + earlier, d)
    ).float()  # sums are exact, and many scores equal
    k = torch.randint(-2, 3, (2, 2, keys, d)).float()
    k[:, :, 20:40] = k[:, :, :20]
    spans = spans or ([0] * 2, [keys] * 2)
    given = chosen_pages(q, k, CHOOSING, spans=spans, offset=offset - earlier, earlier=earlier)
    given = given.of_heads()
    for b, span in enumerate(zip(*spans, strict=True)):
        for h, chunk, pages in choices(q[b], k[b], CHOOSING, offset - earlier, earlier, *span):
            assert {p for p in given[h][b, chunk].tolist() if p >= 0} == pages, (h, chunk)


#: Scores that make it hard to find the largest.
SCORES = {
    "normal": lambda n: torch.randn(n),
    "whole": lambda n: torch.randint(-3, 4, (n,)).float(),
    "of all sizes": lambda n: torch.randn(n).sinh() * torch.randn(n).exp() ** 5,
    "nearly all zero": lambda n: torch.where(torch.rand(n) < 0.01, torch.randn(n), 0.0),
    "tiny": lambda n: torch.randn(n) * 1e-37,
    "close together": lambda n: 1e4 + torch.rand(n) / 100,
    "rising": lambda n: torch.arange(n).float(),
    "infinite": lambda n: torch.where(torch.rand(n) < 0.2, -torch.inf, torch.randn(n)),
    "one apart": lambda n: torch.cat([torch.full((n - 1,), -3.0), torch.tensor([3e38])]),
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, 0.0, -0.0),
    "equal but for a few": lambda n: torch.where(torch.rand(n) < 3 / n, torch.randn(n), 2.0),
    "no numbers": lambda n: torch.where(
        torch.rand(n) < 0.3, torch.nan, torch.randint(-2, 3, (n,)).float()
    ),
}


@pytest.mark.parametrize("kind", SCORES)
def test_the_largest_scores_are_found_and_of_equal_ones_the_first(kind):
    """NaN counts as the largest."""
    for n in (2, 17, 31, 32, 33, 40, 300, 1025, 5000):
        score = SCORES[kind](n)
        order = sorted(
            range(n), key=lambda i: (not score[i].isnan(), -float(score[i].nan_to_num()), i)
        )
        key = torch.cat([score, torch.zeros(1)])[
            None, None, :, None
        ]  # the last one is the query's own
        for top in {1, 2, n // 50 + 1, n // 8 + 1, n // 2, n - 1, n, n + 1}:
            chosen = chosen_pages(
                torch.ones(1, 1, 1, 1), key, [HeadRule(1, page=1, top=top)], offset=n
            ).rows.flatten()
            found = [place for place in chosen.tolist() if place >= 0]
            assert len(found) == min(top, n) and set(found) == set(order[:top]), (n, top)


@pytest.mark.parametrize("alike", [False, True], ids=["", "alike"])
@pytest.mark.parametrize("round_numbers", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_forward_is_the_definition(name, round_numbers, alike):
    q, k, v, rules, chosen, offset, spans = inputs(name, round_numbers=round_numbers, alike=alike)
    out = selected_attention(q, k, v, rules, chosen, spans=spans, offset=offset)
    expected = defined(q, k, v, rules, chosen, offset, spans)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("round_numbers", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradient_is_that_of_the_definition(name, round_numbers):
    *tensors, rules, chosen, offset, spans = inputs(name, round_numbers=round_numbers)
    q, k, v = (t.requires_grad_() for t in tensors)
    out = selected_attention(q, k, v, rules, chosen, spans=spans, offset=offset)
    grad = torch.randn(out.shape)
    got = torch.autograd.grad(out, (q, k, v), grad)
    expected = torch.autograd.grad(
        defined(q, k, v, rules, chosen, offset, spans), (q, k, v), grad.double()
    )
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


def any_rule(pick):
    """A window, or pages of any size with chunks of any size, many of which no tile of the kernel fits."""
    few = lambda most: pick.choice((pick.randint(1, 4), 16, pick.randint(1, most)))
    pages = (pick.randint(1, 40), few(40), pick.randint(1, 10)) if pick.random() < 0.8 else ()
    return HeadRule(few(50), pick.choice((0, pick.randint(0, 40))), *pages)


@given(pick=st.randoms(use_true_random=True))
def test_any_rules_at_any_place(pick):
    """Forward and gradient are the definition's, one query alone is what it is among others, and so on two threads."""
    rules, alike = [any_rule(pick), any_rule(pick)], pick.random() < 0.5
    d, dv = (pick.choice((64, 16, 31)) for _ in "kv")
    queries, keys = pick.randint(1, 70), pick.randint(1, 140)
    offset, start = pick.randint(0, keys), pick.choice((0, pick.randint(0, keys)))
    spans = [0, start], [keys, pick.choice((keys, pick.randint(start, keys)))]
    q, k, v = torch.randn(2, 2, queries, d), torch.randn(2, 1, keys, d), torch.randn(2, 1, keys, dv)
    chosen = some_pages(rules, queries, keys, offset, spans, alike)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = selected_attention(q, k, v, rules, chosen, spans=spans, offset=offset)
    expected = defined(q, k, v, rules, chosen, offset, spans)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    grad = torch.randn(out.shape)
    found = (
        torch.autograd.grad(out, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad.double()),
    )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    row = pick.randrange(queries)
    alone = some_pages(rules, 1, keys, offset + row, spans)
    alone.rows.fill_(-1)
    of_all, of_one = (lists.of_heads() for lists in (chosen, alone))
    for rule, pages, to in zip(rules, of_all, of_one, strict=True):
        for b, start in enumerate(spans[0]):
            if rule.page and (place := row + offset - start) >= 0:
                to[b, 0] = pages[b, place // rule.chunk - max(0, offset - start) // rule.chunk]
    with torch.no_grad():
        one = selected_attention(
            q[:, :, row : row + 1], k, v, rules, alone, spans=spans, offset=offset + row
        )
        torch.set_num_threads(2)
        threaded = selected_attention(q, k, v, rules, chosen, spans=spans, offset=offset)
        torch.set_num_threads(1)
    torch.testing.assert_close(one[:, :, 0], out[:, :, row], rtol=1e-5, atol=1e-5)
    assert torch.equal(threaded, out)


@pytest.mark.parametrize("clipped", ["sinks", "padding"])
def test_a_few_last_queries_whose_pages_are_cut(clipped):
    """Twenty queries: of the last four one chose another page, which the other three do not see, or see of it less."""
    rule, stop = (
        HeadRule(1, 4 if clipped == "sinks" else 0, page=16, chunk=1, top=2),
        116 - 9 * (clipped == "padding"),
    )
    q, k, v = (torch.randn(1, 1, n, 64) for n in (20, 116, 116))
    last = (
        [[0, 2]] * 19 + [[0, -1]]
        if clipped == "sinks"
        else [[0, 5]] * 17 + [[0, 2], [5, 2], [2, -1]]
    )
    chosen = some_pages([rule], 20, 116, 96, ([0], [stop]))
    chosen.rows.fill_(-1)
    chosen.rows[:, :40] = torch.tensor(last).flatten()
    out = selected_attention(q, k, v, [rule], chosen, spans=([0], [stop]), offset=96)
    expected = defined(q, k, v, [rule], chosen, 96, ([0], [stop]))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradient_on_threads_that_share_heads():
    q, k, v = (torch.randn(1, heads, 700, 16).requires_grad_() for heads in (3, 1, 1))
    rules = [HeadRule(EXACT), HeadRule(30, 2), HeadRule(5, 1, page=16, chunk=16, top=3)]
    chosen = some_pages(rules, 700, 700, 0, ([0], [700]))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = selected_attention(q, k, v, rules, chosen)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    torch.set_num_threads(1)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["square", "padded"])
def test_bfloat16(name):
    q, k, v, *rest = inputs(name)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out = selected_attention(q, k, v, *rest[:2], offset=rest[2], spans=rest[3])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), defined(q, k, v, *rest), rtol=1e-2, atol=1e-2)


def test_memory_laid_out_as_models_have_it():
    q, k, v, rules, chosen, offset, spans = inputs("square")
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    out = selected_attention(*turned, rules, chosen, spans=spans, offset=offset)
    assert torch.equal(out, selected_attention(q, k, v, rules, chosen, spans=spans, offset=offset))


def test_threads_do_not_change_a_number():
    call = inputs("square")
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(selected_attention(*call[:5], offset=call[5], spans=call[6]))
    torch.set_num_threads(1)
    assert torch.equal(*found)


def test_what_is_no_number_stays_seen():
    q, k, v, rules, chosen, offset, spans = inputs("square")
    q[0, :, 50] = float("nan")
    out = selected_attention(q, k, v, rules, chosen, spans=spans, offset=offset)
    assert (
        out[0, :, 50].isnan().all()
        and not out[0, :, :50].isnan().any()
        and not out[1].isnan().any()
    )


def test_as_many_rules_as_heads():
    q, k, v, *_ = inputs("square")
    with pytest.raises(ValueError, match="9 rules for 10 heads"):
        selected_attention(q, k, v, RULES[:9])


def test_what_does_not_fit_is_refused():
    q, k, v, rules, chosen, offset, spans = inputs("square")
    for rows in (chosen.rows[:, :3], chosen.rows[:1], chosen.rows.long()):
        wrong = Lists(rows, chosen.shapes)
        with pytest.raises(ValueError, match="where these queries and rules have int32"):
            selected_attention(q, k, v, rules, wrong)
        with pytest.raises(ValueError, match="where these queries and rules have int32"):
            chosen_pages(q, k, rules, kept=wrong)
    with pytest.raises(ValueError, match="a head's choice is said to be kept"):
        chosen_pages(q, k, [rule._replace(by=KEPT) for rule in rules])
    with pytest.raises(ValueError, match="<= 100 keys"):
        selected_attention(q, k, v, rules, chosen, spans=([0, 0], [100, 101]))


def test_what_only_the_kernel_for_gpus_has_is_refused():
    q, k, v, rules, chosen, offset, spans = inputs("later")
    given = {"spans": spans, "offset": offset}
    with pytest.raises(ValueError, match="summaries with rows listed by every rule, on a GPU"):
        selected_attention(q, k, v, rules, chosen, **given, summaries=3)
    bias = torch.zeros(len(q), len(rules), k.shape[2], requires_grad=True)
    with pytest.raises(ValueError, match="a bias that needs a gradient on a CPU"):
        selected_attention(q, k, v, rules, chosen, **given, bias=bias)


def test_the_operator_is_registered_as_one():
    q, k, v, rules, chosen, offset, spans = inputs("later")
    flat = [n for rule in rules for n in rule]
    bias = torch.randn(len(q), len(rules), k.shape[2])
    arguments = (
        q,
        k,
        v,
        chosen.rows,
        flat,
        [*spans[0], *spans[1]],
        offset,
        0.1,
        2.0,
        30,
        0,
        torch.randn(len(rules)),
        bias,
    )
    torch.library.opcheck(kernel.operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", [level for level in ("v2", "v3", "v4") if level in native.read_levels()]
)
def test_other_instruction_sets(level):
    names = (
        "-k",
        "definition or bfloat16 or gradient or choice or any_rules",
        "-m",
        "not slow",
        "-q",
    )
    names += "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", __file__, *names]
    done = subprocess.run(
        command, env={**os.environ, "HF_HYPERATTN_NATIVE": level}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


EXTRAS = {
    "softcap": {"softcap": 1.5},
    "window": {"window": 25},
    "small window": {"window": 3},
    "sinks": {"sinks": True},
    "bias": {"bias": True},
    "all": {"softcap": 4.0, "window": 40, "sinks": True, "bias": True},
}


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("name", SHAPES)
def test_softcap_window_sinks_and_bias(name, extras):
    torch.manual_seed(8)
    q, k, v, rules, chosen, offset, spans = inputs(name)
    extras = dict(extras)
    leaves = [q, k, v]
    if "sinks" in extras:
        extras["sinks"] = torch.randn(len(rules))
        leaves.append(extras["sinks"])
    if "bias" in extras:
        extras["bias"] = 2 * torch.randn(len(q), len(rules), k.shape[2])
    for leaf in leaves:
        leaf.requires_grad_()
    out = selected_attention(q, k, v, rules, chosen, spans=spans, offset=offset, **extras)
    want = defined(q, k, v, rules, chosen, offset, spans, **extras)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), leaves)
    wanted = torch.autograd.grad((want * weights).sum(), leaves)
    for got, of in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, of, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [5, 30, 64])
def test_pages_beyond_the_window_are_no_candidates(window):
    torch.manual_seed(9)
    q, k = torch.randn(1, len(CHOOSING), 90, 16), torch.randn(1, 2, 90, 16)
    lists = chosen_pages(q, k, CHOOSING, window=window).of_heads()
    for rule, pages in zip(CHOOSING, lists, strict=True):
        for chunk, of in enumerate(pages[0].tolist()):
            chosen = [page for page in of if page >= 0]
            end = (chunk + 1) * rule.chunk
            assert all(page * rule.page >= end - window for page in chosen)
            opening = max(0, chunk * rule.chunk - rule.near + 1) // (rule.page or 1)
            least = max(
                rule.sinks // (rule.page or 1), -(-max(0, end - window) // (rule.page or 1))
            )
            if rule.page and chunk * rule.chunk < 90:
                assert len(chosen) == min(rule.top, max(0, opening - least))


def test_second_derivatives_of_sinks_are_refused():
    q, k, v = (torch.randn(1, 2, 12, 16) for _ in range(3))
    sinks = torch.randn(2, requires_grad=True)
    out = selected_attention(q, k, v, [HeadRule(8, 2)] * 2, sinks=sinks)
    (g,) = torch.autograd.grad(out.square().sum(), sinks, create_graph=True)
    with pytest.raises(Exception, match="backend='cpu'"):
        torch.autograd.grad(g.sum(), sinks)
