"""SEW-D: DeBERTa-v2's disentangled attention over speech, with a softmax that gives hidden keys exactly nothing.

What differs from DeBERTa-v2. Weights of hidden keys are set to zero after the softmax too, so a row of padding is
zero: the convolution that restores the frame rate would carry anything else into real frames. Dropout is the
family's own module, with the probability under another name. Weights are returned always.

How it is routed. As DeBERTa-v2; rows without a visible key are set to zero afterwards.
"""

from __future__ import annotations

from .deberta_v2 import DebertaV2Route


class SEWDRoute(DebertaV2Route):
    """`DisentangledSelfAttention` of SEW-D through the attention interface."""

    @property
    def weights_dropout(self) -> float:
        """Probability with which weights are dropped."""
        return self.dropout.drop_prob

    def forward(
        self,
        hidden_states,
        attention_mask,
        query_states=None,
        relative_pos=None,
        rel_embeddings=None,
        **kwargs,
    ):
        mask = attention_mask.bool()
        context, weights = self.disentangled(
            hidden_states, mask, query_states, relative_pos, rel_embeddings
        )
        context = context.masked_fill(~mask.any(-1)[:, 0, :, None], 0.0)
        return context, None if weights is None else weights.masked_fill(~mask, 0.0)


ROUTES = {"DisentangledSelfAttention": SEWDRoute}
