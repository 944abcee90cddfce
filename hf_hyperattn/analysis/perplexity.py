"""Perplexity of a causal language model on a text, and differences between two models' logits.

Read `perplexity` for how a text is cut into windows.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

#: Largest x such that exp(x) is a finite float64.
LARGEST_EXPONENT = math.log(sys.float_info.max)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode while the block runs, then restore every module's own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # Not `model.train()`: that would also set modules whose mode differed from the model's.
        for module, mode in modes.items():
            module.training = mode


def one_text(ids: torch.Tensor | Sequence[int], name: str = "ids") -> torch.Tensor:
    """Return token ids `[N]` as int64.

    Args:
        ids: Integers `[N]` or `[1, N]`.
        name: Name of the argument, for errors.

    Raises:
        ValueError: There are several texts, or the ids are not integers.
    """
    allowed = "integers [N] of one text"
    found = torch.as_tensor(ids)
    if found.dim() != 1 and not (found.dim() == 2 and len(found) == 1):
        raise ValueError(f"{name} has shape {tuple(found.shape)}; allowed: {allowed}")
    is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    # torch makes a float tensor of an empty list, so an empty one may have any dtype.
    if found.numel() and not is_integer:
        raise ValueError(f"{name} has dtype {found.dtype}; allowed: {allowed}")
    return found.long().flatten()


@torch.inference_mode()
def next_token_logits(model: torch.nn.Module, ids: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Return the logits `[N, vocabulary]` of a causal model, float32, on the CPU.

    Args:
        model: A causal model. It runs in evaluation mode.
        ids: Token ids `[N]`.

    Raises:
        ValueError: There are several texts, or the ids are not integers.
    """
    tokens = one_text(ids).to(next(model.parameters()).device)
    with evaluation_mode(model):
        return model(tokens[None], use_cache=False).logits[0].float().cpu()


def max_logit_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors, or NaN if either holds NaN.

    Raises:
        ValueError: The shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(
            f"logits of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared"
        )
    return (a.double() - b.double()).abs().max().item()


@dataclass(frozen=True)
class Perplexity:
    """Result of `perplexity`.

    Args:
        value: exp of the mean negative log-likelihood per token.
        loss: Mean negative log-likelihood per token, in nats.
        predicted: Number of predicted tokens, over which the mean is taken.
        windows: Number of forward passes.
        seconds: Time of the forward passes only.
        read: Number of tokens that went through the model, including prefixes.
        by_window: Loss per token of every window.
    """

    value: float
    loss: float
    predicted: int
    windows: int
    seconds: float
    read: int
    by_window: tuple[float, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens read per second: the speed of prefill at this window length."""
        return self.read / self.seconds


def perplexity(
    model: torch.nn.Module,
    ids: torch.Tensor | Sequence[int],
    window: int,
    *,
    prefix: Sequence[int] = (),
    on_window: Callable[[int], None] | None = None,
) -> Perplexity:
    """Compute the perplexity of a model on a text that is cut into windows.

    Windows are independent: a token sees at most the `window` - 1 tokens before it, and the first
    token of a window is predicted only if there is a prefix. Log-likelihoods are summed in float64.

    Args:
        model: A causal Transformers model. Its mode (training or not) is restored afterwards.
        ids: Token ids `[N]`, at least two.
        window: Number of tokens of `ids` per forward pass, at least two. It is not checked against
            the model's limit.
        prefix: Ids that are put before every window, such as a BOS token. They are not predicted.
        on_window: Called after every window with its number of tokens of `ids`.

    Returns:
        A `Perplexity`. Its `value` is inf if exp of the loss overflows, and NaN if the model
        returned NaN.

    Raises:
        ValueError: There are fewer than two tokens, the window is below two, there are several
            texts, or the ids are not integers.
    """
    ids = one_text(ids)
    prefix = one_text(prefix, "prefix").tolist()
    if window < 2:
        raise ValueError(f"window={window} is not allowed; allowed: 2 tokens or more")
    if len(ids) < 2:
        raise ValueError(f"the text holds {len(ids)} tokens; perplexity needs at least 2")
    # In a last window of a single token, nothing is predicted.
    pieces = [piece for piece in ids.split(window) if len(piece) > 1]
    losses, counts, times = [], [], []
    with evaluation_mode(model):
        for piece in pieces:
            loss, count, seconds = _score_window(model, piece, prefix)
            losses.append(loss)
            counts.append(count)
            times.append(seconds)
            if on_window:
                on_window(len(piece))
    predicted = sum(counts)
    mean = sum(losses) / predicted
    return Perplexity(
        # `not >` instead of `<=`, so that NaN goes through exp and stays NaN.
        value=math.exp(mean) if not mean > LARGEST_EXPONENT else math.inf,
        loss=mean,
        predicted=predicted,
        windows=len(pieces),
        seconds=sum(times),
        read=sum(len(prefix) + len(piece) for piece in pieces),
        by_window=tuple(loss / count for loss, count in zip(losses, counts)),
    )


@torch.inference_mode()
def _score_window(
    model: torch.nn.Module, piece: torch.Tensor, prefix: Sequence[int]
) -> tuple[float, int, float]:
    """Run one window.

    Returns:
        The summed negative log-likelihood, the number of predicted tokens, and the seconds of the
        forward pass.
    """
    device = next(model.parameters()).device
    tokens = torch.cat([torch.tensor(list(prefix), dtype=torch.long), piece]).to(device)
    start = time.perf_counter()
    logits = model(tokens[None], use_cache=False).logits[0]
    # CUDA kernels run asynchronously; wait for them before reading the clock.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    # The first token that has something before it to be predicted from.
    first = max(len(prefix), 1)
    # Summing float32 losses of thousands of tokens would lose digits, hence the float64 sum below.
    losses = F.cross_entropy(logits[first - 1 : -1].float(), tokens[first:], reduction="none")
    return losses.double().sum().item(), len(losses), seconds
