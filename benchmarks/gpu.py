"""Measure a GPU in about eight minutes: its limits, how close our kernels come, and which of them take the time.

    python benchmarks/gpu.py                      all groups in order; each row is written as soon as it is there
    python benchmarks/gpu.py --groups anchors
    python benchmarks/gpu.py --device cpu         small sizes on a CPU: shows that the script runs, measures nothing

Groups:

- anchors: bandwidth of a copy; attention of FlashAttention-2 and of cuDNN, forward and with the backward pass.
- forward: every score on the Triton kernels, with the host (`wall_ms`) and as the replay of a CUDA graph (`graph_ms`).
  If `wall_ms` is much longer, the processor is the limit and not the GPU. `over_base`: over FlashAttention-2.
- training: forward and backward pass, with the host only.
- decoding: one query and 8,192 keys, in units of SDPA.
- kernels: the kernels that one call launches, with their times.
- sparse: sparse rules by head, prompts and one query, in units of FlashAttention-2 and of SDPA. `share` is the share of
  the pairs that the rules compute; `choice_ms` is the time without the attention kernels, in which pages are chosen.
- hsa: prompts with tied keys, without and with refinement, in the same columns.

Rows of `forward` also hold the error of sampled query rows against the definition in float64.
If a score fails, its row
holds the error message and the run goes on. If a baseline fails, the run stops.

Results: benchmarks/results/gpu-<chip>.json, with chip and versions.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from common import environment
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_hyperattn import functional
from hf_hyperattn.mechanisms.hsa.pairs import count_query_pairs
from hf_hyperattn.rules import Pages, Window
from hf_hyperattn.utils.files import write_atomically

RESULTS = Path(__file__).parent / "results"


class Shape(NamedTuple):
    """Batch, heads, tokens, head dimension."""

    batch: int
    heads: int
    tokens: int
    dim: int


#: Two for each length, of equal work; 64 and 128 are the head dimensions of most models.
SHAPES = [
    Shape(8, 32, 2048, 64),
    Shape(8, 16, 2048, 128),
    Shape(2, 32, 8192, 64),
    Shape(2, 16, 8192, 128),
]
SMALL = [Shape(1, 2, 64, 16)]
#: Rows whose error is found: the definition in float64 of all rows would take longer than the measurements.
SAMPLED = 16
BACKENDS = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def attend_hype(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options
) -> torch.Tensor:
    """Return attention with the HyPE bias, where the queries are the last tokens."""
    keys = key.shape[2]
    places = torch.arange(keys, device=key.device)
    return functional.hype_attention(
        query,
        key,
        value,
        mu=0.1,
        tau=0.05,
        query_positions=places[keys - query.shape[2] :],
        key_positions=places,
        **options,
    )


SCORES: dict[str, Callable] = {
    "umbral": partial(functional.cone_attention, variant="umbral"),
    "penumbral": partial(functional.cone_attention, variant="penumbral"),
    "geodesic": partial(functional.hyperbolic_attention, aggregation="mean"),
    "squared Lorentz": partial(
        functional.hyperbolic_attention, distance="squared_lorentz", aggregation="mean"
    ),
    "hype": attend_hype,
}


class Machine:
    """Measures on one device.

    Args:
        device: "cuda", or "cpu" to see that the script runs.
        seconds: Time for each measurement.
    """

    def __init__(self, device: str, seconds: float):
        self.device, self.seconds = device, seconds
        self.is_gpu = device == "cuda"
        self.shapes = SHAPES if self.is_gpu else SMALL
        self.backend = "triton" if self.is_gpu else "auto"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        #: What our kernels are compared with; None: what SDPA chooses.
        self.fastest = SDPBackend.FLASH_ATTENTION if self.is_gpu else None

    def wait(self) -> None:
        """Return when the device has done its work."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def time_by_clock(self, call: Callable) -> float:
        """Return milliseconds of a call, host included: the median of calls that fill `seconds`."""
        for _ in range(3):
            call()
        self.wait()
        times = []
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    def time_replay(self, call: Callable) -> float | None:
        """Return milliseconds of a call as the replay of a CUDA graph: without the host. None on a CPU."""
        if not self.is_gpu:
            return None
        from triton.testing import do_bench_cudagraph

        return do_bench_cudagraph(call, rep=int(1e3 * self.seconds), return_mode="median")

    def make_inputs(
        self, shape: Shape, queries: int | None = None, grad: bool = False
    ) -> list[torch.Tensor]:
        """Return query, key and value with numbers of unit size."""
        generator = torch.Generator(self.device).manual_seed(0)
        lengths = (queries or shape.tokens, shape.tokens, shape.tokens)
        options = {"device": self.device, "dtype": self.dtype, "generator": generator}
        sizes = [(shape.batch, shape.heads, n, shape.dim) for n in lengths]
        return [torch.randn(size, requires_grad=grad, **options) for size in sizes]


