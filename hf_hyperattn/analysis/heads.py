"""The weights of heads in a model patched with head_fusion: recorded, as a regulariser, and as a report.

Nothing is kept of a call unless a `record_heads` is open, and then the weights come with their gradients:

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

from ..integration.checkpoint_config import patched_hosts
from ..integration.patching import base_model
from ..mechanisms.head_fusion.layer import HeadFusionLayer
from ..mechanisms.head_fusion.reference import entropy

#: For beta [B, N, M], 1 at heads that take part and 0 at others.
Keep = Callable[[Tensor], Tensor]


@dataclass
class HeadRecord:
    """What hosts weighed their heads with, while a `record_heads` was open.

    Args:
        calls: for every host, by name, beta [B, N, M] of each of its calls, with gradients where there are any. M are
            the heads that the patch chose.
        lost: whether a model in training was run without gradients, though they were on where the record began, as
            reentrant checkpointing does.
    """

    calls: dict[str, list[Tensor]] = field(default_factory=dict)
    lost: bool = False

    def entropy(self, attention_mask: Tensor | None = None) -> Tensor:
        """Mean entropy of beta in nats, over tokens first and then over calls: from 0 to log(M).

        Add it to a loss to have fewer heads used by each token, subtract it to keep heads from collapsing.

        Args:
            attention_mask: [B, N], 1 at tokens that count; None: all do.

        Raises:
            ValueError: nothing was recorded, the mask is of another shape than the tokens, or gradients are on and the
                weights came without.
        """
        if self.lost and torch.is_grad_enabled():
            raise ValueError(
                "the weights of heads were recorded without gradients, so their entropy trains nothing; allowed: "
                "gradient checkpointing with use_reentrant=False, or torch.no_grad() around entropy() to read it"
            )
        means = [
            token_mean(entropy(beta), attention_mask)
            for betas in self.calls.values()
            for beta in betas
        ]
        if not means:
            raise ValueError(
                "no host weighed its heads while recording; run the model inside `with record_heads(model)`"
            )
        return torch.stack(means).mean()


def token_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of [B, N, ...] over the tokens where the mask [B, N] is not 0."""
    if mask is None:
        return values.flatten(0, 1).mean(0)
    if mask.shape != values.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, the tokens of this call {tuple(values.shape[:2])}; "
            "allowed: one number a token"
        )
    return values[mask.to(values.device).bool()].mean(0)


def fusion_layers(model: nn.Module) -> dict[str, list[HeadFusionLayer]]:
    """The layers that weigh heads, by the name of their host; several where an adapter has copies.

    Raises:
        ValueError: the model has none.
    """
    layers = {}
    for name, host in patched_hosts(base_model(model)):
        parts = [m for m in host.get_submodule("hyper").modules() if isinstance(m, HeadFusionLayer)]
        if parts:
            layers[name] = parts
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no weights of heads; first call patch_model(model, HeadFusionConfig())"
        )
    return layers


@contextmanager
def record_heads(model: nn.Module) -> Iterator[HeadRecord]:
    """Record the weights of heads in all calls of a model, which may be wrapped by PEFT, the compiler or others.

    Raises:
        ValueError: the model is not patched with head_fusion, or records already.
    """
    record, layers = HeadRecord(), fusion_layers(model)
    flat = [layer for group in layers.values() for layer in group]
    if any(layer.on_weights is not None for layer in flat):
        raise ValueError(
            "the weights of heads are being recorded already; use the record that is open"
        )
    learning = torch.is_grad_enabled() and model.training

    def note(beta: Tensor, calls: list[Tensor]) -> None:
        calls.append(beta)
        record.lost = record.lost or (learning and not torch.is_grad_enabled())

    for name, group in layers.items():
        for layer in group:
            layer.on_weights = partial(note, calls=record.calls.setdefault(name, []))
    try:
        yield record
    finally:
        for layer in flat:
            layer.on_weights = None


@contextmanager
def dropped_heads(model: nn.Module, drop: dict[str, Tensor] | float) -> Iterator[None]:
    """The model without some of its heads, for a while: their outputs are 0, the others keep their weights.

    Args:
        model: a model patched with head_fusion.
        drop: for a host's name the numbers of the heads to drop, counted among the heads that the patch chose; or a
            share from 0 to 1: every token drops that share of the heads of each host, those with the least beta.

    Raises:
        ValueError: an unknown host or head, or a share out of range.
    """
    layers = fusion_layers(model)
    keeps = keep_shares(layers, drop) if isinstance(drop, int | float) else keep_named(layers, drop)
    try:
        for name, keep in keeps.items():
            for layer in layers[name]:
                layer.keep = keep
        yield
    finally:
        for layer in (layer for group in layers.values() for layer in group):
            layer.keep = None


