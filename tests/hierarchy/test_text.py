"""Outlines of texts against brute force: character by character, line by line, with Python's own parser."""

import ast
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.hierarchy.outlines import OUTLINES
from tests.oracles import trees as oracle

few = settings(max_examples=60, deadline=None)
PIECES = [
    "a",
    "bc",
    "Den",
    "7",
    " ",
    "  ",
    "\n",
    "\n\n",
    ". ",
    "! ",
    "? ",
    ".",
    ",",
    '"',
    " (",
    "\t\n",
    "é",
    "。",
    "語",
]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=25).map("".join)


def cut(text, seed):
    """Tokens at random places, as offsets."""
    generator = random.Random(seed)
    places = sorted(
        {0, len(text), *(generator.randrange(len(text)) for _ in range(len(text) // 2))}
    )
    return list(zip(places, places[1:], strict=False))


def of(hierarchy, row=0):
    return oracle.nested(hierarchy.tree(row).parents.tolist())


def character(text, token):
    """The first character of a token that is no space, else its first."""
    inside = [i for i in range(*token) if not text[i].isspace()]
    return inside[0] if inside else token[0]


def paragraph_of(text, place):
    """How many blank lines end at or before a place."""
    count = 0
    for begin in range(place):
        if text[begin] != "\n":
            continue
        end = begin + 1
        while end < len(text) and text[end].isspace():
            end += 1
        blank = "\n" in text[begin + 1 : end]
        started_before = (
            begin > 0
            and text[:begin].rstrip() != text[:begin]
            and "\n" in text[len(text[:begin].rstrip()) : begin]
        )
        count += blank and not started_before and end <= place
    return count


def word_of(text, place):
    """How many words begin at or before a place; Chinese and Japanese characters are words of their own."""
    cjk = lambda c: "\u3040" <= c <= "\u30ff" or "\u3400" <= c <= "\u9fff"
    begins = 0
    for i in range(place + 1):
        solid = not text[i].isspace()
        fresh = i == 0 or text[i - 1].isspace() or cjk(text[i]) or cjk(text[i - 1])
        begins += solid and fresh
    return max(begins, 1)


@few
@given(texts, st.integers(0, 99))
def test_paragraphs_and_words_by_brute_force(text, seed):
    offsets = cut(text, seed)
    rows = [
        [paragraph_of(text, c), word_of(text, c)] for c in (character(text, o) for o in offsets)
    ]
    found = Hierarchy.from_text(text, offsets, ("paragraph", "word"))
    assert of(found) == oracle.by_ids(rows)


@few
@given(texts, st.integers(0, 99))
def test_levels_nest_and_cover(text, seed):
    """Every part is a run of neighbouring tokens, whatever the levels."""
    offsets = cut(text, seed)
    tree = Hierarchy.from_text(text, offsets, tuple(OUTLINES)).tree()
    low = tree.first_leaf
    high = torch.zeros_like(low)
    for leaf in range(tree.leaves):
        node = leaf
        while node >= 0:
            high[node] = max(int(high[node]), leaf + 1)
            node = int(tree.parents[node])
    assert tree.leaves == len(offsets) and torch.equal(high - low, tree.sizes)


SENTENCES = [
    ("He went. She came.", ["He went. ", "She came."]),
    ('Is it? Yes! "Good." So', ["Is it? ", "Yes! ", '"Good." ', "So"]),
    (
        "Dr. Smith met Mr. Jones, e.g. in Fig. 3. OK.",
        ["Dr. Smith met Mr. Jones, e.g. in Fig. 3. ", "OK."],
    ),
    ("It is 3.5 m. and more. 4 left.", ["It is 3.5 m. and more. ", "4 left."]),
    ("no capitals here. none at all! right", ["no capitals here. ", "none at all! ", "right"]),
    ("他来了。她走了!真的?", ["他来了。", "她走了!真的?"]),
    ("A… B", ["A… ", "B"]),
]


@pytest.mark.parametrize("text, parts", SENTENCES)
def test_sentences(text, parts):
    (starts,) = OUTLINES["sentence"](text)
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] == parts


MARKDOWN = """Preface.

# One
text

## One.A
more
```python
# no heading
```
### Deep
x
## One.B
y

Two
===
end
"""


def test_markdown_sections():
    levels = OUTLINES["markdown"](MARKDOWN)
    heads = [[MARKDOWN[s:].split("\n")[0] for s in starts] for starts in levels]
    assert heads == [
        ["Preface.", "# One", "Two"],
        ["Preface.", "# One", "## One.A", "## One.B", "Two"],
        ["Preface.", "# One", "## One.A", "### Deep", "## One.B", "Two"],
    ]


C = """int f(int a) {
    if (a) {
        g();
    } else {
        h();
    }
    return a;
}
int x;
"""


def test_code_blocks_by_indentation():
    lines = [m.span() for m in re.finditer(r".*\n", C)]
    found = Hierarchy.from_text(C, lines, "code")
    assert of(found) == [[0, [1, [2, 3], [4, 5]], [6, 7]], 8]


def definitions(source):
    """(first line, last line) of every class and function, decorators included, by Python's own parser."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds):
            yield min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno


@pytest.mark.parametrize("module", ["argparse", "dataclasses", "textwrap", "functools"])
def test_python_definitions_equal_the_parser(module):
    source = __import__(module).__loader__.get_source(module)
    lines = [m.span() for m in re.finditer(r".*\n", source)]
    tree = Hierarchy.from_text(source, lines, "python").tree()
    groups = {}
    for line in range(tree.leaves):
        node = line
        while node >= 0:
            groups.setdefault(node, []).append(line + 1)
            node = int(tree.parents[node])
    spans = {(min(g), max(g)) for g in groups.values()}
    solid = [n + 1 for n, (a, b) in enumerate(lines) if source[a:b].strip()]
    found = 0
    for begin, end in definitions(source):
        later = [n for n in solid if n > end]
        ends = range(
            end, (later[0] if later else len(lines) + 1)
        )  # blank lines after it belong to it
        code = [
            n
            for n in range(end + 1, len(lines) + 1)
            if source[slice(*lines[n - 1])].strip().startswith("#")
        ]
        ends = {*ends, *code, *(n for c in code for n in range(c, len(lines) + 1))}  # and comments
        found += any((begin, e) in spans for e in ends)
    everything = list(definitions(source))
    assert found >= 0.97 * len(everything) and len(everything) >= 5


def test_special_tokens_are_children_of_the_root():
    text = "One two. Three four."
    words = [m.span() for m in re.finditer(r"\S+", text)]
    found = Hierarchy.from_text(text, [(0, 0), *words, (0, 0)], ("sentence",))
    assert of(found) == [0, [1, 2], [3, 4], 5]
    tree = found.tree()
    assert [tree.kind_names[k] for k in tree.kinds[tree.leaves :].tolist()] == [
        "sentence",
        "sentence",
        "text",
    ]


def test_rows_of_different_texts_with_padding():
    texts = ["One two. Three.", "Four."]
    rows = [[m.span() for m in re.finditer(r"\S+", t)] for t in texts]
    offsets = [[(0, 0), *rows[0]], [(0, 0), (0, 0), (0, 0), *rows[1]]]
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    found = Hierarchy.from_text(texts, offsets, ("sentence", "word"), mask)
    assert of(found, 0) == [0, [1, 2], 3] and of(found, 1) == [0, 1]
    assert found.tokens_of(1).tolist() == [2, 3]


def test_pairs_of_texts():
    pair = ("One two. Three.", "Four five.")
    rows = [[m.span() for m in re.finditer(r"\S+", t)] for t in pair]
    offsets = [(0, 0), *rows[0], (0, 0), *rows[1], (0, 0)]
    numbers = [None, 0, 0, 0, None, 1, 1, None]
    found = Hierarchy.from_text([pair], [offsets], ("sentence",), sequence_ids=[numbers])
    assert of(found) == [0, [[1, 2], 3], 4, [5, 6], 7]
    tree = found.tree()
    assert tree.kind_names[int(tree.kinds[-1])] == "pair"


def test_a_level_of_ones_own():
    def clause(text):
        return [[0, *(m.end() for m in re.finditer(", ", text))]]

    text = "a b, c d, e"
    offsets = [m.span() for m in re.finditer(r"\S+", text)]
    found = Hierarchy.from_text(text, offsets, (clause,))
    assert of(found) == [[0, 1], [2, 3], 4]
    assert found.kind_names[-1] == "clause"


WRONG = {
    "level": (dict(levels=("chapter",)), "level 'chapter' is unknown"),
    "beyond": (dict(offsets=[(0, 1), (1, 9)]), "token 1 ends at character 9 of a text of 3"),
    "rows": (dict(text=["a b", "c"]), "for 2 texts"),
    "shape": (dict(offsets=[0, 1]), "allowed: .batch, length, 2."),
    "pair": (dict(text=[("a", "b")], offsets=[[(0, 1), (0, 1)]]), "sequence_ids"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as error:
        Hierarchy.from_text(**dict(text="a b", offsets=[(0, 1), (2, 3)]) | changes)
    assert "\n" not in str(error.value)
