"""Head weights of a model patched with head_fusion: record them, train with them, report them.

A call keeps its weights only while `record_heads` is open. They are recorded with their gradients:

    with record_heads(model) as heads:
        loss = model(**inputs).loss
    loss = loss - 0.01 * heads.entropy(inputs["attention_mask"])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ..integration.attention.hyper import patched_hosts
from ..integration.patching.patch import base_model
from ..mechanisms.head_fusion.layer import HeadFusionLayer
from ..mechanisms.head_fusion.reference import entropy

#: Maps the weights beta [B, N, M] to 1 at heads that are kept and 0 at dropped heads.
Keep = Callable[[Tensor], Tensor]


@dataclass
class HeadRecord:
    """Head weights that were recorded while `record_heads` was open.

    Args:
        calls: For each layer name, the weights beta [B, N, M] of each call, with gradients if
            there were any. M is the number of heads that the patch fuses.
        lost: Whether a training model ran without gradients, although they were enabled when the
            recording began. Reentrant checkpointing does this.
    """

    calls: dict[str, list[Tensor]] = field(default_factory=dict)
    lost: bool = False

    def entropy(self, attention_mask: Tensor | None = None) -> Tensor:
        """Return the mean entropy of beta in nats, from 0 to log(M).

        It is averaged over tokens, then over calls. Add it to a loss so that each token uses fewer
        heads. Subtract it so that the weights do not collapse to a few heads.

        Args:
            attention_mask: [B, N], 1 at tokens that count. None: all tokens.

        Raises:
            ValueError: Nothing was recorded; the mask has another shape than the tokens; gradients
                are enabled, but the weights were recorded without.
        """
        if self.lost and torch.is_grad_enabled():
            raise ValueError(
                "the weights of heads were recorded without gradients, so their entropy trains "
                "nothing; allowed: gradient checkpointing with use_reentrant=False, or "
                "torch.no_grad() around entropy() to read it"
            )
        # Per call first: calls with many tokens count as much as short ones.
        means = [
            token_mean(entropy(beta), attention_mask)
            for betas in self.calls.values()
            for beta in betas
        ]
        if not means:
            raise ValueError(
                "no host weighed its heads while recording; run the model inside "
                "`with record_heads(model)`"
            )
        return torch.stack(means).mean()


def token_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of values [B, N, ...] over the tokens where the mask [B, N] is not 0."""
    if mask is None:
        return values.flatten(0, 1).mean(0)
    if mask.shape != values.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, the tokens of this call "
            f"{tuple(values.shape[:2])}; allowed: one number a token"
        )
    return values[mask.to(values.device).bool()].mean(0)


def fusion_layers(model: nn.Module) -> dict[str, list[HeadFusionLayer]]:
    """Return the head_fusion layers by the name of their attention layer.

    An attention layer has several if adapters hold copies.

    Raises:
        ValueError: The model has none.
    """
    layers = {}
    for name, host in patched_hosts(base_model(model)):
        parts = [m for m in host.get_submodule("hyper").modules() if isinstance(m, HeadFusionLayer)]
        if parts:
            layers[name] = parts
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no weights of heads; first call "
            "patch_model(model, HeadFusionConfig())"
        )
    return layers


@contextmanager
def record_heads(model: nn.Module) -> Iterator[HeadRecord]:
    """Record the head weights of all calls of a model while the block runs.

    Args:
        model: A model patched with head_fusion. Wrappers such as PEFT or torch.compile are allowed.

    Raises:
        ValueError: The model is not patched with head_fusion, or another recording is open.
    """
    record = HeadRecord()
    layers = fusion_layers(model)
    all_layers = [layer for group in layers.values() for layer in group]
    if any(layer.on_weights is not None for layer in all_layers):
        raise ValueError(
            "the weights of heads are being recorded already; use the record that is open"
        )
    learning = torch.is_grad_enabled() and model.training

    def record_weights(beta: Tensor, calls: list[Tensor]) -> None:
        calls.append(beta)
        # Reentrant checkpointing runs the forward pass without gradients. The error is raised
        # later, and only if the weights are used in a loss.
        record.lost = record.lost or (learning and not torch.is_grad_enabled())

    for name, group in layers.items():
        for layer in group:
            layer.on_weights = partial(record_weights, calls=record.calls.setdefault(name, []))
    try:
        yield record
    finally:
        for layer in all_layers:
            layer.on_weights = None


@contextmanager
def dropped_heads(model: nn.Module, drop: dict[str, Tensor] | float) -> Iterator[None]:
    """Drop some heads while the block runs: their outputs are 0, the others keep their weights.

    Args:
        model: A model patched with head_fusion.
        drop: For each layer name, the numbers of the heads to drop, counted among the heads that
            the patch fuses. Or a share from 0 to 1: every token drops this share of the heads of
            each layer, the ones with the smallest beta.

    Raises:
        ValueError: A layer or head does not exist, or the share is out of range.
    """
    layers = fusion_layers(model)
    keeps = keep_shares(layers, drop) if isinstance(drop, int | float) else keep_named(layers, drop)
    try:
        for name, keep in keeps.items():
            for layer in layers[name]:
                layer.keep = keep
        yield
    finally:
        for group in layers.values():
            for layer in group:
                layer.keep = None


