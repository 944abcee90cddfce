"""Where the parts of a text begin: paragraphs, sentences, words, Markdown sections, blocks of source code.

Every function takes a text and gives, for one or several levels from coarse to fine, the places (ascending numbers of
characters, 0 first) at which a new part of that level begins. A part of a fine level also ends where a part of a
coarser one does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

#: The places of one level.
Starts = list[int]

BLANK = re.compile(r"\n[^\S\n]*\n\s*")
SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d]*\s*"
)
ABBREVIATION = re.compile(
    r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|cf|al|Fig|Eq|Sec|No|Vol|pp|e\.g|i\.e|U\.S|approx|resp)\.$"
)
WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)
HEADING = re.compile(r" {0,3}(#{1,6})(?:\s|$)")
UNDERLINE = re.compile(r" {0,3}(=+|-+)\s*$")
FENCE = re.compile(r" {0,3}(```+|~~~+)")
DEFINITION = re.compile(r"(?:async\s+)?(?:def|class)\s")
#: Lines that go on with the block above them.
CLOSING = re.compile(r"[)\]}]|(?:else|elif|except|finally|catch|end|fi|done|esac|then)\b")


def find_paragraphs(text: str) -> list[Starts]:
    """Parts between blank lines."""
    return [sort_starts(match.end() for match in BLANK.finditer(text))]


def find_lines(text: str) -> list[Starts]:
    """Lines."""
    return [sort_starts(match.end() for match in re.finditer("\n", text))]


def find_sentences(text: str) -> list[Starts]:
    """Parts that end in a full stop, a question or an exclamation mark, before anything but a small letter.

    In a text without capitals small letters count too. Common English abbreviations and single letters do not end a
    sentence. Chinese and Japanese stops need no space.
    """
    ends, small = [], text == text.lower()
    for match in SENTENCE_END.finditer(text):
        after = text[match.end() : match.end() + 1]
        stop = match.group().rstrip()
        if stop == "." and ABBREVIATION.search(text[max(0, match.start() - 8) : match.start() + 1]):
            continue
        if after and (small or not after.islower()):
            ends.append(match.end())
    return [sort_starts(ends)]


def find_words(text: str) -> list[Starts]:
    """Runs of characters without space, and the space behind them; single characters in Chinese and Japanese."""
    return [sort_starts([match.start() for match in WORD.finditer(text)][1:])]


def find_markdown_sections(text: str) -> list[Starts]:
    """Sections under headings, one level for each depth of heading that occurs."""
    marks, fence, before = [], None, ""
    for place, line in number_lines(text):
        mark = FENCE.match(line)
        if mark and (fence is None or line.strip().startswith(fence)):
            fence = mark.group(1) if fence is None else None
        elif fence is None and (heading := HEADING.match(line)):
            marks.append((place, len(heading.group(1))))
        elif fence is None and (under := UNDERLINE.match(line)) and before.strip():
            if not marks or marks[-1][0] != place - len(before):
                marks.append((place - len(before), 1 if under.group(1)[0] == "=" else 2))
        before = line
    return split_by_depth(marks)


def find_code_blocks(text: str) -> list[Starts]:
    """Blocks by indentation, in any language: a line begins a part that goes on as long as lines are deeper.

    On the finest level parts are single lines. Lines with a closing bracket or a word such as `else` first belong to
    the block above, and a decorator to the block below.
    """
    marks: list[tuple[int, int]] = []
    open_at: list[int] = []
    decorated = False
    for place, line in number_lines(text):
        body = line.strip()
        if not body:
            continue
        indent = measure_indentation(line)
        while open_at and open_at[-1] > indent:
            open_at.pop()
        if not open_at or open_at[-1] < indent:
            open_at.append(indent)
        if not decorated and not CLOSING.match(body):
            marks.append((place, len(open_at)))
        decorated = body.startswith("@")
    return split_by_depth(marks)


def find_python_definitions(text: str) -> list[Starts]:
    """Classes and functions of Python source, with their decorators, and what stands between them."""
    marks: list[tuple[int, int]] = []
    open_at: list[int] = []
    decorated = None
    for place, line in number_lines(text):
        body = line.strip()
        if not body or CLOSING.match(body):
            continue
        indent = measure_indentation(line)
        if body.startswith("@") and decorated is None:
            decorated = place
        ended = any(indent <= other for other in open_at) and not body.startswith("#")
        if ended:
            open_at = [other for other in open_at if other < indent]
        if DEFINITION.match(body):
            marks.append((place if decorated is None else decorated, len(open_at) + 1))
            open_at.append(indent)
            decorated = None
        elif decorated is None and ended:
            marks.append((place, len(open_at) + 1))
    return split_by_depth(marks)


def split_by_depth(marks: list[tuple[int, int]]) -> list[Starts]:
    """One level for each depth of (place, depth) that occurs, with the places of that depth and of those above."""
    return [
        sort_starts(p for p, depth in marks if depth <= most)
        for most in sorted({d for _, d in marks})
    ]


def number_lines(text: str) -> Iterable[tuple[int, str]]:
    """Every line with its line end, after the place at which it begins."""
    place = 0
    for line in text.split("\n"):
        yield place, line + "\n"
        place += len(line) + 1


def measure_indentation(line: str) -> int:
    """Columns before the first character of a line; tabs go to multiples of 8."""
    line = line.rstrip().expandtabs(8)
    return len(line) - len(line.lstrip())


def sort_starts(places: Iterable[int]) -> Starts:
    """Ascending places without repetition, 0 first."""
    return sorted({0, *places})


#: The levels that have a name; their kind of family has the same.
OUTLINES: dict[str, Callable[[str], list[Starts]]] = {
    "paragraph": find_paragraphs,
    "line": find_lines,
    "sentence": find_sentences,
    "word": find_words,
    "markdown": find_markdown_sections,
    "code": find_code_blocks,
    "python": find_python_definitions,
}
