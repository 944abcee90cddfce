"""Measure the presses of kvpress, by kvpress's own code; `benchmarks/kept_bytes.py` runs this file.

It runs in an environment of its own, because kvpress 0.5.5 needs Transformers older than 5.3. So it
imports nothing of this repository. A context is read once; every press then compresses a copy of its
cache, by the hook that kvpress would have called. `check_presses` compares that with kvpress's own
context manager before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import torch
from kvpress.presses import duo_attention_press
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

#: Tokens that are read at a time after the context. kvpress looks for one fake key that no query of
#: a call attends to, which is easier to find for few queries.
STEP = 128
#: First and last tokens that kvpress's streaming heads of DuoAttention keep, on the fly.
DUO_KEPT = 128 + 256
#: The name of the row without a press.
FULL = "full cache"
#: Presses that score the keys of one layer in a hook, by name: share of keys that go -> press.
HOOKED = {
    "StreamingLLM": lambda ratio: kvpress.StreamingLLMPress(compression_ratio=ratio),
    "SnapKV": lambda ratio: kvpress.SnapKVPress(compression_ratio=ratio),
    "ExpectedAttention": lambda ratio: kvpress.ExpectedAttentionPress(compression_ratio=ratio),
    "AdaKV, SnapKV": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=ratio)),
}
DUO, ZIP = "DuoAttention on the fly", "KVzip"
#: All rows, in the order they are measured.
METHODS = (*HOOKED, DUO, ZIP)


@dataclass
class Prefill:
    """A context that was read with a full cache.

    Args:
        ids: Token ids [1, context].
        cache: Keys and values of all its tokens.
        calls: By layer, the keyword arguments of the attention module's call.
    """

    ids: torch.Tensor
    cache: DynamicCache
    calls: list[dict[str, Any]]

    def copy_cache(self) -> DynamicCache:
        """Return a cache of the same keys and values, which may be changed."""
        cache = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            cache.update(layer.keys.clone(), layer.values.clone(), index)
        return cache


class KeepScores(kvpress.KVzipPress):
    """KVzip that keeps its scores, so that one reconstruction serves several shares."""

    def compress_post(self, model):
        self.kept_scores = self.score_val.clone()
        super().compress_post(model)


class Passages:
    """Texts in place of BookSum, which kvpress would fetch from the Hub to score heads."""

    def __init__(self, texts: list[str]):
        self.texts = texts

    def to_pandas(self):
        import pandas

        return pandas.DataFrame({"chapter": self.texts})


def read_context(model: Any, ids: torch.Tensor) -> Prefill:
    """Read a context [1, n] without a press, and keep what presses need."""
    calls: list[dict[str, Any]] = []
    cache = DynamicCache()
    clear_masks(model)
    hook = lambda module, args, kwargs, output: calls.append(kwargs)
    hooks = [
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        model.model(input_ids=ids, past_key_values=cache)
    finally:
        for handle in hooks:
            handle.remove()
    return Prefill(ids=ids, cache=cache, calls=calls)


def clear_masks(model: Any) -> None:
    """Forget which keys an earlier press masked."""
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None


def press_cache(press: Any, model: Any, prefill: Prefill) -> DynamicCache:
    """Compress a copy of the cache by the hook that kvpress calls after every layer."""
    press.post_init_from_model(model)
    cache = prefill.copy_cache()
    for layer, call in zip(model.model.layers, prefill.calls):
        module = layer.self_attn
        module.rotary_emb = model.model.rotary_emb
        press.forward_hook(module, [], {**call, "past_key_values": cache}, [None, None])
    return cache


def zip_cache(model: Any, prefill: Prefill) -> tuple[DynamicCache, torch.Tensor]:
    """Score the context by KVzip's reconstruction; return a cache, and the scores."""
    press = KeepScores(compression_ratio=0.5)
    cache = prefill.copy_cache()
    with press(model):
        # kvpress notes both at the call of the model; here that call was made before.
        press._context_ids, press._cache = prefill.ids, cache
    return cache, press.kept_scores


def compressed(
    name: str, share: float, model: Any, prefill: Prefill, scored: dict[str, Any]
) -> DynamicCache:
    """Return the cache of a method that keeps this share of the keys.

    Args:
        name: Of the method.
        share: Of keys that are kept.
        model: The model.
        prefill: The context.
        scored: KVzip's cache and scores of this context; filled on first use.
    """
    clear_masks(model)
    if name == FULL:
        return prefill.copy_cache()
    if name == DUO:
        streaming = (1 - share) / (1 - DUO_KEPT / prefill.ids.shape[1])
        press = kvpress.DuoAttentionPress(
            head_compression_ratio=min(1.0, streaming), on_the_fly_scoring=True
        )
        return press_cache(press, model, prefill)
    if name == ZIP:
        if not scored:
            scored["cache"], scored["scores"] = zip_cache(model, prefill)
            clear_masks(model)
        press = kvpress.KVzipPress(compression_ratio=1 - share)
        press.score_val = scored["scores"].clone()
        press.compress_post(model)
        return Prefill(ids=prefill.ids, cache=scored["cache"], calls=[]).copy_cache()
    return press_cache(HOOKED[name](1 - share), model, prefill)


