"""Eleven tasks of RULER (arXiv 2404.06654), made from word lists and one long text.

Read `TASKS` for the tasks and `make_sample` for how a sample is fitted to a length. The tasks, their
settings and the score follow the paper and its configuration. The wording of the prompts is ours, the
words are those of `hf_hyperattn.inject.retrieval` and of the text, so scores are not those that others
publish. The two question-answering tasks are left out, because their data need a download.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_hyperattn.inject.retrieval import ADJECTIVES, HOPS, NEEDLES, NOUNS, draw_number

#: A haystack without content, repeated. RULER has five short sentences too.
NOISE = (
    "The lake is calm.",
    "The snow is white.",
    "The road is long.",
    "On we walk.",
    "Up the hill and down.",
)
#: Equal steps from the start of the haystack to its end; a needle stands at one of them.
DEPTHS = 40
#: Words to find in the list of common words, and how often they and all others stand there. RULER has
#: other settings below 4,096 tokens, which are not here.
COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
#: Different words, and how often the common ones and the others stand, in the worked example.
EXAMPLE_WORDS, EXAMPLE_TIMES, EXAMPLE_OTHER_TIMES = 40, 10, 3
#: The frequency of a coded word is its rank to this power.
ALPHA = 2.0
#: Coded words that are asked for. The most frequent "word" is dots, which is not asked for.
FREQUENT = 3


@dataclass(frozen=True)
class Sample:
    """A prompt and the answers that a generated text must contain.

    Args:
        task: Name in `TASKS`.
        prompt: Text up to the point where the answer begins.
        answers: Texts that the answer must contain.
        tokens: Number of tokens to generate.
    """

    task: str
    prompt: str
    answers: tuple[str, ...]
    tokens: int


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        make: Maps the size of the haystack, a random source and the text to prompt and answers.
        tokens: Number of tokens to generate.
    """

    make: Callable[[int, random.Random, str], tuple[str, Sequence[str]]]
    tokens: int


def draw_word_key(draw: random.Random) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"


def draw_long_number(draw: random.Random) -> str:
    """Draw a number of seven digits."""
    return str(draw.randrange(1_000_000, 10_000_000))


def draw_uuid(draw: random.Random) -> str:
    """Draw a UUID."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def draw_different(draw: random.Random, make: Callable[[random.Random], str], count: int) -> list:
    """Draw texts until there are `count` different ones."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(draw)] = None
    return list(found)


def needle_of(key: str, value: str, kind: str) -> str:
    """Return the sentence that names a value."""
    return f"The special magic {kind} for {key} is: {value}."


def make_needles(
    haystack: str,
    *,
    keys: int = 1,
    values: int = 1,
    asked: int = 1,
    draw_key: Callable[[random.Random], str] = draw_word_key,
    draw_value: Callable[[random.Random], str] = draw_long_number,
    kind: str = "number",
) -> Callable[[int, random.Random, str], tuple[str, Sequence[str]]]:
    """Return the function that makes prompts of needles in a haystack.

    Args:
        haystack: "noise", "essay" or "needles".
        keys: Number of keys that are hidden.
        values: Number of values of every key.
        asked: Number of keys that are asked for.
        draw_key: Draws a key.
        draw_value: Draws a value.
        kind: Name of a value in the prompt.
    """

    def make(size: int, draw: random.Random, text: str) -> tuple[str, Sequence[str]]:
        others = size if haystack == "needles" else 0
        names = draw_different(draw, draw_key, keys + others)
        hidden = {name: [draw_value(draw) for _ in range(values)] for name in names[:keys]}
        needles = [needle_of(n, v, kind) for n, found in hidden.items() for v in found]
        draw.shuffle(needles)
        if haystack == "needles":
            sentences = [needle_of(name, draw_value(draw), kind) for name in names[keys:]]
        else:
            sentences = split_haystack(haystack, size, text)
        context = insert_sentences(sentences, needles, draw)
        chosen = names[:asked]
        names_asked = chosen[0] if asked == 1 else f"{', '.join(chosen[:-1])} and {chosen[-1]}"
        answers = [value for name in chosen for value in hidden[name]]
        several = len(answers) > 1
        prompt = (
            f"The text below hides special magic {kind}s. Remember them; a question about them follows.\n"
            f"{context}\n"
            f"Question: {'which are all the' if several else 'what is the'} special magic "
            f"{kind}{'s' if several else ''} for {names_asked} in the text? "
            f"Answer: the special magic {kind}{'s' if several else ''} for {names_asked} "
            f"{'are' if several else 'is'}"
        )
        return prompt, answers

    return make


def split_haystack(haystack: str, size: int, text: str) -> list[str]:
    """Return `size` sentences of noise or of the text."""
    if haystack == "noise":
        return [NOISE[i % len(NOISE)] for i in range(size)]
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    # A text that is too short begins again.
    return [sentences[i % len(sentences)] for i in range(size)]


def insert_sentences(sentences: Sequence[str], needles: Sequence[str], draw: random.Random) -> str:
    """Return the sentences as a text with needles at different depths of 40 equal steps."""
    depths = sorted(draw.sample(range(DEPTHS), len(needles)))
    pieces: list[str] = []
    done = 0
    for depth, needle in zip(depths, needles):
        place = round(depth / (DEPTHS - 1) * len(sentences))
        pieces += [*sentences[done:place], needle]
        done = place
    return " ".join([*pieces, *sentences[done:]])


def make_variables(size: int, draw: random.Random, text: str) -> tuple[str, Sequence[str]]:
    """Make variable tracking: one value that is passed on in noise, after a worked example."""
    example, answers = track_variables(10, draw)
    prompt, wanted = track_variables(size, draw)
    return f"{example} {', '.join(answers)}\n\n{prompt}", wanted


