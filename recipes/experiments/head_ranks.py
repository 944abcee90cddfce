"""Which heads of a Llama-like model patched with head_fusion matter least, by several measures."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_hyperattn.analysis.heads import HeadUsage, fusion_layers

#: A head: its host's name and its number.
Ranks = dict[tuple[str, int], float]


@dataclass
class Heads:
    """What the measures look at.

    Args:
        model: patched, with `o_proj` and `v_proj` in its hosts.
        usage: the weights of heads on some texts.
        texts: token ids [B, N] of these texts.
    """

    model: nn.Module
    usage: HeadUsage | None
    texts: Tensor | None

    def hosts(self) -> dict[str, tuple[nn.Module, int]]:
        """Every host by name, and how many heads it has."""
        return {
            n: (self.model.get_submodule(n), layers[0].count)
            for n, layers in fusion_layers(self.model).items()
        }


def by_beta(heads: Heads) -> Ranks:
    """Mean beta over tokens, times the number of heads."""
    means = heads.usage.mean()
    return {(name, head): float(x) for name, mean in means.items() for head, x in enumerate(mean)}


def by_weight_norm(heads: Heads) -> Ranks:
    """Product of the norms of the head's value and output projections."""
    found = {}
    for name, (host, count) in heads.hosts().items():
        outputs = host.o_proj.weight.detach().unflatten(1, (count, -1))  # [width, heads, d]
        values = host.v_proj.weight.detach().unflatten(
            0, (-1, outputs.shape[-1])
        )  # [kv heads, d, width]
        group = count // len(values)
        for head in range(count):
            found[name, head] = float(outputs[:, head].norm() * values[head // group].norm())
    return found


def by_contribution(heads: Heads) -> Ranks:
    """Mean norm of what the weighted head adds to the residual stream, over the tokens of the texts."""
    found: Ranks = {}

    def listen(name: str, count: int):
        def hook(module, args):
            parts = torch.einsum(
                "bnhd,ohd->bnho",
                args[0].unflatten(-1, (count, -1)),
                module.weight.unflatten(1, (count, -1)),
            )
            for head, x in enumerate(parts.norm(dim=-1).mean((0, 1)).tolist()):
                found[name, head] = x

        return hook

    hosts = heads.hosts()
    handles = [
        h.o_proj.register_forward_pre_hook(listen(n, count)) for n, (h, count) in hosts.items()
    ]
    try:
        with torch.no_grad():
            heads.model(input_ids=heads.texts, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def by_gradient(heads: Heads) -> Ranks:
    """|dL/dxi| of a factor xi on the head's output, summed over tokens and divided by the norm of its layer: the head
    importance of Michel et al. (arXiv 1905.10650), by token as their code has it.
    """
    found: Ranks = {}
    hosts = heads.hosts()
    totals = {name: torch.zeros(count) for name, (_, count) in hosts.items()}
    for row in heads.texts:
        inputs, loss = inputs_and_loss(
            heads.model, {n: host.o_proj for n, (host, _) in hosts.items()}, row
        )
        for (name, x), gradient in zip(
            inputs.items(), torch.autograd.grad(loss, list(inputs.values()))
        ):
            by_head = (x * gradient).detach().unflatten(-1, (len(totals[name]), -1)).sum(-1)
            totals[name] += by_head.abs().sum((0, 1))
    for name, total in totals.items():
        for head, x in enumerate((total / total.norm()).tolist()):
            found[name, head] = x
    return found


def inputs_and_loss(
    model: nn.Module, modules: dict[str, nn.Module], ids: Tensor
) -> tuple[dict, Tensor]:
    """What enters each of the modules when the model reads the ids [N], and its loss, with their graph."""
    found: dict[str, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: found.update({name: args[0]}))
        for name, module in modules.items()
    ]
    try:
        return found, model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
    finally:
        for handle in handles:
            handle.remove()


def by_layer(ranks: Ranks) -> Ranks:
    """Each head's measure over the mean of its layer."""
    means: dict[str, list[float]] = {}
    for (name, _), x in ranks.items():
        means.setdefault(name, []).append(x)
    return {
        (name, head): x * len(means[name]) / sum(means[name]) for (name, head), x in ranks.items()
    }


def random_ranks(heads: Heads, seed: int) -> Ranks:
    """A random order, the same for a seed."""
    draw = random.Random(seed)
    return {
        (name, head): draw.random()
        for name, (_, count) in heads.hosts().items()
        for head in range(count)
    }


RANKS = {
    "beta": by_beta,
    "gradient": by_gradient,
    "contribution": by_contribution,
    "contribution, by layer": lambda heads: by_layer(by_contribution(heads)),
    "weight norm": by_weight_norm,
    "weight norm, by layer": lambda heads: by_layer(by_weight_norm(heads)),
}
