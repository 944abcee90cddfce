"""Calls without rows, queries or keys: they give an empty output or zeros, as the definition does, and kill nothing.

The calls are made in a process of their own, since a division by zero in a kernel ends the process.
"""

from functools import partial
from pathlib import Path

import torch

from hf_hyperattn import functional as F
from hf_hyperattn.mechanisms.sparse import Pages, Window
from tests.forking import run_code

ROOT = Path(__file__).parents[2]
KEY = dict(hierarchy=(4, 16), tying="key", near=4, refine_top_k=2)
PREVIOUS = Pages(4, 1, 4, 2, query="previous", chunk=4)


def sparse(rule, query, key, value, **rest):
    first = max(0, key.shape[2] - query.shape[2])
    return F.sparse_attention(query, key, value, rules=rule, is_causal=True, first=first, **rest)


def tied(query, key, value, **rest):
    return F.hierarchical_attention(
        query, key, value, **KEY, is_causal=query.shape[2] == key.shape[2], **rest
    )


def three_way(query, key, value, **rest):
    return F.trilinear_attention(query, key, value, key, value, windows=(5, 7), **rest)


FUNCTIONS = {
    "cone": F.cone_attention,
    "hyperbolic": F.hyperbolic_attention,
    "lorentz": partial(F.hyperbolic_attention, distance="squared_lorentz", aggregation="mean"),
    "hype": partial(F.hype_attention, mu=0.01, tau=1.0),
    "talking_heads": partial(F.talking_heads_attention, before=torch.eye(2), after=torch.eye(2)),
    "mkl": partial(F.mkl_attention, beta=torch.full((2,), 0.3)),
    "trilinear": three_way,
    "hsa key": tied,
    "hsa both": partial(F.hierarchical_attention, hierarchy=(4, 16)),
    "window": partial(sparse, Window(8, 2)),
    "pages": partial(sparse, Pages(4, 1, 4, 2)),
    "pages by the queries before": partial(sparse, PREVIOUS),
}
#: Functions without the engine "cpu": those of HSA have kernels of their own.
WITHOUT_KERNEL = ("hsa key", "hsa both", "talking_heads", "trilinear")
#: Batch, queries and keys.
SIZES = [
    (0, 1, 255),
    (0, 3, 600),
    (0, 100, 100),
    (0, 0, 0),
    (1, 0, 100),
    (1, 100, 0),
    (1, 1, 0),
    (2, 0, 0),
]


def check_calls(call) -> None:
    torch.set_num_threads(2)
    for batch, queries, keys in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for learns in (False, True):
                inputs = [
                    torch.ones(batch, 2, n, 16, dtype=dtype).requires_grad_(learns)
                    for n in (queries, keys, keys)
                ]
                out = call(*inputs)
                assert out.shape == inputs[0].shape and out.dtype == dtype
                assert not out.any()
                if learns:
                    out.sum().backward()
                    assert all(t.grad.shape == t.shape and not t.grad.any() for t in inputs)


def test_empty_calls():
    """All functions, each named before its calls; a new process, since threads of this one do not survive a fork."""
    code = "from tests.engines.test_empty import check_all; check_all()"
    done = run_code(code, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def check_all() -> None:
    for name, function in FUNCTIONS.items():
        print(name, flush=True)
        check_calls(function if name in WITHOUT_KERNEL else partial(function, backend="cpu"))