def keep_shares(layers: dict[str, list[HeadFusionLayer]], share: float) -> dict[str, Keep]:
    """For every host, what keeps a token's heads but for a share of them."""
    if not 0 <= share <= 1:
        raise ValueError(
            f"drop={share!r} is not allowed; allowed: shares from 0 to 1, or heads by host"
        )

    def keep(beta: Tensor) -> Tensor:
        least = beta.topk(round(share * beta.shape[-1]), largest=False).indices
        return torch.ones_like(beta).scatter(-1, least, 0.0)

    return dict.fromkeys(layers, keep)


def keep_named(layers: dict[str, list[HeadFusionLayer]], drop: dict) -> dict[str, Keep]:
    """For every host that is named, what keeps its other heads."""
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
        keeps[name] = kept.to
    return keeps


@dataclass(frozen=True)
class HeadUsage:
    """Which heads the tokens of an input use.

    Args:
        weights: for every host, by name, M·beta [B, N, M]: 1 where a head has its even share.
        mask: [B, N], True at tokens that count; None: all do.
    """

    weights: dict[str, Tensor]
    mask: Tensor | None = None

    def mean(self) -> dict[str, Tensor]:
        """For every host, M·beta [M] of its heads over the tokens."""
        return {name: token_mean(w, self.mask) for name, w in self.weights.items()}

    def entropy(self) -> dict[str, float]:
        """For every host, the mean entropy of beta over the largest there is: 1 where all heads have the same."""
        return {
            name: float(token_mean(entropy(w / w.shape[-1]), self.mask))
            / max(math.log(w.shape[-1]), 1e-9)
            for name, w in self.weights.items()
        }

    def by_host(self) -> str:
        """A Markdown table: a row for every host, its entropy, and the mean M·beta of each of its heads."""
        means, entropies = self.mean(), self.entropy()
        most = max(len(m) for m in means.values())
        rows = []
        for name, mean in means.items():
            numbers = [f"{x:.2f}" for x in mean.tolist()]
            rows.append([name, f"{entropies[name]:.3f}", *numbers, *[""] * (most - len(numbers))])
        return markdown(["host", "entropy", *(f"head {m}" for m in range(most))], rows)

    def by_token(self, tokens: list[str], index: int = 0, top: int = 3) -> str:
        """A Markdown table: a row for every token of one row of the batch, and the heads that it uses most.

        Args:
            tokens: what to call them, one for every token.
            index: of the row in the batch.
            top: how many heads to name, as "layer.head (M·beta)", the layer being the host's place among the hosts.
        """
        rows = []
        for at, token in enumerate(tokens):
            if self.mask is not None and not self.mask[index, at]:
                continue
            weights = enumerate(w[index, at].tolist() for w in self.weights.values())
            shares = [(x, f"{layer}.{head}") for layer, w in weights for head, x in enumerate(w)]
            shares.sort(reverse=True)
            parts = (shares[:top], shares[: -top - 1 : -1])
            rows.append(
                [f"`{token}`", *(", ".join(f"{n} ({x:.2f})" for x, n in part) for part in parts)]
            )
        return markdown(["token", "heads it uses most", "heads it uses least"], rows)


def head_usage(model: nn.Module, **inputs) -> HeadUsage:
    """Run a model patched with head_fusion, and report which heads its tokens use.

    Args:
        model: the model, also wrapped; it runs as it is, without gradients.
        inputs: of the model, as keywords; `attention_mask` says which tokens count, where it is of their shape.

    Raises:
        ValueError: the model is not patched with head_fusion.
    """
    with record_heads(model) as record, torch.no_grad():
        model(**inputs)
    weights = {
        name: calls[-1].float() * calls[-1].shape[-1]
        for name, calls in record.calls.items()
        if calls
    }
    mask = inputs.get("attention_mask")
    if mask is not None and any(mask.shape != w.shape[:2] for w in weights.values()):
        mask = None
    return HeadUsage(weights, None if mask is None else mask.bool())


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
