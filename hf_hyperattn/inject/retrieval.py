"""Retrieval tests for causal models: answers that can only be predicted from far back in the text.

Read the functions `hide_...` for the tasks, `assemble_example` for how an example is put together,
and `score_hidden` for how it is scored.

The tasks follow RULER (arXiv 2404.06654): needles in a haystack (one key, several keys, several
values) and variable tracking. Two tasks are added: copying (a text twice) and classification with
few-shot examples far back. Any text can be the haystack. Everything hidden in it is drawn from
word lists by a seed. An answer is scored by its log-likelihood, and by whether the most likely
token is right at each of its tokens. The latter holds if and only if greedy decoding gives exactly
this answer.
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

from ..config.fields import refuse
from .gradients import Head, final_hidden

#: Words that name hidden numbers.
ADJECTIVES = (
    "amber bold brave calm clear cold dark deep dry early fair fast flat free fresh gentle "
    "glad golden grand green happy heavy hidden hollow honest humble kind large late light "
    "little lonely loud lucky narrow new noble old pale plain proud quick quiet rare rich "
    "round rough sharp silent silver simple slow small smooth soft strong sweet tall thin "
    "tired warm white wide wild wise young"
).split()
NOUNS = (
    "anchor apron arrow barrel basket beacon bell bottle bridge broom bucket button cabin "
    "candle canyon carpet castle chimney circle clock coat corner cottage cradle curtain desk "
    "dial door engine fence ferry field flag forest fountain garden gate hammer harbor island "
    "kettle ladder lamp lantern letter mill mirror museum needle orchard oven paddle palace "
    "pillow planet pocket river road saddle ship shop spoon statue stove tower tunnel valley "
    "violin wagon wall window"
).split()
#: Words to classify, by the name of their kind in the task. The names are invented, so that a model
#: must read the examples to know them.
KINDS = {
    "nal": "apple banana cherry grape lemon mango orange peach pear plum melon berry".split(),
    "rop": "bear cat cow dog duck fox goat horse lion mouse pig wolf".split(),
    "tib": "arm chin ear elbow eye finger foot hand knee leg neck nose".split(),
}
#: Assignments after the first one in a variable-tracking chain.
HOPS = 4
#: Needles per example in the tasks with several keys or values.
NEEDLES = 4
#: Depths at which single needles are hidden.
DEPTHS = 10
#: Tasks of a mixture, in the order in which they are added while they fit.
MIXED = ("needle", "few_shot", "variables", "needle_values", *("needle",) * (DEPTHS - 1))
#: Smallest share of an example that must be haystack.
LEAST_HAYSTACK = 0.25
#: Smallest number of tokens of an example: two tokens, twice.
LEAST_LENGTH = 4
#: End of an example: pieces of text, and whether each is an answer.
Tail = list[tuple[str, bool]]
#: Maps text to token ids without special tokens.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Example:
    """A text with answers that can be predicted from far back.

    Args:
        task: Name in `TASKS`, "copying" or "mixture".
        ids: Token ids [N].
        spans: (start, stop) of the answer tokens. Only these are scored.
        depth: Position of the needed information, as a share of the haystack. None: it is in
            several places.
    """

    task: str
    ids: Tensor
    spans: tuple[tuple[int, int], ...]
    depth: float | None = None

    @property
    def tokens(self) -> int:
        """Return the number of answer tokens."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Score:
    """How well answers were predicted.

    Args:
        nats: Negative log-likelihood per answer token.
        exact: Share of the answers that greedy decoding gives.
        right: Share of the answer tokens that are the most likely ones.
    """

    nats: float
    exact: float
    right: float = 0.0

    def loss(self, before: Score) -> float:
        """Return the relative rise of the answers' perplexity since `before`."""
        return math.expm1(self.nats - before.nats)


@dataclass
class Hidden:
    """Content that a task adds to a haystack.

    Args:
        inserts: (depth, text) of the hidden pieces. A depth is a share of the haystack.
        tail: Question and answers at the end of the example.
        depth: Depth of the needed information. None: it is in several places.
    """

    inserts: list[tuple[float, str]]
    tail: Tail
    depth: float | None = None


def draw_number(draw: random.Random) -> str:
    """Draw a number of five digits, as text."""
    return str(draw.randrange(10_000, 100_000))


def draw_keys(draw: random.Random, count: int) -> list[str]:
    """Draw keys of needles, each an adjective and a noun. No noun appears twice."""
    return [f"{draw.choice(ADJECTIVES)} {noun}" for noun in draw.sample(NOUNS, count)]


