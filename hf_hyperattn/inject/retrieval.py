"""Tests of retrieval for causal models: what must be found far back in a text, made for a length in tokens.

The tasks follow RULER's definitions (2404.06654): needles in a haystack (single, several keys, several values) and
variable tracking; beside them far repetition (a text twice) and classification whose examples lie far back. The
haystack is any text, everything hidden in it is drawn from word lists by a seed. Every example is scored by the
log-likelihood of its answers, and by whether the most likely token is right at each token of an answer, which is when
greedy decoding gives exactly that answer.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..fields import refuse
from .gradients import Head, final_hidden

ADJECTIVES = (
    "amber bold brave calm clear cold dark deep dry early fair fast flat free fresh gentle glad golden grand green "
    "happy heavy hidden hollow honest humble kind large late light little lonely loud lucky narrow new noble old pale "
    "plain proud quick quiet rare rich round rough sharp silent silver simple slow small smooth soft strong sweet tall "
    "thin tired warm white wide wild wise young"
).split()
NOUNS = (
    "anchor apron arrow barrel basket beacon bell bottle bridge broom bucket button cabin candle canyon carpet castle "
    "chimney circle clock coat corner cottage cradle curtain desk dial door engine fence ferry field flag forest "
    "fountain garden gate hammer harbor island kettle ladder lamp lantern letter mill mirror museum needle orchard "
    "oven paddle palace pillow planet pocket river road saddle ship shop spoon statue stove tower tunnel valley violin "
    "wagon wall window"
).split()
#: Words to classify, and what their kinds are called in the task: nothing that a model could know.
KINDS = {
    "nal": "apple banana cherry grape lemon mango orange peach pear plum melon berry".split(),
    "rop": "bear cat cow dog duck fox goat horse lion mouse pig wolf".split(),
    "tib": "arm chin ear elbow eye finger foot hand knee leg neck nose".split(),
}
HOPS, NEEDLES, DEPTHS = 4, 4, 10
#: Tasks of a mixture, in their order.
MIXED = ("needle", "few_shot", "variables", "needle_values", *("needle",) * (DEPTHS - 1))
#: Of an example at least this share is haystack.
LEAST_HAYSTACK = 0.25
#: Tokens of an example: two, twice.
LEAST_LENGTH = 4
#: Before an answer and what counts of it: pieces of the end of an example.
Tail = list[tuple[str, bool]]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Example:
    """A text whose last tokens can be predicted from far back.

    Args:
        task: its name in `TASKS`, or "mixture".
        ids: token ids [N].
        spans: (start, stop) of the tokens that are answers; nothing else is scored.
        depth: where the thing lies that is asked for, as a share of the haystack; None where it lies in several places.
    """

    task: str
    ids: Tensor
    spans: tuple[tuple[int, int], ...]
    depth: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answers."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Score:
    """How well answers were predicted.

    Args:
        nats: negative log-likelihood, a token of the answers.
        exact: the share of answers that greedy decoding gives.
        right: the share of the answers' tokens that are the most likely ones.
    """

    nats: float
    exact: float
    right: float = 0.0

    def loss(self, before: Score) -> float:
        """Relative rise of the perplexity of the answers, from that of another score."""
        return math.expm1(self.nats - before.nats)


@dataclass
class Hidden:
    """What a task hides in a haystack, (depth, text), and how its example ends."""

    inserts: list[tuple[float, str]]
    tail: Tail
    depth: float | None = None


def number(draw: random.Random) -> str:
    """Five digits, as text."""
    return str(draw.randrange(10_000, 100_000))


def names(draw: random.Random, count: int) -> list[str]:
    """Keys of needles: an adjective and a noun each, no noun twice."""
    return [f"{draw.choice(ADJECTIVES)} {noun}" for noun in draw.sample(NOUNS, count)]


def needle_text(key: str, value: str) -> str:
    """What is hidden."""
    return f"\nThe secret number of the {key} is {value}.\n"


def question(key: str, value: str) -> Tail:
    """What asks for a number, and the answer."""
    return [
        (
            f"\nQuestion: what is the secret number of the {key}?\nThe secret number of the {key} is",
            False,
        ),
        (f" {value}", True),
    ]


def needle(draw: random.Random, depth: float) -> Hidden:
    """One key, one number (RULER: niah_single)."""
    (key,), value = names(draw, 1), number(draw)
    return Hidden([(depth, needle_text(key, value))], question(key, value), depth)


def needle_keys(draw: random.Random, depth: float) -> Hidden:
    """Four keys with a number each, one of them asked for (niah_multikey)."""
    keys, values = names(draw, NEEDLES), [number(draw) for _ in range(NEEDLES)]
    depths = [depth, *(draw.random() for _ in keys[1:])]
    inserts = [(d, needle_text(k, v)) for d, k, v in zip(depths, keys, values)]
    return Hidden(inserts, question(keys[0], values[0]), depth)


def needle_values(draw: random.Random, depth: float) -> Hidden:
    """One key with four numbers, all asked for in their order (niah_multivalue)."""
    (key,), values = names(draw, 1), [number(draw) for _ in range(NEEDLES)]
    inserts = [((depth + i / NEEDLES) % 1, needle_text(key, v)) for i, v in enumerate(values)]
    ordered = [text.rstrip(".\n").split()[-1] for _, text in sorted(inserts)]
    ask = f"\nQuestion: which secret numbers has the {key}?\nThe secret numbers of the {key} are"
    tail: Tail = [(ask, False)]
    for value in ordered:
        tail += [(f" {value}", True), (",", False)]
    return Hidden(inserts, tail[:-1])


def variables(draw: random.Random, depth: float) -> Hidden:
    """A number handed on four times, over five variables, all of them asked for (vt)."""
    letters = [chr(65 + i) for i in range(26)]
    chain = ["".join(draw.sample(letters, 3)) for _ in range(HOPS + 1)]
    value = number(draw)
    places = sorted((depth + i / (HOPS + 1)) % 1 for i in range(HOPS + 1))
    lines = [
        f"\nVAR {chain[0]} = {value}\n",
        *(f"\nVAR {b} = VAR {a}\n" for a, b in zip(chain, chain[1:])),
    ]
    tail: Tail = [
        (f"\nQuestion: which variables hold {value}?\nThe variables that hold {value} are", False)
    ]
    for name in chain:
        tail += [(f" {name}", True), (",", False)]
    return Hidden(list(zip(places, lines)), tail[:-1])


def few_shot(draw: random.Random, depth: float) -> Hidden:
    """Words of three kinds, the kinds under names of no meaning; examples far back, other words to classify."""
    shown, asked = [], []
    for kind, words in KINDS.items():
        drawn = draw.sample(words, 9)
        shown += [(word, kind) for word in drawn[:6]]
        asked += [(word, kind) for word in drawn[6:]]
    draw.shuffle(shown)
    draw.shuffle(asked)
    told = "".join(f"\nWord: {word}. Kind: {kind}." for word, kind in shown)
    tail: Tail = []
    for word, kind in asked:
        tail += [(f"\nWord: {word}. Kind:", False), (f" {kind}", True), (".", False)]
    return Hidden([(depth / 4, told + "\n")], tail[:-1], depth / 4)


#: What is hidden, by task, and at how many depths each is made. "copying" hides nothing: a text comes twice.
TASKS: dict[str, Callable[[random.Random, float], Hidden]] = {
    "needle": needle,
    "needle_keys": needle_keys,
    "needle_values": needle_values,
    "variables": variables,
    "few_shot": few_shot,
}
COUNTS = {"needle": DEPTHS, "needle_keys": 4, "needle_values": 3, "variables": 3, "few_shot": 3}


def examples(
    tokenizer: Any,
    texts: Sequence[Tensor],
    length: int,
    *,
    seed: int = 0,
    tasks: Iterable[str] | None = None,
) -> list[Example]:
    """Examples of every task, of `length` tokens each; a task that does not fit that length is left out.

    Args:
        tokenizer: of the model.
        texts: haystacks, token ids [at least `length`] each, taken in turn; all of them are copied. A BOS token at the
            start of one is the first token of its examples, and comes once.
        length: tokens of an example, its answers among them.
        seed: the same seed, texts and tokenizer give the same examples.
        tasks: names in `TASKS`, and "copying"; None: all.

    Raises:
        ValueError: an unknown task, a length below 4, or a haystack that is too short.
    """
    chosen = list(("copying", *TASKS) if tasks is None else tasks)
    check(texts, length, chosen)
    first = [opening(tokenizer, text) for text in texts]
    made = (
        [copying(text, length, n) for text, n in zip(texts, first)] if "copying" in chosen else []
    )
    for task in (name for name in TASKS if name in chosen):
        for i in range(COUNTS[task]):
            draw = random.Random(
                f"{seed} {task} {i}"
            )  # a text: the same on every platform and version
            hidden = TASKS[task](draw, (i + 0.5) / COUNTS[task])
            at = i % len(texts)
            example = assemble(encoder(tokenizer), texts[at], length, task, hidden, first[at])
            made += [example] if example else []
    return made


def check(texts: Sequence[Tensor], length: int, tasks: Iterable[str]) -> None:
    """Refuse unknown tasks and haystacks that are too short."""
    unknown = sorted(set(tasks) - {"copying", *TASKS})
    if unknown:
        raise ValueError(
            f"retrieval task {unknown[0]!r} is unknown; allowed: copying, {', '.join(TASKS)}"
        )
    check_length(length)
    shortest = min((len(text) for text in texts), default=0)
    if shortest < length:
        raise ValueError(
            f"retrieval: a haystack of {shortest} tokens; allowed: {length} or more, as the examples have"
        )


def check_length(length: int) -> None:
    """Refuse lengths that no example has."""
    if not isinstance(length, int) or isinstance(length, bool) or length < LEAST_LENGTH:
        refuse("length", length, f"integers from {LEAST_LENGTH}")


def refuse_names(texts: Iterable[str], tasks: Collection[str]) -> None:
    """Refuse texts that are called like a task, or like one of its examples, which have numbers."""
    for name in texts:
        if re.sub(r" \d+$", "", name) in tasks:
            raise ValueError(
                f"a text is called {name}, as a task of retrieval is; allowed: another name"
            )


def opening(tokenizer: Any, text: Tensor) -> int:
    """How many tokens of a text [N] stay at its front whatever is made of it: 1 where it begins with a BOS token."""
    return int(tokenizer.bos_token_id is not None and text[0].item() == tokenizer.bos_token_id)


def copying(text: Tensor, length: int, first: int = 0) -> Example:
    """Half of `length` tokens of a text, twice; the second time is scored. Its `first` tokens come once.

    Where `length` less `first` is odd, the example has one token less.

    Raises:
        ValueError: a length below 4, a `first` that leaves nothing to copy, or a text that is too short.
    """
    check_length(length)
    if not 0 <= first <= length - 2:
        refuse("first", first, f"0 to {length - 2}, which leaves two of {length} tokens")
    half = (length - first) // 2
    if len(text) < first + half:
        raise ValueError(f"copying: a text of {len(text)} tokens; allowed: {first + half} or more")
    ids = torch.cat([text[:first], text[first : first + half].repeat(2)])
    return Example("copying", ids, ((first + half, first + 2 * half),))


def mixture(tokenizer: Any, text: Tensor, length: int, *, seed: int = 0) -> Example | None:
    """The tasks of `MIXED` in one example, needles at up to ten depths: one pass measures them all.

    Args:
        as for `examples`.

    Returns:
        None where `length` is too short for a single needle.
    """
    parts, encode, best, first = [], encoder(tokenizer), None, opening(tokenizer, text)
    for i, task in enumerate(MIXED):
        draw = random.Random(f"{seed} mixture {i}")
        parts.append(TASKS[task](draw, (i * 0.37 + 0.05) % 1))
        inserts, tail = (
            [x for p in parts for x in getattr(p, name)] for name in ("inserts", "tail")
        )
        fitting = assemble(encode, text, length, "mixture", Hidden(inserts, tail), first)
        if fitting is None:
            parts.pop()
        else:
            best = fitting
    return best


def encoder(tokenizer: Any) -> Encode:
    """Text to token ids, no special ones among them."""
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def assemble(
    encode: Encode, text: Tensor, length: int, task: str, hidden: Hidden, first: int = 0
) -> Example | None:
    """The haystack with what is hidden in it, after its `first` tokens, and the end: `length` tokens.

    None where too little haystack is left.
    """
    inserts = [(depth, encode(piece)) for depth, piece in sorted(hidden.inserts)]
    tail = [(encode(piece), counts) for piece, counts in hidden.tail]
    room = length - sum(len(ids) for _, ids in inserts) - sum(len(ids) for ids, _ in tail)
    if room < LEAST_HAYSTACK * length:
        return None
    hay, ids, done = text[:room].tolist(), [], 0
    for depth, piece in inserts:
        place = max(first, int(depth * room))
        ids += hay[done:place] + piece
        done = place
    ids += hay[done:]
    spans = []
    for piece, counts in tail:
        spans += [(len(ids), len(ids) + len(piece))] if counts else []
        ids += piece
    return Example(task, torch.tensor(ids), tuple(spans), hidden.depth)


@torch.no_grad()
def score(model: PreTrainedModel, head: Head, example: Example) -> Score:
    """How well a causal model predicts the answers of one example.

    Args:
        model: patched or not. head: final hidden states to logits, of `gradients.head_of`.
    """
    return score_hidden(final_hidden(model, example.ids), head, example)


def score_hidden(hidden: Tensor, head: Head, example: Example) -> Score:
    """As `score`, of the final hidden states [N, e]."""
    nats, exact, right = 0.0, 0, 0
    for start, stop in example.spans:
        logits = head(hidden[start - 1 : stop - 1]).float()
        answer = example.ids[start:stop].to(logits.device)
        nats -= logits.log_softmax(-1).gather(1, answer[:, None]).double().sum().item()
        hits = int((logits.argmax(-1) == answer).sum())
        exact += hits == len(answer)
        right += hits
    return Score(
        nats=nats / example.tokens, exact=exact / len(example.spans), right=right / example.tokens
    )


def by_task(made: Sequence[Example], scores: Sequence[Score]) -> dict[str, Score]:
    """The mean score of every task."""
    grouped: dict[str, list[Score]] = {}
    for example, one in zip(made, scores, strict=True):
        grouped.setdefault(example.task, []).append(one)
    mean = lambda values: sum(values) / len(values)
    return {
        task: Score(
            mean([s.nats for s in all_]),
            mean([s.exact for s in all_]),
            mean([s.right for s in all_]),
        )
        for task, all_ in grouped.items()
    }


def least_right(task: str) -> float:
    """The share of right answers from which on a model can do a task, and its loss there says something.

    Numbers and variables are not guessed. Words of `few_shot` have one of three kinds, so that chance gives 33 % of its
    27 answers; 50 % and more come by chance in 5 % of cases. "copying" counts tokens, since its one answer is hundreds
    of them.
    """
    return 0.5 if task in ("few_shot", "copying") else 0.25


def share_right(task: str, score: Score) -> float:
    """The share of right answers of a task; of "copying" that of right tokens."""
    return score.right if task == "copying" else score.exact
