"""Loss of a model on texts and retrieval tasks, computed the same way before and after a change.

`verify` measures, and `Verified.losses` compares two measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis.cost import read_clock
from ..analysis.perplexity import evaluation_mode
from .gradients import final_hidden, head_of, loss_of
from .retrieval import Example, Score, by_task, refuse_names, score_hidden


@dataclass(frozen=True)
class Verified:
    """Result of `verify`.

    Args:
        texts: For each text name, the negative log-likelihood in nats per token.
        retrieval: For each task, the mean score of its examples.
        seconds: Time of the passes over the texts, without the output layer.
    """

    texts: Mapping[str, float]
    retrieval: Mapping[str, Score]
    seconds: float

    def losses(self, before: Verified) -> dict[str, float]:
        """Return the relative rise of perplexity since `before`; 0.02 is 2 %.

        The keys are text names and tasks. For a task, only the answers count.
        """
        texts = {
            name: Score(nats, 0.0).loss(Score(before.texts[name], 0.0))
            for name, nats in self.texts.items()
        }
        tasks = {task: score.loss(before.retrieval[task]) for task, score in self.retrieval.items()}
        return texts | tasks


@torch.no_grad()
def verify(
    model: PreTrainedModel, texts: Mapping[str, Tensor], examples: Sequence[Example] = ()
) -> Verified:
    """Measure a causal model on texts and retrieval examples.

    Args:
        model: A causal model, patched or not.
        texts: For each text name, token ids [N]. At least one text.
        examples: Retrieval examples, as `hf_hyperattn.inject.examples` makes them.

    Raises:
        ValueError: `texts` is empty, or a text has the name of a task, whose loss would overwrite
            the loss of the text.
    """
    if not texts:
        raise ValueError("texts is empty; allowed: one or more by name")
    refuse_names(texts, {example.task for example in examples})
    seconds = 0.0
    losses: dict[str, float] = {}
    with evaluation_mode(model):
        head = head_of(model, next(iter(texts.values())))
        for name, ids in texts.items():
            start = read_clock()
            hidden = final_hidden(model, ids)
            # Stop before the output layer: injection does not change it, and its time would hide
            # differences between attentions.
            seconds += read_clock() - start
            losses[name] = loss_of(head, hidden, ids, gradient=False)[0]
        scores = [
            score_hidden(final_hidden(model, example.ids), head, example) for example in examples
        ]
    return Verified(losses, by_task(examples, scores), seconds)
