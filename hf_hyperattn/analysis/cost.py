"""What a model costs: peak memory while something runs, the speed of generation, the time of attention alone."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import psutil  # type: ignore[import-untyped]  # comes with accelerate
import torch
from torch import nn

from ..integration.checkpoint_config import patched_hosts, unwrap_hyper
from ..integration.patching import base_model
from .perplexity import evaluation_mode


class PeakMemory:
    """The most memory in use while a block runs, in bytes.

    On a CUDA device that is what torch's allocator held at most on it. On a CPU it is the largest resident
    size of the process, sampled in a thread of its own, so a peak shorter than `interval` may be missed; what
    was resident before the block counts, since a model's weights are part of what it needs.

    Example::

        with PeakMemory() as memory:
            model(ids)
        print(memory.peak, memory.added)

    Args:
        device: where the model is.
        interval: seconds between samples.
    """

    def __init__(self, device: torch.device | str = "cpu", interval: float = 0.005):
        self.device = torch.device(device)
        self.interval = interval
        self.start = self.peak = 0

    @property
    def added(self) -> int:
        """Bytes above what was in use when the block began."""
        return self.peak - self.start

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.start = self.peak = torch.cuda.memory_allocated(self.device)
            return self
        self._process = psutil.Process()
        self.start = self.peak = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self._sample()

    def _sample(self) -> None:
        self.peak = max(self.peak, self._process.memory_info().rss)


@dataclass(frozen=True)
class Generation:
    """What `measure_generation` saw: the new token ids, and the seconds they took."""

    ids: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second; the prompt's own pass is part of the time."""
        return len(self.ids) / self.seconds


@torch.inference_mode()
def measure_generation(
    model: nn.Module,
    prompt: list[int],
    new_tokens: int,
    *,
    on_token: Callable[[], None] | None = None,
) -> Generation:
    """Greedy generation with the cache, timed.

    Args:
        model: a causal LM of Transformers; left in the mode it was found in.
        prompt: token ids, at least one.
        new_tokens: how many to generate at most, at least one; the model may stop earlier.
        on_token: called after every new token.

    Raises:
        ValueError: for an empty prompt or `new_tokens` below one.
    """
    if not prompt or new_tokens < 1:
        raise ValueError(
            f"prompt of {len(prompt)} tokens, new_tokens={new_tokens}; allowed: at least 1 each"
        )
    device, config = next(model.parameters()).device, cast(Any, model).generation_config
    ids = torch.tensor([prompt], device=device)
    # a batch of one is never padded, but `generate` warns where no id is given for it
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    pad = next((i for i in (config.pad_token_id, eos) if i is not None), 0)
    with evaluation_mode(model):
        start = time.perf_counter()
        out = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=pad,
            streamer=_Streamer(on_token) if on_token else None,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    return Generation(tuple(out[0, len(prompt) :].tolist()), seconds)


class _Streamer:
    """What `generate` calls with the prompt, then with every new token."""

    def __init__(self, on_token: Callable[[], None]):
        self.on_token, self.puts = on_token, 0

    def put(self, ids: torch.Tensor) -> None:
        self.puts += 1
        if self.puts > 1:
            self.on_token()

    def end(self) -> None:
        pass


def patched_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name of every patched attention layer, and its `hyper`."""
    return (
        (name, unwrap_hyper(host.get_submodule("hyper"))) for name, host in patched_hosts(model)
    )


def attention_times(model: nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of a pass over `ids`, [N] or [B, N], in all patched layers: by their own attention, and as patched."""
    base, stock_times, times = base_model(model), [], []

    def hook(module, arguments):
        call, _, stock = arguments
        start = time.perf_counter()
        stock()
        middle = time.perf_counter()
        module.forward(call)
        stock_times.append(middle - start)
        times.append(time.perf_counter() - middle)

    with ExitStack() as stack:
        for _, hyper in patched_layers(base):
            stack.enter_context(hyper.register_forward_pre_hook(hook))
        stack.enter_context(evaluation_mode(base))
        stack.enter_context(torch.no_grad())
        base.base_model(ids if ids.dim() == 2 else ids[None])
    return sum(stock_times), sum(times)