def share_kept(model: Any, cache: DynamicCache, context: int) -> float:
    """Return the share of keys that are neither gone nor masked."""
    kept = total = 0
    for layer, held in zip(model.model.layers, cache.layers):
        keys = held.keys[..., 0].numel()
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        kept += keys - (0 if masked is None else len(masked[0]))
        total += held.keys.shape[0] * held.keys.shape[1] * context
    return kept / total


def score_answers(
    model: Any, cache: DynamicCache, ids: torch.Tensor, context: int, spans: list[list[int]]
) -> dict[str, float]:
    """Read the tokens after the context, and score the tokens of the spans.

    Returns:
        Nats per token, and the share of the spans that greedy decoding gives.
    """
    hidden = []
    for start in range(context, len(ids), STEP):
        part = ids[None, start : start + STEP]
        places = torch.arange(start, start + part.shape[1])[None]
        hidden.append(
            model.model(
                input_ids=part, past_key_values=cache, position_ids=places
            ).last_hidden_state[0]
        )
    states = torch.cat(hidden)
    nats, exact = 0.0, 0
    for start, stop in spans:
        hits = 0
        for piece in torch.arange(start, stop).split(256):
            logits = model.lm_head(states[piece - 1 - context]).float()
            nats -= logits.log_softmax(-1).gather(1, ids[piece, None]).double().sum().item()
            hits += int((logits.argmax(-1) == ids[piece]).sum())
        exact += hits == stop - start
    return {"nats": nats / sum(stop - start for start, stop in spans), "exact": exact / len(spans)}


def measure_item(
    model: Any, item: dict[str, Any], cells: list[tuple[str, float]]
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield method, share and result of every cell, from one reading of the context."""
    ids = torch.tensor(item["ids"])
    prefill = read_context(model, ids[None, : item["context"]])
    scored: dict[str, Any] = {}
    for name, share in cells:
        start = time.process_time()
        cache = compressed(name, share, model, prefill, scored)
        found: dict[str, Any] = {"kept": share_kept(model, cache, item["context"])}
        try:
            found |= score_answers(model, cache, ids, item["context"], item["spans"])
        except ValueError as error:  # kvpress found no fake key
            found["failed"] = str(error)
        yield name, share, found | {"seconds": time.process_time() - start}
    clear_masks(model)


def check_presses(folder: str) -> None:
    """Compare every hooked press with kvpress's own context manager, on a tiny random model.

    Args:
        folder: A checkpoint; only its tokenizer is used.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    model.config._name_or_path = folder
    ids = torch.randint(49152, (608,))
    context, spans = 600, [[601, 608]]
    prefill = read_context(model, ids[None, :context])
    scored: dict[str, Any] = {}
    for name in METHODS:
        ours = score_answers(
            model, compressed(name, 0.5, model, prefill, scored), ids, context, spans
        )
        clear_masks(model)
        if name == DUO:
            ratio = 0.5 / (1 - DUO_KEPT / context)
            press = kvpress.DuoAttentionPress(
                head_compression_ratio=min(1.0, ratio), on_the_fly_scoring=True
            )
        else:
            press = (HOOKED.get(name) or (lambda r: kvpress.KVzipPress(compression_ratio=r)))(0.5)
        cache = DynamicCache()
        with press(model):
            model.model(input_ids=ids[None, :context], past_key_values=cache)
        theirs = score_answers(model, cache, ids, context, spans)
        if abs(ours["nats"] - theirs["nats"]) > 1e-4:
            raise SystemExit(
                f"{name}: {ours['nats']} nats from a shared reading of the context, {theirs['nats']} by kvpress's "
                "own context manager; allowed: equal within 1e-4. Use the pinned kvpress"
            )


def keep_result(file: Path, result: dict[str, Any]) -> None:
    """Write the result, whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, file)


def main() -> None:
    """Measure what the file of work asks for and the file of results lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="JSON: model, items, passages, cells, minutes")
    parser.add_argument("result", type=Path, help="JSON that is added to")
    args = parser.parse_args()
    work = SimpleNamespace(**json.loads(args.work.read_text()))
    torch.set_num_threads(work.threads)
    until = time.monotonic() + 60 * work.minutes
    duo_attention_press.load_dataset = lambda *_, **__: Passages(work.passages)
    with torch.no_grad():
        check_presses(work.model)
        # kvpress keeps head scores by the name of the checkpoint, which the small model borrowed.
        duo_attention_press.cache.clear()
        model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).eval()
        for item in work.items:
            result = json.loads(args.result.read_text())
            left = [
                (name, share)
                for name, share in work.cells
                if item["name"] not in result["cells"].get(f"{name}/{share:g}", {})
            ]
            if not left or time.monotonic() > until:
                continue
            for name, share, found in measure_item(model, item, left):
                result["cells"].setdefault(f"{name}/{share:g}", {})[item["name"]] = found
                result["kvpress"] = {
                    name: version(name) for name in ("kvpress", "torch", "transformers")
                }
                keep_result(args.result, result)
                print(item["name"], name, share, found, flush=True)
                if time.monotonic() > until:
                    break


if __name__ == "__main__":
    main()
