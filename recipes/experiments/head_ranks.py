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
        values = host.v_proj.weight.detach().unflatten(0, (-1, outputs.shape[-1]))  # [kv heads, d, width]
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
                "bnhd,ohd->bnho", args[0].unflatten(-1, (count, -1)), module.weight.unflatten(1, (count, -1))
            )
            for head, x in enumerate(parts.norm(dim=-1).mean((0, 1)).tolist()):
                found[name, head] = x

        return hook

    hosts = heads.hosts()
    handles = [h.o_proj.register_forward_pre_hook(listen(n, count)) for n, (h, count) in hosts.items()]
    try:
        with torch.no_grad():
            heads.model(input_ids=heads.texts, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def random_ranks(heads: Heads, seed: int) -> Ranks:
    """A random order, the same for a seed."""
    draw = random.Random(seed)
    return {
        (name, head): draw.random() for name, (_, count) in heads.hosts().items() for head in range(count)
    }


RANKS = {"beta": by_beta, "contribution": by_contribution, "weight norm": by_weight_norm}