def attend_by(backend: SDPBackend | None, *vectors: torch.Tensor) -> torch.Tensor:
    """Return causal attention by one kernel of torch; None: by the one that torch chooses."""
    if backend is None:
        return scaled_dot_product_attention(*vectors, is_causal=True)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(*vectors, is_causal=True)


def differentiate(attend: Callable, vectors: list[torch.Tensor], grad: torch.Tensor) -> tuple:
    """Return the gradients of one call by its vectors."""
    return torch.autograd.grad(attend(*vectors), vectors, grad)


def find_error(score: Callable, machine: Machine, shape: Shape, out: torch.Tensor) -> float:
    """Return max |out - expected| / max |expected| for sampled rows of two heads; expected in float64."""
    query, key, value = (t[:1, :2].double() for t in machine.make_inputs(shape))
    rows = torch.linspace(
        0, shape.tokens - 1, min(SAMPLED, shape.tokens), device=query.device
    ).long()
    expected = [
        score(
            query[:, :, row : row + 1],
            key[:, :, : row + 1],
            value[:, :, : row + 1],
            backend="reference",
        )
        for row in rows.tolist()
    ]
    found = out[:1, :2][:, :, rows].double()
    return (
        (found - torch.cat(expected, 2)).abs().max() / torch.cat(expected, 2).abs().max()
    ).item()


def time_call(machine: Machine, call: Callable) -> float:
    """Return milliseconds of a call: as the replay of a graph on a GPU, by the clock on a CPU."""
    replay = machine.time_replay(call)
    return machine.time_by_clock(call) if replay is None else replay


def measure_anchors(machine: Machine) -> Iterator[dict]:
    """Yield what the GPU can do: a copy, and attention by torch's own kernels."""
    numbers = 2**30 if machine.is_gpu else 2**16
    source, target = (
        torch.empty(numbers, device=machine.device, dtype=torch.bfloat16) for _ in range(2)
    )
    copy_ms = time_call(machine, partial(target.copy_, source))
    yield {"what": "copy", "terabytes_per_second": 2 * source.nbytes / copy_ms / 1e9}
    del source, target
    for shape in machine.shapes:
        for name, backend in BACKENDS.items() if machine.is_gpu else [("SDPA", None)]:
            yield describe_row(name, shape) | attempt(measure_torch, machine, shape, backend)


def measure_torch(machine: Machine, shape: Shape, backend: SDPBackend | None) -> dict:
    """Return the times of one of torch's kernels, and how many operations it does a second."""
    attend = partial(attend_by, backend)
    vectors = machine.make_inputs(shape)
    with torch.no_grad():
        forward = time_call(machine, lambda: attend(*vectors))
    leaves = machine.make_inputs(shape, grad=True)
    grad = torch.randn_like(vectors[0])
    training = machine.time_by_clock(lambda: differentiate(attend, leaves, grad))
    # Two products for each visible pair, half of all pairs.
    flops = 2 * shape.batch * shape.heads * shape.tokens**2 * shape.dim
    return {"forward_ms": forward, "training_ms": training, "teraflops": flops / forward / 1e9}


def measure_forward(machine: Machine) -> Iterator[dict]:
    """Yield each score's forward pass, by the clock and as the replay of a graph."""
    for shape in machine.shapes:
        vectors = machine.make_inputs(shape)
        with torch.no_grad():
            base = time_call(machine, lambda vectors=vectors: attend_by(machine.fastest, *vectors))
        for name in SCORES:
            row = describe_row(name, shape) | {"base_ms": base}
            yield row | attempt(measure_score, machine, name, shape, vectors, base)


def measure_score(
    machine: Machine, name: str, shape: Shape, vectors: list[torch.Tensor], base: float
) -> dict:
    """Return the times and the error of one score's forward pass."""
    attend = partial(SCORES[name], *vectors, is_causal=True, backend=machine.backend)
    with torch.no_grad():
        error = find_error(SCORES[name], machine, shape, attend())
        wall = machine.time_by_clock(attend)
        graph = machine.time_replay(attend)
    ratio = (wall if graph is None else graph) / base
    return {"wall_ms": wall, "graph_ms": graph, "over_base": ratio, "error": error}


