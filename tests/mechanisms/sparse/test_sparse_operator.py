"""Sparse rules in compiled calls: the operator gives what the definition of the rules gives."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CompileConfig

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import operator
from hf_hyperattn.mechanisms.sparse.reference import list_seen
from hf_hyperattn.rules import Exact, Pages, Window
from tests.integration.attention.serving import FEW, check_equal, generate, generate_alone
from tests.integration.attention.test_continuous_batching import steep

RULES = [Exact(), Window(near=3, sinks=1), Pages(page=2, near=2, sinks=1, top=1, query="own")]
SCALE, PAD = 0.4, 3


def call(queries: int, keys: int) -> tuple:
    """Arguments of the operator: two rows, the first with padding, and four empty slots behind the keys."""
    draw = torch.Generator().manual_seed(5)
    q = torch.randn(2, 3, queries, 8, generator=draw)
    k, v = torch.randn(2, 2, 1, keys + 4, 8, generator=draw)
    own = torch.arange(keys - queries, keys)[:, None]
    mask = (torch.arange(keys + 4) <= own).expand(2, 1, -1, -1).clone()
    mask[0, :, :, :PAD] = False
    rules = ha.SparseConfig(RULES).head_rules(3, "this call")
    settings = (operator.write_rules(rules), SCALE, None, None, None, 0, False)
    return q, k, q, k, v, mask, None, None, *settings


@pytest.mark.parametrize("queries", [1, 4])
def test_the_definition(queries):
    """Over the real keys alone, in float64."""
    keys = 13
    arguments = call(queries, keys)
    q, k, _, _, v, *_ = arguments
    out = operator.sparse(*arguments)
    for row, pad in ((0, PAD), (1, 0)):
        key, value = k[row, 0, pad:keys].double(), v[row, 0, pad:keys].double()
        for head, rule in enumerate(RULES):
            own = torch.zeros(len(key), 8, dtype=torch.float64)
            own[-queries:] = q[row, head].double()
            sets = list_seen(rule, own, key, SCALE)
            for i in range(queries):
                place = len(key) - queries + i
                seen = sorted(sets[place])
                weights = (key[seen] @ own[place] * SCALE).softmax(0)
                expected = (weights @ value[seen]).float()
                torch.testing.assert_close(out[row, head, i], expected, rtol=1e-5, atol=1e-6)


def test_rules_survive_as_text():
    rules = ha.SparseConfig([RULES, RULES[::-1]], lengths=(8, 64)).head_rules(3, "this call")
    text = operator.write_rules(rules)
    assert operator.parse_rules(text).by_length == rules.by_length
    assert operator.parse_rules(text) is operator.parse_rules(text)


def test_opcheck_and_flops():
    arguments = call(1, 13)
    torch.library.opcheck(operator.sparse, arguments, test_utils=("test_schema", "test_faketensor"))
    with FlopCounterMode(display=False) as counter:
        operator.sparse(*arguments)
    # Two rows, three heads, one query over 17 slots, two products of width 8, two operations each.
    share = sum(rule.share(17) for rule in RULES) / 3
    assert counter.get_total_flops() == int(2 * 2 * 3 * share * 17 * (8 + 8))


@pytest.mark.slow
def test_inductor():
    """A static cache, and each step as one graph of the compiler that users have."""
    torch._dynamo.reset()
    rules = ha.SparseConfig([RULES[1], RULES[2]] * 2)
    model = ha.patch_model(steep(num_hidden_layers=2), rules, mode="replace")
    compiled = CompileConfig(fullgraph=True, mode="default")
    compiled._compile_all_devices = True
    how = dict(cache_implementation="static", compile_config=compiled)
    check_equal(generate(model, FEW, **how), generate_alone(model, FEW))
