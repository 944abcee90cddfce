"""How well a causal language model predicts a text, and how far two models' predictions are apart."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F

LARGEST_EXPONENT = math.log(sys.float_info.max)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for as long as the block runs; then every module's own mode from before."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def one_text(ids: torch.Tensor | Sequence[int], name: str = "ids") -> torch.Tensor:
    """Token ids `[N]` as int64, from `[N]` or `[1, N]`.

    Raises:
        ValueError: a batch of several texts, or numbers that are no integers; `name` is what the error calls them.
    """
    found, allowed = torch.as_tensor(ids), "integers [N] of one text"
    if found.dim() != 1 and not (found.dim() == 2 and len(found) == 1):
        raise ValueError(f"{name} has shape {tuple(found.shape)}; allowed: {allowed}")
    if found.numel() and (
        found.is_floating_point() or found.is_complex() or found.dtype == torch.bool
    ):
        raise ValueError(
            f"{name} has dtype {found.dtype}; allowed: {allowed}"
        )  # an empty list is of floats
    return found.long().flatten()


@torch.inference_mode()
def next_token_logits(model: torch.nn.Module, ids: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Logits `[N, vocabulary]` of a causal LM on token ids `[N]`: float32, on the CPU, in evaluation mode.

    Raises:
        ValueError: ids of several texts, or that are no integers.
    """
    tokens = one_text(ids).to(next(model.parameters()).device)
    with evaluation_mode(model):
        return model(tokens[None], use_cache=False).logits[0].float().cpu()


def max_logit_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one shape; nan where either holds nan."""
    if a.shape != b.shape:
        raise ValueError(
            f"logits of shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared"
        )
    return (a.double() - b.double()).abs().max().item()


@dataclass(frozen=True)
class Perplexity:
    """What `perplexity` measured.

    Args:
        value: exp of the mean negative log-likelihood of a token.
        loss: that mean, in nats.
        predicted: tokens predicted, the number the mean is over.
        windows: forward passes.
        seconds: time of the forward passes alone.
        read: tokens that went through the model, prefixes included.
        by_window: the loss of every window, a token.
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
        """Tokens read a second: the speed of prefill at this window."""
        return self.read / self.seconds


def perplexity(
    model: torch.nn.Module,
    ids: torch.Tensor | Sequence[int],
    window: int,
    *,
    prefix: Sequence[int] = (),
    on_window: Callable[[int], None] | None = None,
) -> Perplexity:
    """Perplexity of `model` on the tokens `ids`, cut into windows of `window` tokens.

    Each window is read afresh, so a token sees at most the `window - 1` tokens before it, and the first token
    of a window is not predicted (with a prefix it is). Log-likelihoods are summed in float64.

    Args:
        model: a causal LM of Transformers; left in the mode (training or not) it was found in.
        ids: token ids `[N]`, at least two.
        window: tokens a forward pass, at least two; the model's own limit is the caller's to respect.
        prefix: ids put before every window, such as a BOS token; they are not predicted.
        on_window: called after every window with the number of tokens of `ids` it held.

    Returns:
        A `Perplexity`; `value` is inf where the loss exceeds what exp can give, nan where the model gave nan.

    Raises:
        ValueError: for fewer than two tokens, a window below two, ids of several texts, or that are no integers.
    """
    ids, prefix = one_text(ids), one_text(prefix, "prefix").tolist()
    if window < 2:
        raise ValueError(f"window={window} is not allowed; allowed: 2 tokens or more")
    if len(ids) < 2:
        raise ValueError(f"the text holds {len(ids)} tokens; perplexity needs at least 2")
    pieces = [
        piece for piece in ids.split(window) if len(piece) > 1
    ]  # of a single token nothing is predicted
    losses, counts, times = [], [], []
    with evaluation_mode(model):
        for piece in pieces:
            loss, count, took = _score(model, piece, prefix)
            losses.append(loss)
            counts.append(count)
            times.append(took)
            if on_window:
                on_window(len(piece))
    predicted, read = sum(counts), sum(len(prefix) + len(piece) for piece in pieces)
    mean, by_window = (
        sum(losses) / predicted,
        tuple(loss / count for loss, count in zip(losses, counts)),
    )
    value = math.exp(mean) if not mean > LARGEST_EXPONENT else math.inf
    return Perplexity(value, mean, predicted, len(pieces), sum(times), read, by_window)


@torch.inference_mode()
def _score(
    model: torch.nn.Module, piece: torch.Tensor, prefix: Sequence[int]
) -> tuple[float, int, float]:
    """Summed negative log-likelihood of one window, tokens predicted, seconds of the forward pass."""
    device = next(model.parameters()).device
    tokens = torch.cat([torch.tensor(list(prefix), dtype=torch.long), piece]).to(device)
    start = time.perf_counter()
    logits = model(tokens[None], use_cache=False).logits[0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - start
    first = max(len(prefix), 1)  # the first token that has something before it to be predicted from
    losses = F.cross_entropy(logits[first - 1 : -1].float(), tokens[first:], reduction="none")
    return losses.double().sum().item(), len(losses), took