def track_variables(size: int, draw: random.Random) -> tuple[str, Sequence[str]]:
    """Return a prompt of `size` sentences of noise, and the variables of its chain."""
    letters = [chr(65 + i) for i in range(26)]
    chain = draw_different(draw, lambda d: "".join(d.choices(letters, k=5)), HOPS + 1)
    value = draw_number(draw)
    lines = [f"VAR {chain[0]} = {value}."]
    lines += [f"VAR {b} = VAR {a}." for a, b in zip(chain, chain[1:])]
    context = insert_sentences(split_haystack("noise", size, ""), lines, draw)
    prompt = (
        "Follow the assignments of variables in the text below.\n"
        f"{context}\n"
        f"Question: which {HOPS + 1} variables have the value {value}? "
        f"Answer: the variables with the value {value} are"
    )
    return prompt, chain


def make_common(size: int, draw: random.Random, text: str) -> tuple[str, Sequence[str]]:
    """Make common words: ten words stand in a list more often, after a worked example.

    Args:
        size: Number of different words.
        draw: A random source.
        text: Where the words come from.
    """
    words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", text)))
    drawn = draw.sample(words, min(len(words), EXAMPLE_WORDS + max(size, COMMON + 1)))
    example, others = drawn[:EXAMPLE_WORDS], drawn[EXAMPLE_WORDS:]
    shown, answers = list_words(example, EXAMPLE_TIMES, EXAMPLE_OTHER_TIMES, draw)
    asked, wanted = list_words(others, COMMON_TIMES, OTHER_TIMES, draw)
    said = ", ".join(answers)
    return f"{shown} {said}\n\n{asked}", wanted


def list_words(
    words: Sequence[str], common_times: int, other_times: int, draw: random.Random
) -> tuple[str, Sequence[str]]:
    """Return a prompt with a numbered list, and its ten most common words."""
    common = list(words[:COMMON])
    entries = common * common_times + list(words[COMMON:]) * other_times
    draw.shuffle(entries)
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))
    prompt = (
        f"Some words stand more often than others in the numbered list below.\n{numbered}\n"
        f"Question: which {COMMON} words are the most common in the list? "
        f"Answer: the {COMMON} most common words are"
    )
    return prompt, common


def make_frequent(size: int, draw: random.Random, text: str) -> tuple[str, Sequence[str]]:
    """Make frequent words: coded words whose frequency falls with their rank.

    Args:
        size: Number of words of the text.
        draw: A random source.
        text: Not used.
    """
    letters = [chr(97 + i) for i in range(26)]
    count = max(FREQUENT + 2, size // 20)
    codes = draw_different(draw, lambda d: "".join(d.choices(letters, k=6)), count - 1)
    ranked = ["...", *codes]
    weights = [rank**-ALPHA for rank in range(1, count + 1)]
    total = sum(weights)
    words = [
        word
        for word, weight in zip(ranked, weights)
        for _ in range(max(1, round(size * weight / total)))
    ]
    draw.shuffle(words)
    prompt = (
        "Some coded words stand often in the text below. Dots are not a coded word.\n"
        f"{' '.join(words)}\n"
        f"Question: which {FREQUENT} coded words are the most frequent? "
        f"Answer: the {FREQUENT} most frequent coded words are"
    )
    return prompt, codes[:FREQUENT]


#: The tasks by RULER's names, in the order they are measured: those that say most about small models first.
TASKS: dict[str, Task] = {
    "niah_single_1": Task(make_needles("noise"), 128),
    "niah_multikey_2": Task(make_needles("needles"), 128),
    "vt": Task(make_variables, 30),
    "niah_single_2": Task(make_needles("essay"), 128),
    "niah_multikey_1": Task(make_needles("essay", keys=NEEDLES), 128),
    "niah_multivalue": Task(make_needles("essay", values=NEEDLES), 128),
    "niah_multiquery": Task(make_needles("essay", keys=NEEDLES, asked=NEEDLES), 128),
    "fwe": Task(make_frequent, 50),
    "cwe": Task(make_common, 120),
    "niah_single_3": Task(make_needles("essay", draw_value=draw_uuid, kind="uuid"), 128),
    "niah_multikey_3": Task(
        make_needles("needles", draw_key=draw_uuid, draw_value=draw_uuid, kind="uuid"), 128
    ),
}


def make_sample(
    task: str, length: int, count_tokens: Callable[[str], int], text: str, seed: str
) -> Sample:
    """Make the largest sample of a task that fits, together with its answer, into a length.

    Args:
        task: Name in `TASKS`.
        length: Number of tokens of prompt and generated answer.
        count_tokens: Maps a text to its number of tokens.
        text: A long text, for haystacks and words.
        seed: Seed of all that is drawn.

    Raises:
        ValueError: The length is too short for the task.
    """
    made = TASKS[task]

    def try_size(size: int) -> tuple[str, Sequence[str]]:
        return made.make(size, random.Random(f"{seed} {task}"), text)

    fits = lambda size: count_tokens(try_size(size)[0]) + made.tokens <= length
    low, high = 1, 2
    if not fits(low):
        raise ValueError(f"{task}: {length} tokens hold no sample; allowed: more tokens")
    # The size that fits is found by halving, as in RULER. Prompts of one more sentence may be
    # shorter by a token or two, which does not matter.
    while fits(high) and high < length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    prompt, answers = try_size(low)
    return Sample(task=task, prompt=prompt, answers=tuple(answers), tokens=made.tokens)


def score_text(generated: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that a text contains, without regard to case."""
    text = generated.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)
