"""HsaEncoder: text and image in one sequence, with attention tied over one tree (arXiv 2509.15448).

The root of the tree joins the given signals: a text, flat or with the hierarchy of the call, and an
    image as the quad-tree of its patches. Families of every kind have sibling embeddings, one table
    per layer.
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.utils import can_return_tuple

from ....hierarchy import Hierarchy
from ....mechanisms.hsa.tree.both import attend_both
from ....mechanisms.hsa.tree.pair_terms import SiblingEmbeddings
from .configuration import HsaEncoderConfig

#: Trees of text and image, by the text's hierarchy and the image's side, while the text's hierarchy
#: lives.
_JOINED: WeakKeyDictionary[Hierarchy, dict[int, Hierarchy]] = WeakKeyDictionary()


# Cached, since a tree keeps the tables that attention computes from it.
@cache
def image_tree(side: int) -> Hierarchy:
    """Return the quad-tree of an image of side x side patches."""
    return Hierarchy.quadtree(side, side)


@cache
def flat_tree(length: int) -> Hierarchy:
    """Return a tree of one family with all tokens of a text."""
    return Hierarchy.windows(length, ())


def joined_tree(text: Hierarchy, side: int) -> Hierarchy:
    """Return the tree with a root over a text and an image."""
    known = _JOINED.setdefault(text, {})
    if side not in known:
        known[side] = Hierarchy.join([text, image_tree(side)])
    return known[side]


class HsaAttention(nn.Module):
    """Self-attention, [B, N, width] to [B, N, width], tied over a hierarchy or among all tokens."""

    def __init__(self, config: HsaEncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.keep_diagonal = config.keep_diagonal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.siblings = None
        if config.attention == "tree" and config.sibling_positions:
            # Sorted, because config.json keeps no order, and the order numbers the tables in a
            # checkpoint.
            positions = dict(sorted(config.sibling_positions.items()))
            self.siblings = SiblingEmbeddings(
                positions, self.heads, config.sibling_size, config.initializer_range
            )

    def forward(self, x: Tensor, hierarchy: Hierarchy | None, mask: Tensor | None) -> Tensor:
        """Return the output, [B, N, width] like `x`.

        Args:
            hierarchy: Tree over all tokens. None: plain softmax attention.
            mask: Visible keys, bool, broadcastable to [B, H, N, N]. Read only without a hierarchy.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if hierarchy is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = attend_both(
                q, k, v, hierarchy, keep_diagonal=self.keep_diagonal, siblings=self.siblings
            )
        return self.out(out.to(x.dtype).transpose(1, 2).flatten(2))


