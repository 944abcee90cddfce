"""Find where the parts of a text begin.

Parts are paragraphs, sentences, words, Markdown sections or blocks of source code. This module
shows the rules of each outline, and the form in which a new one must return its parts.

Every function takes a text and returns one or several levels, coarse to fine. A level is the
ascending numbers of the characters at which its parts begin, 0 first. A part of a fine level also
ends where a part of a coarser one does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

#: First characters of the parts of one level.
Starts = list[int]

BLANK = re.compile(r"\n[^\S\n]*\n\s*")
# Stops with closing quotes and brackets; in Chinese and Japanese, no space follows.
SENTENCE_END = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d]*\s*"
)
ABBREVIATION = re.compile(
    r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|cf|al|Fig|Eq|Sec|No|Vol|pp|e\.g|i\.e|U\.S|approx|resp)\.$"
)
# A single Chinese or Japanese character, or a run of other characters.
WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)
HEADING = re.compile(r" {0,3}(#{1,6})(?:\s|$)")
UNDERLINE = re.compile(r" {0,3}(=+|-+)\s*$")
FENCE = re.compile(r" {0,3}(```+|~~~+)")
DEFINITION = re.compile(r"(?:async\s+)?(?:def|class)\s")
# Lines that continue the block above them.
CLOSING = re.compile(r"[)\]}]|(?:else|elif|except|finally|catch|end|fi|done|esac|then)\b")

# Longest abbreviation that `find_sentences` looks back for.
ABBREVIATION_LENGTH = 8


def find_paragraphs(text: str) -> list[Starts]:
    """Return parts between blank lines."""
    return [sort_starts(match.end() for match in BLANK.finditer(text))]


def find_lines(text: str) -> list[Starts]:
    """Return lines."""
    return [sort_starts(match.end() for match in re.finditer("\n", text))]


def find_sentences(text: str) -> list[Starts]:
    """Return parts that end in a full stop, a question mark or an exclamation mark.

    A sentence does not end before a small letter, except in a text without capitals. It does not
    end at common English abbreviations and single letters. Chinese and Japanese stops need no
    space.
    """
    ends, small = [], text == text.lower()
    for match in SENTENCE_END.finditer(text):
        after = text[match.end() : match.end() + 1]
        stop = match.group().rstrip()
        before = text[max(0, match.start() - ABBREVIATION_LENGTH) : match.start() + 1]
        if stop == "." and ABBREVIATION.search(before):
            continue
        if after and (small or not after.islower()):
            ends.append(match.end())
    return [sort_starts(ends)]


def find_words(text: str) -> list[Starts]:
    """Return runs of characters without space, each with the space after it.

    In Chinese and Japanese, every character is a word.
    """
    # The first word owns the space before it.
    return [sort_starts([match.start() for match in WORD.finditer(text)][1:])]


def find_markdown_sections(text: str) -> list[Starts]:
    """Return sections under headings, one level for each depth of heading."""
    marks: list[tuple[int, int]] = []
    fence: str | None = None
    before = ""
    for place, line in number_lines(text):
        mark = FENCE.match(line)
        if mark and (fence is None or line.strip().startswith(fence)):
            # A line of code that starts with # is no heading.
            fence = mark.group(1) if fence is None else None
        elif fence is None and (heading := HEADING.match(line)):
            marks.append((place, len(heading.group(1))))
        elif fence is None and (under := UNDERLINE.match(line)) and before.strip():
            # The line above is the heading, unless it is a # heading already.
            if not marks or marks[-1][0] != place - len(before):
                marks.append((place - len(before), 1 if under.group(1)[0] == "=" else 2))
        before = line
    return split_by_depth(marks)


def find_code_blocks(text: str) -> list[Starts]:
    """Return blocks by indentation, in any language.

    A line begins a part, which continues while the following lines are indented more. Parts of the
    finest level are single lines. A line that begins with a closing bracket, or with a word such as
    `else`, belongs to the block above. A decorator belongs to the block below.
    """
    marks: list[tuple[int, int]] = []
    open_at: list[int] = []
    decorated = False
    for place, line in number_lines(text):
        body = line.strip()
        if not body:
            continue
        # Close the blocks that are indented more than this line.
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
    """Return classes and functions of Python source.

    A decorator belongs to its definition. The code between definitions is a part, too.
    """
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
        # A comment may stand left of the body it belongs to, so it ends no definition.
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
    """Return one level for each depth that occurs.

    A level holds the places of its depth and of lower depths.

    Args:
        marks: (place, depth) of every part.
    """
    depths = sorted({depth for _, depth in marks})
    return [sort_starts(place for place, depth in marks if depth <= most) for most in depths]


def number_lines(text: str) -> Iterable[tuple[int, str]]:
    """Yield the place of the first character, and the text of every line.

    Lines include their line end.
    """
    place = 0
    for line in text.split("\n"):
        yield place, line + "\n"
        place += len(line) + 1


def measure_indentation(line: str) -> int:
    """Return the number of columns before the first character of a line.

    Tab stops are multiples of 8.
    """
    line = line.rstrip().expandtabs(8)
    return len(line) - len(line.lstrip())


def sort_starts(places: Iterable[int]) -> Starts:
    """Return ascending places without repetition, 0 first."""
    return sorted({0, *places})


#: Outlines by name, which is also the kind of their families.
OUTLINES: dict[str, Callable[[str], list[Starts]]] = {
    "paragraph": find_paragraphs,
    "line": find_lines,
    "sentence": find_sentences,
    "word": find_words,
    "markdown": find_markdown_sections,
    "code": find_code_blocks,
    "python": find_python_definitions,
}