def keep_shares(layers: dict[str, list[HeadFusionLayer]], share: float) -> dict[str, Keep]:
    """Return, for every layer, a function that drops a share of each token's heads."""
    if not 0 <= share <= 1:
        raise ValueError(
            f"drop={share!r} is not allowed; allowed: shares from 0 to 1, or heads by host"
        )

    def drop_least(beta: Tensor) -> Tensor:
        least = beta.topk(round(share * beta.shape[-1]), largest=False).indices
        return torch.ones_like(beta).scatter(-1, least, 0.0)

    return dict.fromkeys(layers, drop_least)


def keep_named(layers: dict[str, list[HeadFusionLayer]], drop: dict) -> dict[str, Keep]:
    """Return, for every named layer, a function that drops the given heads for all tokens."""
    keeps: dict[str, Keep] = {}
    for name, heads in drop.items():
        if name not in layers:
            raise ValueError(
                f"drop names the host {name!r}; allowed: {', '.join(list(layers)[:3])}, ..."
            )
        count = layers[name][0].count
        heads = torch.as_tensor(heads, dtype=torch.long).flatten()
        if len(heads) and not bool(((heads >= 0) & (heads < count)).all()):
            raise ValueError(
                f"drop names heads {heads.tolist()} of {name}; allowed: from 0 to {count - 1}"
            )
        kept = torch.ones(count).index_fill(0, heads, 0.0)
        # `kept.to(beta)` has the device and dtype of beta, and broadcasts over tokens.
        keeps[name] = kept.to
    return keeps


@dataclass(frozen=True)
class HeadUsage:
    """Which heads the tokens of an input use.

    Args:
        weights: For each layer name, M·beta [B, N, M]. A value of 1 is an even share.
        mask: [B, N], True at tokens that count. None: all tokens.
    """

    weights: dict[str, Tensor]
    mask: Tensor | None = None

    def mean(self) -> dict[str, Tensor]:
        """Return, for each layer, the mean M·beta [M] of its heads over the tokens."""
        return {name: token_mean(w, self.mask) for name, w in self.weights.items()}

    def entropy(self) -> dict[str, float]:
        """Return, for each layer, the mean entropy of beta divided by log(M).

        It is 1 if all heads have the same weight.
        """
        entropies = {}
        for name, weights in self.weights.items():
            count = weights.shape[-1]
            nats = float(token_mean(entropy(weights / count), self.mask))
            # With a single head, log(M) is 0.
            entropies[name] = nats / max(math.log(count), 1e-9)
        return entropies

    def by_host(self) -> str:
        """Return a Markdown table with the entropy and the mean M·beta of the heads of each layer.

        It has one row per attention layer.
        """
        means = self.mean()
        entropies = self.entropy()
        columns = max(len(mean) for mean in means.values())
        rows = []
        for name, mean in means.items():
            numbers = [f"{x:.2f}" for x in mean.tolist()]
            # Layers may fuse different numbers of heads.
            empty = [""] * (columns - len(numbers))
            rows.append([name, f"{entropies[name]:.3f}", *numbers, *empty])
        return format_table(["host", "entropy", *(f"head {m}" for m in range(columns))], rows)

    def by_token(self, tokens: list[str], index: int = 0, top: int = 3) -> str:
        """Return a Markdown table with the heads that each token uses most and least.

        It has one row per token of one text of the batch.

        Args:
            tokens: Text of every token.
            index: Number of the text in the batch.
            top: Number of heads to name, as "layer.head (M·beta)", where "layer" counts the
                patched attention layers.
        """
        rows = []
        for place, token in enumerate(tokens):
            if self.mask is not None and not self.mask[index, place]:
                continue
            # All heads of all layers compete for the places in a row.
            shares = []
            for layer, weights in enumerate(self.weights.values()):
                for head, weight in enumerate(weights[index, place].tolist()):
                    shares.append((weight, f"{layer}.{head}"))
            shares.sort(reverse=True)
            most = shares[:top]
            # From the end, the smallest first.
            least = shares[: -top - 1 : -1]
            cells = [", ".join(f"{n} ({x:.2f})" for x, n in part) for part in (most, least)]
            rows.append([f"`{token}`", *cells])
        return format_table(["token", "heads it uses most", "heads it uses least"], rows)


def head_usage(model: nn.Module, **inputs) -> HeadUsage:
    """Run a model patched with head_fusion and report which heads its tokens use.

    Args:
        model: The model, which may be wrapped. It runs in its current mode, without gradients.
        inputs: Keyword arguments of the model. If `attention_mask` has the shape of the tokens, it
            says which of them count.

    Raises:
        ValueError: The model is not patched with head_fusion.
    """
    with record_heads(model) as record, torch.no_grad():
        model(**inputs)
    # M·beta, so that values of layers with different numbers of heads can be compared.
    weights = {
        name: calls[-1].float() * calls[-1].shape[-1]
        for name, calls in record.calls.items()
        if calls
    }
    mask = inputs.get("attention_mask")
    # A 4D mask, or the mask of another part of the model, says nothing about these tokens.
    if mask is not None and any(mask.shape != w.shape[:2] for w in weights.values()):
        mask = None
    return HeadUsage(weights, None if mask is None else mask.bool())


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
