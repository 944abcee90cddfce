"""Memory of sparse rules and of HSA on a GPU, counted on a CPU.

Pages are chosen and all tensors are made, but kernels are not run.
"""

import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_hyperattn.engines import triton as engine
from hf_hyperattn.functional import hierarchical_attention, sparse_attention
from hf_hyperattn.mechanisms.hsa.windowed import key as hsa_key
from hf_hyperattn.rules import Pages, Window

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.extras
#: 32 heads, as `inject` gives them to a model: pages of some sizes, single keys, windows.
RULES = (
    *[Pages(128, 4, 16, 200, "mean", "previous", 16)] * 14,
    *[Pages(64, 4, 1, 2000, "mean", "previous", 16, channels=0.25)] * 6,
    *[Pages(64, 4, 32, 64, "bounds", "first", 64)] * 6,
    *[Window(1024, 4)] * 6,
)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all living tensors, and remembers the most."""

    def __init__(self, *tensors):
        super().__init__()
        self.sizes, self.peak = {}, 0
        self.add(tensors)

    def add(self, tensors):
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor) and id(t.untyped_storage()._cdata) not in self.sizes:
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, key, None)
        self.peak = max(self.peak, sum(self.sizes.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.add(found)
        return found


def count_sparse(q, k, v):
    return sparse_attention(q, k, v, rules=RULES, is_causal=True, backend="triton")


def count_hsa(q, k, v, top_k):
    settings = {"hierarchy": (16, 256, 4096), "near": 1024, "sinks": 4, "refine_top_k": top_k}
    return hierarchical_attention(
        q, k, v, tying="key", is_causal=True, backend="triton", **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "attend",
    [count_sparse, partial(count_hsa, top_k=0)],
    ids=["sparse", "hsa"],
)
def test_a_long_prompt_takes_little_more_memory_than_dense_attention(monkeypatch, attend):
    from triton.runtime.jit import JITFunction

    length = 32768

    monkeypatch.setattr(engine, "find_device_obstacle", lambda *about: None)
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, **named: None)
    # What an operator makes inside is hidden from a dispatch mode.
    monkeypatch.setattr("hf_hyperattn.engines.selected.is_direct", lambda *tensors: True)
    monkeypatch.setattr(hsa_key, "count_dispatch_modes", lambda: 0)
    q, k, v = (torch.randn(1, 32, length, 64, dtype=torch.bfloat16) for _ in "qkv")
    with torch.no_grad(), PeakBytes(q, k, v) as counted:
        out = attend(q, k, v)
    dense = sum(t.numel() * t.element_size() for t in (q, k, v, out))
    assert counted.peak <= 1.2 * dense
