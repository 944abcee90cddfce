"""BigBird and BigBird-Pegasus' encoder: served with `attention_type="original_full"`, refused with "block_sparse".

What differs. Full attention is BERT's, with the mask added. Block-sparse attention joins global, window and
random blocks in several partial products, which is no attention call; moreover the model replaces those modules
by fresh full ones during a forward with a short input, so nothing done to a module would last. Cross-attention
of BigBird reads the cache in its own way and gets no mask. BigBird-Pegasus' decoder calls the
interface itself, but without saying that it is causal: where the mask may be left out, it would not be.

How it is routed. Full self-attention goes through the interface, BigBird's cross-attention stays the stock's.
BigBird-Pegasus' decoder keeps its own call and adds `is_causal` to it.
"""

from __future__ import annotations

from .bert_layout import BertRoute
from .routing import STOCK_CACHE, Route


class BigBirdRoute(BertRoute):
    """Full self-attention through the attention interface."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        cache=None,
        **kwargs,
    ):
        if encoder_hidden_states is not None:
            kwargs |= {"encoder_attention_mask": encoder_attention_mask, STOCK_CACHE: cache}
            return self.stock_class.forward(
                self, hidden_states, attention_mask, encoder_hidden_states, **kwargs
            )
        return super().forward(hidden_states, attention_mask, cache=cache, **kwargs)


class BigBirdSparseRoute(Route):
    """Refuses block-sparse attention."""

    @classmethod
    def check(cls, module):
        raise ValueError(
            f"{type(module).__name__}: attention_type='block_sparse' is no single softmax over the keys and is not "
            "served; load the model with attention_type='original_full'"
        )


class PegasusDecoderRoute(Route):
    """`BigBirdPegasusDecoderAttention`, which calls the interface, with the keyword that it lacks."""

    def forward(self, hidden_states, key_value_states=None, **kwargs):
        kwargs.setdefault("is_causal", self.is_decoder and key_value_states is None)
        return super().forward(hidden_states, key_value_states=key_value_states, **kwargs)


ROUTES = {
    "BigBirdBlockSparseAttention": BigBirdSparseRoute,
    "BigBirdPegasusBlockSparseAttention": BigBirdSparseRoute,
    "BigBirdPegasusDecoderAttention": PegasusDecoderRoute,
    "BigBirdPegasusSelfAttention": BigBirdRoute,
    "BigBirdSelfAttention": BigBirdRoute,
}
