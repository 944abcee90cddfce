"""What a rank computes of an attention layer under tensor parallelism, compared with docs/results/many_devices.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers.distributed import DistributedConfig

import hf_hyperattn as ha
from hf_hyperattn.engines import Options
from hf_hyperattn.mechanisms.base import HostCall, RankHeads
from tests.integration.parallel.parallel import PATCHES
from tests.integration.parallel.test_parallel import stock

PAGE = (Path(__file__).parents[3] / "docs" / "results" / "many_devices.md").read_text(
    encoding="utf-8"
)
ROWS = dict(re.findall(r"^\| ([^|]+) \| (their own|all) \|", PAGE, re.MULTILINE))


class Mesh:
    """Two ranks, of which this is one."""

    def __init__(self, rank: int):
        self.rank = rank

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return self.rank


def patched(name: str):
    """The `hyper` of a host with four query heads and, but for collaborative, two key heads."""
    family = "bert" if PATCHES[name]("llama") is None else "llama"
    model = ha.patch_model(stock(family), PATCHES[name](family))
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if ".hyper." in parameter_name:
                p.add_(0.5 * torch.randn_like(p))
    return next(m.hyper for m in model.modules() if hasattr(m, "hyper"))


def test_the_page_has_every_case():
    assert ROWS.keys() == PATCHES.keys()


@pytest.mark.parametrize("name", PATCHES)
def test_a_rank_computes_its_heads(name):
    hyper = patched(name)
    mixes = any(layer.mixes_heads for layer in hyper.layers())
    assert ROWS[name] == ("all" if mixes else "their own")
    if mixes:
        return
    query, hidden = torch.randn(2, 4, 9, 8), torch.randn(2, 9, 32)
    key, value = torch.randn(2, 2, 2, 9, 8)
    call = HostCall(query, key, value, 0.4, True, Options(is_causal=True), hidden=hidden)
    with torch.no_grad():
        whole, plain = (
            hyper(call)[0],
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=0.4, enable_gqa=True
            ),
        )
        assert (whole - plain).abs().max() > 1e-3
        for rank in (0, 1):
            heads = RankHeads(4, 2 * rank, Mesh(rank))
            parts = {n: heads.slice_rank(getattr(call, n), 1) for n in ("query", "key", "value")}
            part = hyper(replace(call, **parts, heads=heads))[0]
            assert (part - whole[:, 2 * rank : 2 * rank + 2]).abs().max() <= 1e-5


@pytest.mark.parametrize("cls", [hf.LlamaForCausalLM, hf.LlamaModel])
def test_heads_that_ranks_cannot_share_are_refused_before_weights_are_loaded(cls):
    model = ha.patch_model(
        stock("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=1),
        ha.ConeConfig(),
    )
    model.config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(
        ValueError,
        match="3 query heads and 1 key heads, .* 2 ranks; allowed: a tp_size that divides",
    ):
        cls(model.config)