def needle_text(key: str, value: str) -> str:
    """Return the sentence that is hidden for a key."""
    return f"\nThe secret number of the {key} is {value}.\n"


def ask_number(key: str, value: str) -> Tail:
    """Return the question for the number of a key, and its answer."""
    ask = f"\nQuestion: what is the secret number of the {key}?\nThe secret number of the {key} is"
    return [(ask, False), (f" {value}", True)]


def hide_needle(draw: random.Random, depth: float) -> Hidden:
    """Hide one number under one key (RULER: niah_single)."""
    (key,) = draw_keys(draw, 1)
    value = draw_number(draw)
    return Hidden([(depth, needle_text(key, value))], ask_number(key, value), depth)


def hide_needle_keys(draw: random.Random, depth: float) -> Hidden:
    """Hide four keys with one number each, and ask for one of them (RULER: niah_multikey)."""
    keys = draw_keys(draw, NEEDLES)
    values = [draw_number(draw) for _ in range(NEEDLES)]
    # The first needle is asked for and lies at the given depth, the others anywhere.
    depths = [depth, *(draw.random() for _ in keys[1:])]
    inserts = [(d, needle_text(k, v)) for d, k, v in zip(depths, keys, values)]
    return Hidden(inserts, ask_number(keys[0], values[0]), depth)


def hide_needle_values(draw: random.Random, depth: float) -> Hidden:
    """Hide four numbers under one key, and ask for all in text order (RULER: niah_multivalue)."""
    (key,) = draw_keys(draw, 1)
    values = [draw_number(draw) for _ in range(NEEDLES)]
    inserts = [((depth + i / NEEDLES) % 1, needle_text(key, v)) for i, v in enumerate(values)]
    # Depths wrap around at the end of the haystack, so the order must be read from the inserts.
    ordered = [text.rstrip(".\n").split()[-1] for _, text in sorted(inserts)]
    ask = f"\nQuestion: which secret numbers has the {key}?\nThe secret numbers of the {key} are"
    return Hidden(inserts, ask_list(ask, ordered))


def hide_variables(draw: random.Random, depth: float) -> Hidden:
    """Hide a number that is passed on over five variables, and ask for all of them (RULER: vt)."""
    letters = [chr(65 + i) for i in range(26)]
    chain = ["".join(draw.sample(letters, 3)) for _ in range(HOPS + 1)]
    value = draw_number(draw)
    # Sorted, because an assignment must follow the one that it reads.
    places = sorted((depth + i / (HOPS + 1)) % 1 for i in range(HOPS + 1))
    lines = [f"\nVAR {chain[0]} = {value}\n"]
    lines += [f"\nVAR {b} = VAR {a}\n" for a, b in zip(chain, chain[1:])]
    ask = f"\nQuestion: which variables hold {value}?\nThe variables that hold {value} are"
    return Hidden(list(zip(places, lines)), ask_list(ask, chain))


def ask_list(ask: str, answers: Sequence[str]) -> Tail:
    """Return a question and its answers, separated by commas that are not scored."""
    tail: Tail = [(ask, False)]
    for answer in answers:
        tail += [(f" {answer}", True), (",", False)]
    return tail[:-1]


def hide_few_shot(draw: random.Random, depth: float) -> Hidden:
    """Hide classified words of three invented kinds, and ask for the kinds of other words."""
    shown, asked = [], []
    for kind, words in KINDS.items():
        drawn = draw.sample(words, 9)
        shown += [(word, kind) for word in drawn[:6]]
        asked += [(word, kind) for word in drawn[6:]]
    draw.shuffle(shown)
    draw.shuffle(asked)
    examples_text = "".join(f"\nWord: {word}. Kind: {kind}." for word, kind in shown)
    tail: Tail = []
    for word, kind in asked:
        tail += [(f"\nWord: {word}. Kind:", False), (f" {kind}", True), (".", False)]
    # In the first quarter of the haystack, so that the examples are always far back.
    far = depth / 4
    return Hidden([(far, examples_text + "\n")], tail[:-1], far)


#: The function of each task. "copying" is not here, because it hides nothing.
TASKS: dict[str, Callable[[random.Random, float], Hidden]] = {
    "needle": hide_needle,
    "needle_keys": hide_needle_keys,
    "needle_values": hide_needle_values,
    "variables": hide_variables,
    "few_shot": hide_few_shot,
}
#: Number of examples of each task, each at another depth.
COUNTS = {"needle": DEPTHS, "needle_keys": 4, "needle_values": 3, "variables": 3, "few_shot": 3}


