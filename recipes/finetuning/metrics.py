"""What is measured on held-out text: perplexity, and how often the likeliest next token is the right one.

`evaluate.load` fetches a metric's script when it runs. This metric is a class of our own, so it works offline.
"""

from __future__ import annotations

import datasets
import evaluate
import torch
from torch import nn

from hf_hyperattn.analysis import perplexity

DESCRIPTION = (
    "The part of tokens that a causal language model finds likeliest given the tokens before them."
)


class NextTokenAccuracy(evaluate.Metric):
    """An `evaluate` metric: predictions and references are token ids, one beside the other."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description="predictions: likeliest ids. references: the ids of the text.",
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        hits = sum(p == r for p, r in zip(predictions, references, strict=True))
        return {"next_token_accuracy": hits / len(references)}


def measure(model: nn.Module, ids: list[int], length: int, prefix: list[int]) -> dict[str, float]:
    """Perplexity and accuracy on rows of `length` tokens, the prefix included, in one pass over the text.

    Returns:
        perplexity, loss (nats a token), predicted (tokens), seconds, next_token_accuracy.
    """
    metric = NextTokenAccuracy(keep_in_memory=True)
    first = max(len(prefix), 1)

    def note(_, args, output):
        guesses = output.logits[0, first - 1 : -1].argmax(-1)
        metric.add_batch(predictions=guesses.tolist(), references=args[0][0, first:].tolist())

    hook = model.register_forward_hook(note)
    try:
        with torch.inference_mode():
            found = perplexity(model, ids, length - len(prefix), prefix=prefix)
    finally:
        hook.remove()
    return {
        "perplexity": found.value,
        "loss": found.loss,
        "predicted": found.predicted,
        "seconds": found.seconds,
        **metric.compute(),
    }
