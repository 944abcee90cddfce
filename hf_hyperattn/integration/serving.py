"""The attention function of patched models, registered under the name `hf_hyperattn`."""

from __future__ import annotations

from .call import host_call, module_output, wants_weights
from .stock import stock_forward


def patched_forward(module, query, key, value, attention_mask, **keywords):
    """`host.hyper` where there is one and it changes something, else what the model ran before.

    Either way the weights are returned where they are wanted, so that `attentions` has one entry for every layer.
    """
    hyper, weights = module._modules.get("hyper"), wants_weights(module, keywords)
    if hyper is not None:
        call = host_call(module, query, key, value, attention_mask, **keywords)

        def stock():
            out, _ = stock_forward(module, query, key, value, attention_mask, **keywords)
            return out.transpose(1, 2)

        found = hyper(call, weights, stock)
        if found is not None:
            return module_output(*found)
    return stock_forward(module, query, key, value, attention_mask, weights, **keywords)