def examples(
    tokenizer: Any,
    texts: Sequence[Tensor],
    length: int,
    *,
    seed: int = 0,
    tasks: Iterable[str] | None = None,
) -> list[Example]:
    """Make examples of every task, each with `length` tokens.

    Tasks that do not fit into this length are left out.

    Args:
        tokenizer: Tokenizer of the model.
        texts: Haystacks, token ids [at least `length`] each. They are used in turn; for "copying"
            all of them are used. If a text begins with a BOS token, so do its examples, and the
            token does not appear again.
        length: Number of tokens of an example, including its answers.
        seed: Random seed. The same seed, texts and tokenizer give the same examples.
        tasks: Names in `TASKS`, and "copying". None: all.

    Raises:
        ValueError: A task is unknown, the length is below 4, or a haystack is too short.
    """
    chosen = list(("copying", *TASKS) if tasks is None else tasks)
    check_request(texts, length, chosen)
    first = [opening_tokens(tokenizer, text) for text in texts]
    encode = make_encoder(tokenizer)
    made = []
    if "copying" in chosen:
        made += [copying(text, length, n) for text, n in zip(texts, first)]
    for task in (name for name in TASKS if name in chosen):
        for i in range(COUNTS[task]):
            # Seed with a string: it gives the same numbers on every platform and Python version.
            draw = random.Random(f"{seed} {task} {i}")
            hidden = TASKS[task](draw, (i + 0.5) / COUNTS[task])
            at = i % len(texts)
            example = assemble_example(encode, texts[at], length, task, hidden, first[at])
            if example is not None:
                made.append(example)
    return made


def check_request(texts: Sequence[Tensor], length: int, tasks: Iterable[str]) -> None:
    """Raise ValueError for an unknown task, an invalid length or a haystack that is too short."""
    unknown = sorted(set(tasks) - {"copying", *TASKS})
    if unknown:
        raise ValueError(
            f"retrieval task {unknown[0]!r} is unknown; allowed: copying, {', '.join(TASKS)}"
        )
    check_length(length)
    shortest = min((len(text) for text in texts), default=0)
    if shortest < length:
        raise ValueError(
            f"retrieval: a haystack of {shortest} tokens; allowed: {length} or more, as the "
            "examples have"
        )


def check_length(length: int) -> None:
    """Raise ValueError if no example can have this number of tokens."""
    # True is an int in Python, but no length.
    if not isinstance(length, int) or isinstance(length, bool) or length < LEAST_LENGTH:
        refuse("length", length, f"integers from {LEAST_LENGTH}")


def refuse_names(texts: Iterable[str], tasks: Collection[str]) -> None:
    """Raise ValueError if a text has the name of a task, or of one of its numbered examples."""
    for name in texts:
        if re.sub(r" \d+$", "", name) in tasks:
            raise ValueError(
                f"a text is called {name}, as a task of retrieval is; allowed: another name"
            )


def opening_tokens(tokenizer: Any, text: Tensor) -> int:
    """Return the number of tokens that must stay in front: 1 if a text [N] begins with BOS."""
    return int(tokenizer.bos_token_id is not None and text[0].item() == tokenizer.bos_token_id)


