"""The second part of `hyperattn demo`: a long text, read by the original and by a sparse model.

Both read the same text with hidden facts. The rules of the sparse model are in
`smollm2_sparse_8192.json`. `benchmarks/frontier.py` found them without training.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import hf_hyperattn
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.inject import retrieval
from hf_hyperattn.inject.gradients import final_hidden, head_of, loss_of

#: Rules of all heads: the point "rules with a kernel, together, 20 %" of docs/results/frontier.md.
#: The docstring of benchmarks/frontier.py has the command that writes this file.
RULES = Path(__file__).parent / "smollm2_sparse_8192.json"
LENGTH = 8192  # tokens that the rules were chosen for
#: Facts that are hidden in the text: the place as a share of the text, a statement, and its end, which the
#: model must give when it reads the statement again behind the text. Facts of one kind would be
#: mixed up by a model of this size.
FACTS = (
    (0.2, "The secret number of the amber kettle is", " 40817"),
    (0.5, "The old violin was built in the city of", " Lisbon"),
    (0.8, "The password of the quiet harbor is", " lantern"),
)
ORIGINAL, SPARSE = "original", "sparse"
HEADER = ("attention", "logits computed", "perplexity", "facts found", "time", "ratio")


def find_reason_against(model: Any, name: str, expected: str, tokens: int) -> str | None:
    """Return why the long text is left out, as a sentence, or None if it can be read.

    Args:
        model: The model of the demo.
        name: Its name.
        expected: Name of the model that the rules belong to.
        tokens: Tokens of the text.
    """
    modules = {module for module, _ in model.named_modules()}
    # A folder of this name may hold another model, which has other modules.
    if name != expected or not set(read_rules().hosts or ()) <= modules:
        return f"The rules of this part belong to {expected}; `hyperattn inject` finds those of other models."
    if tokens < LENGTH:
        return f"The text has {tokens:,} tokens; this part needs {LENGTH:,}."
    if model.device.type == "cpu" and library.core() is None:
        return "This part needs compiled kernels; `hyperattn doctor` says what is missing."
    return None


def read_rules() -> Any:
    """Return the config with the rules of all heads."""
    return hf_hyperattn.HyperAttnConfig.from_dict(json.loads(RULES.read_text(encoding="utf-8")))


def compute_share(config: Any) -> float:
    """Return the share of the attention logits that the rules of a config compute."""
    layers = [rules for (sparse,) in config.overrides.values() for rules in [sparse.rules]]
    return mean(mean(rule.share(LENGTH) for rule in rules) for rules in layers)


def measure_long_text(
    model: Any, sparse: Any, tokenizer: Any, ids: list[int], on_layer: Callable[[], None]
) -> list[dict[str, Any]]:
    """Measure both models on one long text with hidden facts.

    Args:
        model: The original model.
        sparse: A second copy of it, which is patched here. It takes over the original's weights.
        tokenizer: Their tokenizer.
        ids: Tokens of the text, at least `LENGTH`.
        on_layer: Called after every layer of either model.

    Returns:
        One dict per model.
    """
    # Two copies of the weights are not needed.
    sparse.load_state_dict(model.state_dict(), assign=True)
    config = read_rules()
    hf_hyperattn.patch_model(sparse, config)
    example = hide_facts(tokenizer, ids)
    models = {ORIGINAL: model, SPARSE: sparse}
    shares = {ORIGINAL: 1.0, SPARSE: compute_share(config)}
    for warmed in models.values():
        # Kernels are compiled on first use, which must not count as time of the model.
        read_by_turns({"": warmed}, example.ids[:256], lambda: None)
    hidden, seconds = read_by_turns(models, example.ids, on_layer)
    head = head_of(model, example.ids)
    # The text ends where the first question begins.
    end = example.spans[0][0]
    rows = []
    for name, states in hidden.items():
        loss, _ = loss_of(head, states, example.ids, gradient=False, spans=((1, end),))
        found = retrieval.score_hidden(states, head, example).exact * len(example.spans)
        rows.append(
            {
                "attention": name,
                "logits": shares[name],
                "perplexity": torch.tensor(loss).exp().item(),
                "found": round(found),
                "hidden": len(example.spans),
                "seconds": seconds[name],
                "ratio": seconds[name] / seconds[ORIGINAL],
            }
        )
    return rows


def hide_facts(tokenizer: Any, ids: list[int]) -> retrieval.Example:
    """Hide the facts in a text, and ask for all of them at its end."""
    hidden = retrieval.Hidden(
        inserts=[(depth, f"\n{statement}{end}.\n") for depth, statement, end in FACTS],
        tail=[
            piece
            for _, statement, end in FACTS
            for piece in ((f"\n{statement}", False), (end, True), (".", False))
        ],
    )
    encode = retrieval.make_encoder(tokenizer)
    example = retrieval.assemble_example(encode, torch.tensor(ids), LENGTH, "facts", hidden)
    assert example is not None  # 8,192 tokens have room for the questions
    return example


def read_by_turns(
    models: dict[str, Any], ids: Tensor, on_layer: Callable[[], None]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Read a text with several models that take turns after every layer.

    Every forward pass runs in a thread of its own, of which only one works at a time. A change of
    the machine's load then affects all models alike, although each reads the text once.

    Args:
        models: Causal models by name.
        ids: Token ids [N].
        on_layer: Called after every layer.

    Returns:
        Final hidden states [N, e] and seconds of each model.
    """
    order = list(models)
    turn = {name: threading.Semaphore(0) for name in order}
    waiting = set(order)
    seconds = dict.fromkeys(order, 0.0)
    stopped = threading.Event()

    def give_turn(name: str) -> None:
        following = order[order.index(name) + 1 :] + order[: order.index(name) + 1]
        turn[next(n for n in following if n in waiting)].release()

    def read(name: str) -> Tensor:
        turn[name].acquire()
        begun = read_clock(models[name].device)

        def end_layer(*_: Any) -> None:
            nonlocal begun
            seconds[name] += read_clock(models[name].device) - begun
            on_layer()
            give_turn(name)
            turn[name].acquire()
            if stopped.is_set():
                raise RuntimeError("stopped")
            begun = read_clock(models[name].device)

        layers = models[name].base_model.layers
        handles = [layer.register_forward_hook(end_layer) for layer in layers]
        try:
            # Gradient modes belong to a thread.
            with torch.no_grad():
                hidden = final_hidden(models[name], ids)
            seconds[name] += read_clock(models[name].device) - begun
            return hidden
        finally:
            for handle in handles:
                handle.remove()
            waiting.discard(name)
            if waiting:
                give_turn(name)

    with ThreadPoolExecutor(len(order)) as pool:
        running = {name: pool.submit(read, name) for name in order}
        turn[order[0]].release()
        try:
            return {name: future.result() for name, future in running.items()}, seconds
        except BaseException:
            # The executor waits for its threads, so let them end at their next layer.
            stopped.set()
            for semaphore in turn.values():
                semaphore.release()
            raise


def read_clock(device: torch.device) -> float:
    """Return CPU seconds of this process; on an accelerator, seconds after its work is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def format_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of the table."""
    return [
        [
            row["attention"],
            f"{100 * row['logits']:.0f} %",
            f"{row['perplexity']:,.2f}",
            f"{row['found']} of {row['hidden']}",
            f"{row['seconds']:,.1f} s",
            f"{row['ratio']:.2f}x",
        ]
        for row in rows
    ]