class HsaBlock(GradientCheckpointingLayer):
    """A pre-norm transformer block: x + attention(norm(x)), then the same with a two-layer MLP."""

    def __init__(self, config: HsaEncoderConfig):
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.mlp_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.attention = HsaAttention(config)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)
        self.act = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, hierarchy: Hierarchy | None, mask: Tensor | None) -> Tensor:
        """Return the output, [B, N, width] like `x`. Arguments as in `HsaAttention.forward`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), hierarchy, mask))
        return x + self.dropout(self.down(self.act(self.up(self.mlp_norm(x)))))


class HsaEncoderPreTrainedModel(PreTrainedModel):
    """Base class that tells Transformers how to initialise and load HsaEncoder models."""

    config_class = HsaEncoderConfig
    config: HsaEncoderConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        # Tables of sibling embeddings. Transformers skips modules without parameters of their own,
        # so the list is initialised here.
        if isinstance(module, nn.ParameterList):
            for table in module:
                init.normal_(table, std=self.config.initializer_range)


class HsaEncoder(HsaEncoderPreTrainedModel):
    """Encoder of text, image, or both.

    The output has `last_hidden_state` [B, N, hidden_size], text first, then patches in raster
    order. `pooler_output` [B, hidden_size] is the mean over the signals of the mean over their
    tokens.
    """

    def __init__(self, config: HsaEncoderConfig):
        super().__init__(config)
        width = config.hidden_size
        places = config.max_position_embeddings
        # Only the modules of the signals that the config names exist.
        self.words = None
        if config.vocab_size:
            self.words = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.places = nn.Embedding(places, width) if config.vocab_size and places else None
        self.side = config.image_size // config.patch_size
        self.patches = self.patch_places = None
        if self.side:
            patch = config.patch_size
            self.patches = nn.Conv2d(config.num_channels, width, patch, patch)
            self.patch_places = nn.Embedding(self.side**2, width) if places else None
        self.signals = nn.Embedding(2, width)
        self.layers = nn.ModuleList([HsaBlock(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        """Return the table of word embeddings; None in a model without text."""
        return self.words

    def set_input_embeddings(self, value):
        """Replace the table of word embeddings."""
        self.words = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        hierarchy: Hierarchy | Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple:
        """Encode a batch. return_dict=False returns a tuple.

        Args:
            input_ids: int64 [B, L]. None: no text.
            attention_mask: [B, L], 0 at padding, which may be on either side. Every row needs a
                real token. None: no padding.
            pixel_values: [B, channels, image_size, image_size]. None: no image.
            hierarchy: Hierarchy of the L text tokens: a `Hierarchy` of 1 or B rows, or group ids
                [B, L, levels] as `HierarchyCollator` makes them. Padding belongs to no group. None:
                the text is one flat family.
            output_hidden_states: Whether to return the input of every layer and the output of the
                last.

        Raises:
            ValueError: Both signals are missing, the model was not made for one of them, or shapes
                do not fit.
        """
        self._check_inputs(input_ids, attention_mask, pixel_values, hierarchy)
        # 1. Embed the signals, and put them behind each other.
        parts = []
        if input_ids is not None:
            parts.append(self._embed_text(input_ids, attention_mask))
        if pixel_values is not None:
            parts.append(self._embed_image(pixel_values))
        x = torch.cat([part for part, _ in parts], 1)
        real = torch.cat([mask for _, mask in parts], 1)
        # 2. Padding is hidden by the tree, which does not contain it, or by a mask.
        tree = mask = None
        if self.config.attention == "tree":
            tree = self._build_tree(input_ids, attention_mask, pixel_values, hierarchy)
        elif not bool(real.all()):
            mask = real[:, None, None]
        # 3. Run the layers.
        states = [x]
        for layer in self.layers:
            x = layer(x, tree, mask)
            states.append(x)
        # 4. Pool: each signal counts the same, however many tokens it has. Padding is 0 and not
        # counted.
        x = self.norm(x) * real[..., None]
        starts = [0, parts[0][0].shape[1], x.shape[1]] if len(parts) == 2 else [0, x.shape[1]]
        means = [
            x[:, a:b].sum(1) / real[:, a:b].sum(1, keepdim=True) for a, b in zip(starts, starts[1:])
        ]
        pooled = torch.stack(means).mean(0)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return BaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=pooled,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _check_inputs(self, input_ids, attention_mask, pixel_values, hierarchy) -> None:
        """Raise for signals that the model lacks, and for arguments that would be ignored."""
        for name, signal, module, field in (
            ("input_ids", input_ids, self.words, "vocab_size"),
            ("pixel_values", pixel_values, self.patches, "image_size"),
        ):
            if signal is not None and module is None:
                raise ValueError(
                    f"{name} was given to a model made with {field}=0; allowed: None, or another model"
                )
        if input_ids is None and pixel_values is None:
            raise ValueError(
                "HsaEncoder was called with neither input_ids nor pixel_values; allowed: one or both"
            )
        for name, given in (("attention_mask", attention_mask), ("hierarchy", hierarchy)):
            if given is not None and input_ids is None:
                raise ValueError(
                    f"{name} was given without input_ids, whose tokens it is about; allowed: None"
                )
        if hierarchy is not None and self.config.attention == "flat":
            raise ValueError(
                "hierarchy was given to a model with attention='flat', which has none; allowed: None"
            )

    def _embed_text(
        self, input_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return text embeddings [B, L, width], and which tokens are real, bool [B, L]."""
        real = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            real = attention_mask != 0
        if real.shape != input_ids.shape or not bool(real.any(1).all()):
            raise ValueError(
                f"attention_mask has shape {tuple(real.shape)}; allowed: {tuple(input_ids.shape)} with a real token in "
                "every row"
            )
        # For type checkers: `_check_inputs` has raised already.
        assert self.words is not None
        x = self.words(input_ids) + self.signals.weight[0]
        if self.places is not None:
            most = int(real.sum(1).max())
            if most > self.places.num_embeddings:
                raise ValueError(
                    f"a text has {most} tokens; allowed: at most max_position_embeddings={self.places.num_embeddings}"
                )
            # Positions count real tokens only, so padding on the left moves nothing.
            x = x + self.places((real.cumsum(1) - 1).clamp_min(0))
        return x, real

    def _embed_image(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return patch embeddings [B, patches, width], and their mask, which is all True."""
        size = self.config.image_size
        channels = self.config.num_channels
        if pixel_values.shape[1:] != (channels, size, size):
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; allowed: [B, {channels}, {size}, {size}]"
            )
        # For type checkers: `_check_inputs` has raised already.
        assert self.patches is not None
        x = self.patches(pixel_values.to(self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        x = x + self.signals.weight[1]
        if self.patch_places is not None:
            x = x + self.patch_places.weight
        return x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)

    def _build_tree(self, input_ids, attention_mask, pixel_values, hierarchy) -> Hierarchy:
        """Return one tree over all tokens."""
        if input_ids is None:
            return image_tree(self.side)
        text = self._build_text_tree(input_ids, attention_mask, hierarchy)
        return text if pixel_values is None else joined_tree(text, self.side)

    def _build_text_tree(
        self, input_ids: Tensor, attention_mask: Tensor | None, hierarchy
    ) -> Hierarchy:
        """Return the tree over the tokens of the text.

        Raises:
            ValueError: The hierarchy has other tokens or rows than the text, or other padding.
        """
        batch, length = input_ids.shape
        real = torch.ones(1, length) if attention_mask is None else attention_mask.cpu()
        if hierarchy is None:
            if bool((real != 0).all()):
                return flat_tree(length)
            return Hierarchy.windows(length, (), attention_mask)
        if isinstance(hierarchy, Tensor):
            hierarchy = Hierarchy.from_ids(hierarchy, self.config.text_kinds or ("",))
        if hierarchy.length != length or hierarchy.rows not in (1, batch):
            raise ValueError(
                f"hierarchy is over {hierarchy.length} tokens in {hierarchy.rows} rows; allowed: the {length} tokens "
                f"of the text, in 1 or {batch} rows"
            )
        # Tokens in the tree must be the real ones: padding in it would be attended to.
        inside = torch.zeros(hierarchy.rows, length, dtype=torch.bool)
        for row in range(hierarchy.rows):
            inside[row, hierarchy.tokens_of(row)] = True
        if bool((inside != (real != 0)).any()):
            raise ValueError(
                "hierarchy and attention_mask disagree about which tokens are padding; allowed: the same in both"
            )
        return hierarchy


class HsaEncoderForSequenceClassification(HsaEncoderPreTrainedModel):
    """`HsaEncoder` with a linear head on `pooler_output`.

    The output has `logits` [B, num_labels], and the cross-entropy `loss` if labels are given.
    """

    def __init__(self, config: HsaEncoderConfig):
        super().__init__(config)
        self.encoder = HsaEncoder(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, int(config.num_labels or 0))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        hierarchy: Hierarchy | Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Classify a batch. Arguments as in `HsaEncoder.forward`, and `labels`, int64 [B]."""
        encoded = self.encoder(
            input_ids,
            attention_mask,
            pixel_values,
            hierarchy,
            output_hidden_states,
            return_dict=True,
        )
        logits = self.classifier(self.dropout(encoded.pooler_output))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states
        )