def copying(text: Tensor, length: int, first: int = 0) -> Example:
    """Make an example that repeats a text, and score the second half.

    Args:
        text: Token ids [N].
        length: Number of tokens of the example. If `length` - `first` is odd, the example has one
            token less.
        first: Number of tokens at the start of the text that are not repeated.

    Raises:
        ValueError: The length is below 4, `first` leaves nothing to copy, or the text is too short.
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
    """Make one example of all tasks in `MIXED`, with needles at up to ten depths.

    One forward pass over it measures all these tasks. Tasks that no longer fit are left out.

    Args:
        tokenizer: Tokenizer of the model.
        text: Haystack, token ids [at least `length`].
        length: Number of tokens of the example.
        seed: Random seed.

    Returns:
        The example, or None if not even one needle fits.
    """
    encode = make_encoder(tokenizer)
    first = opening_tokens(tokenizer, text)
    parts: list[Hidden] = []
    best = None
    for i, task in enumerate(MIXED):
        draw = random.Random(f"{seed} mixture {i}")
        # Steps of 0.37 modulo 1 spread the depths over the whole haystack.
        parts.append(TASKS[task](draw, (i * 0.37 + 0.05) % 1))
        joined = Hidden(
            inserts=[insert for part in parts for insert in part.inserts],
            tail=[piece for part in parts for piece in part.tail],
        )
        fitting = assemble_example(encode, text, length, "mixture", joined, first)
        if fitting is None:
            # Later tasks may be shorter, so go on without this one.
            parts.pop()
        else:
            best = fitting
    return best


def make_encoder(tokenizer: Any) -> Encode:
    """Return a function from text to token ids without special tokens."""
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def assemble_example(
    encode: Encode, text: Tensor, length: int, task: str, hidden: Hidden, first: int = 0
) -> Example | None:
    """Insert the hidden pieces into a haystack and append the questions and answers.

    Args:
        encode: Maps text to token ids.
        text: Haystack, token ids [at least `length`].
        length: Number of tokens of the example.
        task: Name of the task.
        hidden: The pieces to insert, and the end of the example.
        first: Number of tokens at the start of the haystack that nothing is inserted before.

    Returns:
        The example, or None if too little room is left for the haystack.
    """
    inserts = [(depth, encode(piece)) for depth, piece in sorted(hidden.inserts)]
    tail = [(encode(piece), is_answer) for piece, is_answer in hidden.tail]
    used = sum(len(ids) for _, ids in inserts) + sum(len(ids) for ids, _ in tail)
    room = length - used
    if room < LEAST_HAYSTACK * length:
        return None
    hay = text[:room].tolist()
    ids: list[int] = []
    done = 0
    for depth, piece in inserts:
        place = max(first, int(depth * room))
        ids += hay[done:place] + piece
        done = place
    ids += hay[done:]
    spans = []
    for piece, is_answer in tail:
        if is_answer:
            spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return Example(task=task, ids=torch.tensor(ids), spans=tuple(spans), depth=hidden.depth)


@torch.no_grad()
def score(model: PreTrainedModel, head: Head, example: Example) -> Score:
    """Score a causal model on one example.

    Args:
        model: A causal model, patched or not.
        head: Maps final hidden states to logits, from `gradients.head_of`.
        example: The example.
    """
    return score_hidden(final_hidden(model, example.ids), head, example)


def score_hidden(hidden: Tensor, head: Head, example: Example) -> Score:
    """Score one example from the final hidden states [N, e] of a model."""
    nats, exact, right = 0.0, 0, 0
    for start, stop in example.spans:
        hits = 0
        # A copied text is one answer of half the length, so its logits are computed in pieces.
        for piece in torch.arange(start, stop).split(head.piece):
            # The token at position t is predicted at position t - 1.
            logits = head(hidden[piece - 1])
            answer = example.ids[piece].to(logits.device)
            nats -= logits.log_softmax(-1).gather(1, answer[:, None]).double().sum().item()
            hits += int((logits.argmax(-1) == answer).sum())
        exact += hits == stop - start
        right += hits
    return Score(
        nats=nats / example.tokens, exact=exact / len(example.spans), right=right / example.tokens
    )


def by_task(made: Sequence[Example], scores: Sequence[Score]) -> dict[str, Score]:
    """Return the mean score of every task.

    Args:
        made: The examples.
        scores: Their scores, in the same order.
    """
    grouped: dict[str, list[Score]] = {}
    for example, example_score in zip(made, scores, strict=True):
        grouped.setdefault(example.task, []).append(example_score)

    def take_mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        task: Score(
            nats=take_mean([s.nats for s in task_scores]),
            exact=take_mean([s.exact for s in task_scores]),
            right=take_mean([s.right for s in task_scores]),
        )
        for task, task_scores in grouped.items()
    }


def least_right(task: str) -> float:
    """Return the share of right answers that a model needs, so that the task can judge a change.

    If a model cannot do a task, the rise of its loss there says nothing about retrieval.
    """
    # A kind of `few_shot` is guessed with probability 1/3; 50 % or more of 27 answers come by
    # chance in 5 % of cases. "copying" has one answer of hundreds of tokens, so its tokens count.
    # Numbers and variables cannot be guessed.
    return 0.5 if task in ("few_shot", "copying") else 0.25


def share_right(task: str, score: Score) -> float:
    """Return the share of right answers of a task, or of right tokens for "copying"."""
    return score.right if task == "copying" else score.exact
