"""BigBird: served where `attention_type="original_full"`, refused where it is "block_sparse".

What differs. Full attention is BERT's, with the mask added. Block-sparse attention joins global, window and
random blocks in several partial products, which is no attention call; moreover the model replaces those
modules by fresh full ones during a forward with a short input, so nothing done to a module would last.
Cross-attention reads the cache in its own way and gets no mask.

How it is routed. Full self-attention goes through the interface, cross-attention stays the stock's.
"""

from __future__ import annotations

from .bert_layout import BertRoute
from .routing import Route


class BigBirdRoute(BertRoute):
    """`BigBirdSelfAttention` through the attention interface."""

    def forward(self, hidden_states, attention_mask=None, encoder_hidden_states=None, **kwargs):
        if encoder_hidden_states is not None:
            return self.stock_class.forward(
                self, hidden_states, attention_mask, encoder_hidden_states, **kwargs
            )
        kwargs.pop("encoder_attention_mask", None)
        return super().forward(hidden_states, attention_mask, **kwargs)


class BigBirdSparseRoute(Route):
    """Refuses `BigBirdBlockSparseAttention`."""

    @classmethod
    def check(cls, module):
        raise ValueError(
            "big_bird: attention_type='block_sparse' is no single softmax over the keys and is not served; load the "
            "model with attention_type='original_full'"
        )


ROUTES = {"BigBirdSelfAttention": BigBirdRoute, "BigBirdBlockSparseAttention": BigBirdSparseRoute}