def measure_training(machine: Machine) -> Iterator[dict]:
    """Yield each score's forward and backward pass."""
    for shape in machine.shapes[:2]:
        leaves = machine.make_inputs(shape, grad=True)
        grad = torch.randn_like(leaves[0])
        base = time_gradients(machine, partial(attend_by, machine.fastest), leaves, grad, 1.0)
        for name, score in SCORES.items():
            attend = partial(score, is_causal=True, backend=machine.backend)
            row = describe_row(name, shape) | {"base_ms": base["wall_ms"]}
            yield row | attempt(time_gradients, machine, attend, leaves, grad, base["wall_ms"])


def time_gradients(
    machine: Machine, attend: Callable, leaves: list[torch.Tensor], grad: torch.Tensor, base: float
) -> dict:
    """Return the time of a forward and backward pass, and its ratio to `base` milliseconds."""
    wall = machine.time_by_clock(lambda: differentiate(attend, leaves, grad))
    return {"wall_ms": wall, "over_base": wall / base}


def measure_decoding(machine: Machine) -> Iterator[dict]:
    """Yield one query's time over SDPA's, with 8,192 keys."""
    shape = Shape(8, 32, 8192, 64) if machine.is_gpu else SMALL[0]
    vectors = machine.make_inputs(shape, queries=1)
    with torch.no_grad():
        base = machine.time_by_clock(lambda: scaled_dot_product_attention(*vectors))
        for name in SCORES:
            row = describe_row(name, shape) | {"base_ms": base}
            yield row | attempt(decode_once, machine, name, vectors, base)


def decode_once(machine: Machine, name: str, vectors: list[torch.Tensor], base: float) -> dict:
    """Return the time of one query of a score, and its ratio to `base` milliseconds."""
    wall = machine.time_by_clock(partial(SCORES[name], *vectors, backend=machine.backend))
    return {"wall_ms": wall, "over_base": wall / base}


def list_kernels(machine: Machine) -> Iterator[dict]:
    """Yield the kernels of one call of each score, with their microseconds, the longest first."""
    shape = machine.shapes[0]
    vectors = machine.make_inputs(shape)
    for name in SCORES:
        yield describe_row(name, shape) | attempt(profile_score, machine, name, vectors)


def profile_score(machine: Machine, name: str, vectors: list[torch.Tensor]) -> dict:
    """Return how many kernels one call launches, and the eight that take longest."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.is_gpu else [])]
    attend = partial(SCORES[name], *vectors, is_causal=True, backend=machine.backend)
    with torch.no_grad():
        attend()
        with profile(activities=activities) as profiler:
            attend()
            machine.wait()
    spent = "self_device_time_total" if machine.is_gpu else "self_cpu_time_total"
    events = [e for e in profiler.key_averages() if getattr(e, spent) > 0]
    events.sort(key=lambda event: -getattr(event, spent))
    return {
        "launches": sum(event.count for event in events),
        "microseconds": sum(getattr(event, spent) for event in events),
        "kernels": [[round(getattr(e, spent), 1), e.count, e.key[:60]] for e in events[:8]],
    }


def choose_rules(tokens: int, heads: int) -> tuple:
    """Return rules by head as `hyperattn inject` finds them: pages, single keys and windows."""
    size = tokens // 64
    kinds = (
        Pages(128, 4, 16, size // 4, "mean", "previous", 16),
        Pages(64, 4, 1, 2 * size, "mean", "previous", 16, channels=0.25),
        Pages(64, 4, 32, size // 8, "bounds", "first", 64),
        Window(8 * size, 4),
    )
    return tuple(kinds[h % len(kinds)] for h in range(heads))


def measure_sparse(machine: Machine) -> Iterator[dict]:
    """Yield the time of sparse rules over torch's attention: prompts, then one query."""
    long = [Shape(1, 32, 8192, 128), Shape(1, 32, 32768, 128)] if machine.is_gpu else SMALL
    for shape in long:
        yield describe_row("prompt", shape) | attempt(measure_rules, machine, shape, None)
    last = Shape(16, 32, 32768, 128) if machine.is_gpu else SMALL[0]
    yield describe_row("one query", last) | attempt(measure_rules, machine, last, 1)


def measure_rules(machine: Machine, shape: Shape, queries: int | None) -> dict:
    """Return the times of sparse rules and of torch's attention, and the largest difference from a mask."""
    rules = choose_rules(shape.tokens, shape.heads)
    vectors = machine.make_inputs(shape, queries)
    options = {"rules": rules, "is_causal": True, "first": shape.tokens - (queries or shape.tokens)}
    attend = partial(functional.sparse_attention, *vectors, backend=machine.backend, **options)
    found = time_listed(machine, vectors, attend, queries)
    found["share"] = statistics.mean(rule.share(shape.tokens) for rule in rules)
    checked = Shape(1, 4, 1024, 64)
    few = {"rules": choose_rules(checked.tokens, checked.heads), "is_causal": True}
    small = [t.float() for t in machine.make_inputs(checked)]
    ours, masked = (
        functional.sparse_attention(*small, backend=name, **few)
        for name in (machine.backend, "reference")
    )
    return found | {"error": (ours - masked).abs().max().item()}


