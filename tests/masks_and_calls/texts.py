"""Rows of a batch as hypothesis draws them: texts, padding, and the masks that say which keys a query sees."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

#: How many times as many examples as in the suite, for longer runs, which draw new ones each time.
FACTOR = float(os.environ.get("HYPERATTN_EXAMPLES", "1"))
#: The numbers by which an additive mask hides a key; None stands for the lowest number of the mask's dtype.
NUMBERS = {"-inf": -torch.inf, "lowest": None, "-1e4": -1e4, "-1e9": -1e9}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def examples(count: int) -> settings:
    """Settings of a test with so many examples in the suite, the same in every run, and FACTOR times as many else."""
    return settings(
        max_examples=max(1, round(count * FACTOR)),
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )


@dataclass(frozen=True)
class Row:
    """One row of a batch.

    Args:
        texts: for every slot the number of its text; -1 for padding.
        prefix: so many first tokens of every text see each other.
        window: a token sees so many tokens up to itself; None for all.
    """

    texts: tuple[int, ...]
    prefix: int = 0
    window: int | None = None

    def sees(self, causal: bool) -> Tensor:
        """Return bool [N, N], the keys that each query sees. A query that is padding sees nothing."""
        text, place = torch.tensor(self.texts), self.places
        seen = (text[:, None] == text) & (text >= 0)
        back = place[:, None] - place
        if self.window is not None:
            seen = seen & (back.abs() < self.window)
        if causal:
            in_prefix = place < self.prefix
            seen = seen & ((back >= 0) | (in_prefix & in_prefix[:, None]))
        return seen

    @property
    def real(self) -> Tensor:
        """Bool [N], the slots that hold tokens."""
        return torch.tensor(self.texts) >= 0

    @property
    def places(self) -> Tensor:
        """int64 [N], the number of each token in its text; 0 for padding."""
        text = torch.tensor(self.texts)
        earlier = (text[:, None] == text).tril(-1).sum(1)
        return earlier.masked_fill(text < 0, 0)

    def of_texts(self) -> list[Tensor]:
        """Return the slots of each text."""
        text = torch.tensor(self.texts)
        return [(text == number).nonzero()[:, 0] for number in sorted(set(self.texts) - {-1})]


def draw_padded(draw, length: int) -> Row:
    """Draw one text with padding at its left, at its right, and inside, or without any."""
    real = [True] * length
    for side in draw(
        st.lists(st.sampled_from(["left", "right", "inside"]), max_size=3, unique=True)
    ):
        count = draw(st.integers(1, max(1, length // 2)))
        start = {"left": 0, "right": length - count}.get(side)
        start = draw(st.integers(0, length - count)) if start is None else start
        if any(real[:start] + real[start + count :]):
            real[start : start + count] = [False] * count
    return Row(tuple(0 if r else -1 for r in real))


def draw_packed(draw, length: int, padded: bool = True) -> Row:
    """Draw up to three texts one after the other, with padding before the first, behind the last, and between."""
    cuts = draw(st.lists(st.integers(1, length - 1), max_size=2, unique=True)) if length > 1 else []
    texts = [sum(i >= cut for cut in cuts) for i in range(length)]
    padding = draw(st.lists(st.integers(0, length - 1), max_size=2, unique=True)) if padded else []
    texts = [-1 if i in padding else text for i, text in enumerate(texts)]
    return Row(tuple(texts)) if max(texts) >= 0 else Row((0,) * length)


def draw_prefix(draw, length: int) -> Row:
    """Draw a padded text whose first tokens see each other."""
    return Row(draw_padded(draw, length).texts, prefix=draw(st.integers(1, length)))


def draw_windowed(draw, length: int) -> Row:
    """Draw a padded text whose tokens see only those nearby. One token alone would be a text of its own."""
    return Row(draw_padded(draw, length).texts, window=draw(st.integers(2, length)))


@dataclass(frozen=True)
class Form:
    """How a mask says what is hidden: bool, or a number that is added, in a dtype."""

    number: str | None = None
    dtype: torch.dtype = torch.float32

    def write(self, seen: Tensor) -> Tensor:
        """Return the mask that shows what is `seen`."""
        if self.number is None:
            return seen
        number = NUMBERS[self.number]
        number = torch.finfo(self.dtype).min if number is None else number
        # float16 has no -1e9: PyTorch makes -inf of it, as it does in models.
        return torch.zeros(seen.shape).masked_fill(~seen, number).to(self.dtype)


FORMS = st.builds(Form, st.sampled_from([None, *NUMBERS]), st.sampled_from(DTYPES))


def assert_near(actual: Tensor, expected: Tensor, share: float, case: object) -> None:
    """Raise where a number is off by more than a share of the largest one that is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, (
        f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}: {case}"
    )
    if not expected.numel():
        return
    assert bool(actual.isfinite().all()), f"not finite: {case}"
    scale = max(float(expected.abs().max()), 1e-3)
    off = float((actual - expected).abs().max())
    assert off <= share * scale, (
        f"off by {off:.3g} of {scale:.3g}, allowed a share of {share:g}: {case}"
    )
