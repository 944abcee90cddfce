"""What a model makes of texts and of retrieval: the same numbers before a change of its attention and after it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis.perplexity import evaluation_mode
from .gradients import final_hidden, head_of, loss_of
from .retrieval import Example, Score, by_task, refuse_names, score_hidden


@dataclass(frozen=True)
class Verified:
    """What `verify` measured.

    Args:
        texts: by name, the negative log-likelihood a token, in nats.
        retrieval: by task, the mean score of its examples.
        seconds: of the passes over the texts, without the output layer.
    """

    texts: Mapping[str, float]
    retrieval: Mapping[str, Score]
    seconds: float

    def losses(self, before: Verified) -> dict[str, float]:
        """The relative rise of perplexity since then, by text, and of the answers' by task: 0.02 is 2 % more."""
        texts = {
            name: Score(nats, 0.0).loss(Score(before.texts[name], 0.0))
            for name, nats in self.texts.items()
        }
        return texts | {
            task: score.loss(before.retrieval[task]) for task, score in self.retrieval.items()
        }


@torch.no_grad()
def verify(
    model: PreTrainedModel, texts: Mapping[str, Tensor], examples: Sequence[Example] = ()
) -> Verified:
    """Read texts and examples of retrieval.

    Args:
        model: causal, patched or not.
        texts: token ids [N] by name, at least one.
        examples: as `hf_hyperattn.inject.examples` makes them.

    Raises:
        ValueError: there is no text; or one is called like the task of an example, whose loss would take its place.
    """
    if not texts:
        raise ValueError("texts is empty; allowed: one or more by name")
    refuse_names(texts, {example.task for example in examples})
    seconds, losses = 0.0, {}
    with evaluation_mode(model):
        head = head_of(model, next(iter(texts.values())))
        for name, ids in texts.items():
            start = time.perf_counter()
            hidden = final_hidden(model, ids)
            seconds += time.perf_counter() - start
            losses[name] = loss_of(head, hidden, ids, gradient=False)[0]
        scores = [
            score_hidden(final_hidden(model, example.ids), head, example) for example in examples
        ]
    return Verified(losses, by_task(examples, scores), seconds)
