"""Cost of running a model: peak memory, speed of generation, and time of attention only.

Read `PeakMemory`, `measure_generation` and `attention_times`.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import psutil  # type: ignore[import-untyped]  # installed with accelerate
import torch
from torch import nn

from ..integration.attention.hyper import patched_hosts, unwrap_hyper
from ..integration.patching.patch import base_model
from .perplexity import evaluation_mode


class PeakMemory:
    """Measure the peak memory in bytes while a block runs.

    On a CUDA device, this is the peak of torch's allocator. On a CPU, it is the largest resident
    size of the process. A thread samples it, so a peak shorter than `interval` may be missed.
    Memory that was in use before the block counts, because a model needs its weights, too.

    Example::

        with PeakMemory() as memory:
            model(ids)
        print(memory.peak, memory.added)

    Args:
        device: Device of the model.
        interval: Seconds between samples on a CPU.

    Attributes:
        start: Bytes in use when the block began.
        peak: Largest number of bytes in use.
    """

    def __init__(self, device: torch.device | str = "cpu", interval: float = 0.005):
        self.device = torch.device(device)
        self.interval = interval
        self.start = self.peak = 0

    @property
    def added(self) -> int:
        """Return the bytes above the amount in use when the block began."""
        return self.peak - self.start

    def __enter__(self) -> PeakMemory:
        # Garbage from earlier work would otherwise count as memory of the block.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.start = self.peak = torch.cuda.memory_allocated(self.device)
            return self
        self._process = psutil.Process()
        self.start = self.peak = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch_memory, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return
        self._stop.set()
        self._thread.join()
        # The thread may have waited since its last sample.
        self._sample_memory()

    def _watch_memory(self) -> None:
        while not self._stop.wait(self.interval):
            self._sample_memory()

    def _sample_memory(self) -> None:
        self.peak = max(self.peak, self._process.memory_info().rss)


def read_clock() -> float:
    """Return the time in seconds, after all work of the current accelerator is done.

    Accelerators run asynchronously, so the time without waiting says nothing.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Generation:
    """Result of `measure_generation`.

    Args:
        ids: Ids of the new tokens.
        seconds: Time of the whole generation.
    """

    ids: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Return new tokens per second. The time includes the pass over the prompt."""
        return len(self.ids) / self.seconds


@torch.inference_mode()
def measure_generation(
    model: nn.Module,
    prompt: list[int],
    new_tokens: int,
    *,
    on_token: Callable[[], None] | None = None,
) -> Generation:
    """Generate greedily with the cache and measure the time.

    Args:
        model: A causal Transformers model. Its mode (training or not) is restored afterwards.
        prompt: Token ids, at least one.
        new_tokens: Largest number of tokens to generate, at least one. The model may stop earlier.
        on_token: Called after every new token.

    Raises:
        ValueError: The prompt is empty, or `new_tokens` is below one.
    """
    if not prompt or new_tokens < 1:
        raise ValueError(
            f"prompt of {len(prompt)} tokens, new_tokens={new_tokens}; allowed: at least 1 each"
        )
    device = next(model.parameters()).device
    ids = torch.tensor([prompt], device=device)
    with evaluation_mode(model):
        start = read_clock()
        out = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=find_pad_token(model),
            streamer=_Streamer(on_token) if on_token else None,
        )
        seconds = read_clock() - start
    return Generation(tuple(out[0, len(prompt) :].tolist()), seconds)


def find_pad_token(model: nn.Module) -> int:
    """Return a token id for padding.

    A batch of one is never padded, but `generate` warns if it gets no id.
    """
    config = cast(Any, model).generation_config
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    return next((token for token in (config.pad_token_id, eos) if token is not None), 0)


class _Streamer:
    """Call a function for every new token. `generate` calls `put` with the prompt first."""

    def __init__(self, on_token: Callable[[], None]):
        self.on_token = on_token
        self.puts = 0

    def put(self, ids: torch.Tensor) -> None:
        self.puts += 1
        # The first call brings the prompt.
        if self.puts > 1:
            self.on_token()

    def end(self) -> None:
        pass


def patched_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of every patched attention layer, and its patch (`hyper`)."""
    for name, host in patched_hosts(model):
        yield name, unwrap_hyper(host.get_submodule("hyper"))


def attention_times(model: nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    """Measure the time of all patched attention layers in one pass.

    Args:
        model: A patched model.
        ids: Token ids [N] or [B, N].

    Returns:
        Seconds of their original attention, and seconds of the patched attention.
    """
    base = base_model(model)
    original_times: list[float] = []
    patched_times: list[float] = []

    def time_layer(module, arguments):
        call, _, run_original = arguments
        # Both in the same layer, one after the other, so that other work on the machine slows both.
        start = read_clock()
        run_original()
        middle = read_clock()
        # `forward` instead of a call of the module: a call would run this hook again.
        module.forward(call)
        original_times.append(middle - start)
        patched_times.append(read_clock() - middle)

    with ExitStack() as stack:
        for _, hyper in patched_layers(base):
            stack.enter_context(hyper.register_forward_pre_hook(time_layer))
        stack.enter_context(evaluation_mode(base))
        stack.enter_context(torch.no_grad())
        # Offloaded models have hooks that move inputs themselves.
        ids = ids if base.device.type == "meta" else ids.to(base.device)
        base.base_model(ids if ids.dim() == 2 else ids[None])
    return sum(original_times), sum(patched_times)
