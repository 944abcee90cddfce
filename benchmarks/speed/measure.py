"""One job measured: first that its result is right, then its memory, then its time beside SDPA's in turns."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_hyperattn.analysis.cost import PeakMemory

from .cases import TOLERANCE, Case, Job
from .operations import OPERATIONS

LEAST = 2e-3  # seconds of one sample: shorter calls are repeated
MOST_ROUNDS, FEWEST_ROUNDS = 40, 3
PROBED = (
    2**26
)  # pairs above which a smaller case tells first what memory and time this one would take
SAMPLED = 16  # rows that are compared with the definition


def measure(job: Job, seconds: float = 2.0, memory_gib: float = 6.0, longest: float = 60.0) -> dict:
    """The row of a job. What cannot be measured is a row too, and says in `status` why.

    Args:
        seconds: how long to take turns with SDPA, where that is enough for a few rounds.
        memory_gib: jobs that would take more than this are not run.
        longest: jobs of which one call would take longer than this many seconds are not run.
    """
    torch.set_num_threads(job.case.threads)
    row = blank(job)
    try:
        refusal = too_much(job, memory_gib, longest)
        return row | ({"status": refusal} if refusal else measured(job, seconds))
    except (RuntimeError, MemoryError) as error:  # torch says in words that memory is out
        return row | {"status": failure(error)}
    except (ValueError, NotImplementedError) as error:
        return row | {"status": f"refused: {first_line(error)}"}


def blank(job: Job) -> dict:
    """A row without results."""
    return {"key": job.key, "subject": job.subject, "way": job.way, **vars(job.case)}


def failure(error: Exception) -> str:
    """Out of memory, or what else went wrong."""
    out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in str(error).lower()
    return "out of memory" if out else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """The first line of an error, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def measured(job: Job, seconds: float) -> dict:
    """Match, memory and time of a job that is safe to run; no time without a match."""
    operation, case, tensors = OPERATIONS[job.subject], job.case, inputs(job.case)
    error, slope_error = errors(job, tensors)
    found = {"error": error, "gradient_error": slope_error, "limit": operation.limit(job.way, case)}
    allowed = TOLERANCE[case.dtype]
    if not (error <= allowed[0] and (slope_error or 0.0) <= allowed[1]):
        return found | {"status": "mismatch"}
    calls = {"sdpa": call(case, base(case), tensors), "way": call(case, runner(job), tensors)}
    for name in calls:
        calls[name]()
        with PeakMemory(case.device) as memory:
            calls[name]()
        found[f"{name}_mib"] = memory.added / 2**20
    return found | timed(calls["way"], calls["sdpa"], seconds, case.device) | {"status": "ok"}


def inputs(case: Case) -> list[torch.Tensor]:
    """Query, key, value of unit variance, and the gradient of the output; leaves where a backward pass is asked for."""
    generator = torch.Generator().manual_seed(0)
    rows = 1 if case.kind == "decode" else case.length

    def new(length):
        x = torch.randn(case.batch, case.heads, length, case.dim, generator=generator)
        return x.to(case.device, getattr(torch, case.dtype))

    tensors = [new(rows), new(case.length), new(case.length), new(rows)]
    return [t.requires_grad_(case.kind == "training" and i < 3) for i, t in enumerate(tensors)]


def runner(job: Job) -> Callable:
    """The job's call of query, key and value."""
    operation, causal = OPERATIONS[job.subject], job.case.causal
    return lambda q, k, v: operation.run(job.way, q, k, v, causal)


def base(case: Case) -> Callable:
    """SDPA on the same tensors; on a GPU in half precision its FlashAttention, whatever torch would choose."""
    if case.device != "cuda" or case.dtype == "float32":
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    def flash(q, k, v):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    return flash


def call(case: Case, function: Callable, tensors: list[torch.Tensor]) -> Callable:
    """A function of no arguments that does once what the case asks for."""
    *leaves, gradient = tensors
    if case.kind == "training":
        return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)

    def run():
        with torch.no_grad():
            return function(*leaves)

    return run


def errors(job: Job, tensors: list[torch.Tensor]) -> tuple[float, float | None]:
    """Largest errors of output and gradients against the definition in float64, as shares of its largest numbers.

    Some rows are compared. A gradient that reaches only those makes the gradients of all keys and values exact too.
    """
    case, (q, k, v, gradient) = job.case, tensors
    rows = (
        torch.linspace(0, q.shape[2] - 1, min(SAMPLED, q.shape[2]), device=q.device).long().unique()
    )
    places = rows + (k.shape[2] - q.shape[2])
    training = case.kind == "training"
    exact = [t.detach().double().requires_grad_(training) for t in (q[:, :, rows], k, v)]
    with torch.set_grad_enabled(training):
        out = runner(job)(q, k, v)
        expected = OPERATIONS[job.subject].exact(*exact, places, case.causal)
    error = share(out.detach()[:, :, rows], expected.detach())
    if not training:
        return error, None
    sparse = torch.zeros_like(gradient)
    sparse[:, :, rows] = gradient[:, :, rows]
    got = list(torch.autograd.grad(out, (q, k, v), sparse))
    got[0] = got[0][:, :, rows]
    wanted = torch.autograd.grad(expected, exact, gradient[:, :, rows].double())
    return error, max(share(g, w) for g, w in zip(got, wanted, strict=True))


def share(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected number; nan where something is not finite."""
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


def timed(run: Callable, beside: Callable, seconds: float, device: str) -> dict:
    """Quartiles of run's time over beside's, in rounds that take turns; both have been called before."""
    number = [max(1, math.ceil(LEAST / sample(f, 1, device))) for f in (run, beside)]
    once = sample(run, number[0], device) + sample(beside, number[1], device)
    rounds = int(min(MOST_ROUNDS, max(FEWEST_ROUNDS, seconds / once)))
    mine, base = [], []
    for _ in range(rounds):
        mine.append(sample(run, number[0], device) / number[0])
        base.append(sample(beside, number[1], device) / number[1])
    each = sorted(a / b for a, b in zip(mine, base, strict=True))
    q1, median, q3 = statistics.quantiles(each, n=4, method="inclusive")
    return {
        "median": median,
        "low": each[0],
        "q1": q1,
        "q3": q3,
        "high": each[-1],
        "rounds": rounds,
        "seconds": statistics.median(mine),
        "base_seconds": statistics.median(base),
    }


def sample(run: Callable, number: int, device: str) -> float:
    """Seconds of a number of calls; of a GPU between two of its own events."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(number):
            run()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def too_much(job: Job, memory_gib: float, longest: float, times: int = 1) -> str | None:
    """Why the job is not safe to run, told by the same job at a quarter of the length; None if it is.

    Args:
        times: what is asked about takes so many times as much as this job.
    """
    case = job.case
    if case.pairs <= PROBED or case.kind == "decode":
        return None
    small = Case(**vars(case) | {"length": case.length // 4})
    run = call(small, runner(job), inputs(small))
    refusal = too_much(Job(job.subject, job.way, small), memory_gib / 16, longest / 16, 16 * times)
    if refusal is not None:
        return refusal
    run()
    gc.collect()
    with PeakMemory(case.device) as memory:
        took = sample(run, 1, case.device)
    need, free = 16 * memory.added / 2**30, room(case.device, memory_gib)
    if need > free:
        return f"not run: would take up to {times * need:.0f} GiB"
    return f"not run: would take {times * 16 * took:.0f} s" if 16 * took > longest else None


def room(device: str, memory_gib: float) -> float:
    """GiB that a job may take."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30 * 0.8
    return min(memory_gib, psutil.virtual_memory().available / 2**30 * 0.8)