def measure_hsa(machine: Machine) -> Iterator[dict]:
    """Yield the time of tied keys over torch's attention."""
    long = [Shape(1, 32, 8192, 128), Shape(1, 32, 32768, 128)] if machine.is_gpu else SMALL
    for shape in long:
        for top_k in (0, 4):
            about = describe_row(f"prompt, refine_top_k={top_k}", shape)
            yield about | attempt(measure_tied, machine, shape, top_k)


def measure_tied(machine: Machine, shape: Shape, top_k: int) -> dict:
    """Return the times of tied keys and of torch's attention, and the largest difference from plain torch."""
    # The interpreter, which a CPU needs for the kernel, would take hours.
    ours = "triton" if machine.is_gpu else "torch"
    sizes, near = (16, 256, 4096), shape.tokens // 16
    settings = {"tying": "key", "is_causal": True, "near": near, "sinks": 4, "refine_top_k": top_k}
    tied = partial(functional.hierarchical_attention, hierarchy=sizes, **settings)
    vectors = machine.make_inputs(shape)
    found = time_listed(machine, vectors, partial(tied, *vectors, backend=ours))
    pairs = count_query_pairs(shape.tokens, shape.tokens, sizes, near, 4, top_k, True)
    found["share"] = pairs / (shape.tokens * (shape.tokens + 1) / 2)
    small = [t.float() for t in machine.make_inputs(Shape(1, 4, 1024, 64))]
    first, second = (tied(*small, backend=name) for name in (ours, "torch"))
    return found | {"error": (first - second).abs().max().item()}


def time_listed(
    machine: Machine, vectors: tuple, attend: Callable, queries: int | None = None
) -> dict:
    """Return the times of a call that the kernel for listed keys computes, and of torch's attention.

    Args:
        machine: Measures.
        vectors: Queries, keys and values.
        attend: The call.
        queries: Number of queries; None: as many as keys, for a prompt.
    """
    backend = machine.fastest if queries is None else None
    base_call = partial(attend_by, backend) if queries is None else scaled_dot_product_attention
    with torch.no_grad():
        base = machine.time_by_clock(lambda: base_call(*vectors))
        wall = machine.time_by_clock(attend)
        found = {"base_ms": base, "wall_ms": wall, "over_base": wall / base}
        if machine.is_gpu:
            found["choice_ms"] = wall - time_kernel(attend, "listed_forward")
    return found


def time_kernel(call: Callable, name: str) -> float:
    """Return the milliseconds that kernels of this name take in one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.key.startswith(name)]
    return sum(e.self_device_time_total for e in events) / 1e3


def describe_row(what: str, shape: Shape) -> dict:
    """Return the first columns of a row."""
    return {"what": what, "shape": list(shape)}


def attempt(measure: Callable[..., dict], *arguments) -> dict:
    """Return what is measured, or the error as a row: one failure must not cost the others."""
    try:
        return measure(*arguments)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


#: What only a GPU can show comes first.
GROUPS: dict[str, Callable[[Machine], Iterator[dict]]] = {
    "anchors": measure_anchors,
    "forward": measure_forward,
    "kernels": list_kernels,
    "training": measure_training,
    "decoding": measure_decoding,
    "sparse": measure_sparse,
    "hsa": measure_hsa,
}


def describe_device(device: str) -> dict:
    """Return chip and versions, as every result must state them."""
    about: dict = dict(environment())
    if device == "cuda":
        import triton

        about |= {
            "chip": torch.cuda.get_device_name(),
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        }
    return about


def main(words: list[str] | None = None) -> int:
    """Measure the groups; return how many rows failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--json", type=Path, help="the file of the results")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is there; --device cpu shows that the script runs")
    machine, about = Machine(args.device, args.seconds), describe_device(args.device)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    chip = re.sub(r"[^a-z0-9]+", "-", str(about["chip"]).lower()).strip("-")
    path = args.json or (RESULTS / f"gpu-{chip}.json" if machine.is_gpu else None)
    rows: list[dict] = []
    for group in args.groups:
        for row in GROUPS[group](machine):
            rows.append({"group": group, **row})
            print(json.dumps(rows[-1]), flush=True)
            if path is not None:
                write_atomically(
                    path, json.dumps({"environment": about, "rows": rows}, indent=2) + "\n"
                )
    return sum("failed" in row for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
