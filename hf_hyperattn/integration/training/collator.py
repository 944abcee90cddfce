"""Hierarchies of texts during training: made with the tokens, kept by the Trainer, padded in the
batch.

`HierarchyCollator` does this for any dataset of texts and a fast tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerBase

from ...hierarchy import Hierarchy
from ...hierarchy.ids import deepened_ids
from ...hierarchy.text import Level, checked_levels

NAME = "hierarchy"


class HierarchyCollator:
    """Data collator that adds the hierarchy of every text to the batch.

    The model takes it as `model(..., hierarchy=...)`. A feature may bring its group ids in a column
    `hierarchy`. `tokenize` makes that column with `dataset.map`. The Trainer keeps it, since
    `forward` of a model patched with a hierarchical mechanism has this argument. For features
    without the column the hierarchy is read from the decoded tokens. It is exact if decoding gives
    back the text, including line breaks.

    Args:
        tokenizer: A fast tokenizer.
        levels: As in `Hierarchy.from_text`, coarse to fine.
        collator: Collator for the rest of the batch. None: `DataCollatorWithPadding(tokenizer)`.

    Raises:
        ValueError: A slow tokenizer, or an unknown level.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        levels: Sequence[Level] = ("paragraph", "sentence", "word"),
        collator: Callable | None = None,
    ):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} gives no offsets; allowed: fast tokenizers, such as those of AutoTokenizer"
            )
        self.tokenizer = tokenizer
        self.levels = checked_levels(levels)
        self.collator = DataCollatorWithPadding(tokenizer) if collator is None else collator
        #: The text of every token decoded so far.
        self._read: dict[int, str] = {}

    def tokenize(self, text: list, text_pair: list[str] | None = None, **options) -> BatchEncoding:
        """Tokenize texts and add the column `hierarchy`; for `dataset.map(..., batched=True)`.

        Args:
            text: A list of texts.
            text_pair: A second text for each, or None.
            options: Options of the tokenizer. `return_tensors` is not allowed.
        """
        # Offsets are needed here. The column is removed at the end unless the caller asked for it.
        keep_offsets = options.pop("return_offsets_mapping", False)
        encoding = self.tokenizer(text, text_pair, return_offsets_mapping=True, **options)
        ids = []
        for row, offsets in enumerate(encoding["offset_mapping"]):
            whole = text[row] if text_pair is None else (text[row], text_pair[row])
            # Some tokenizers return no attention mask. Then nothing is padded.
            mask = [1] * len(offsets)
            if "attention_mask" in encoding:
                mask = encoding["attention_mask"][row]
            # In a pair, offsets start at 0 in both texts. The sequence ids tell the texts apart.
            sequence_ids = None if text_pair is None else [encoding.sequence_ids(row)]
            tree = Hierarchy.from_text(
                [whole], [offsets], self.levels, torch.tensor([mask]), sequence_ids
            )
            ids.append(tree.to_ids()[0])
        levels = max((row.shape[1] for row in ids), default=1)
        encoding[NAME] = [deepened_ids(row, levels).tolist() for row in ids]
        if not keep_offsets:
            del encoding["offset_mapping"]
        return encoding

    def __call__(self, features: Sequence[dict], *args, **kwargs) -> dict:
        """Return the batch, with group ids [batch, length, levels] under `hierarchy`.

        Raises:
            ValueError: The inner collator changed the number of rows or of tokens.
        """
        ids = [self.read_ids(feature) for feature in features]
        rest = [{k: v for k, v in feature.items() if k != NAME} for feature in features]
        batch = self.collator(rest, *args, **kwargs)
        batch[NAME] = self.pad_ids(ids, batch)
        return batch

    def read_ids(self, feature: dict) -> Tensor:
        """Return the group ids [length, levels] of one feature, without padding."""
        if feature.get(NAME) is not None:
            ids = torch.as_tensor(feature[NAME]).long()
            # A list with one number per token is a hierarchy of one level.
            return ids[:, None] if ids.dim() == 1 else ids
        tokens = torch.as_tensor(feature["input_ids"]).tolist()
        return self.read_outline(tokens, feature.get("attention_mask"))

    def read_outline(self, ids: list[int], attention_mask=None) -> Tensor:
        """Return group ids [length, levels] of tokens, read from their decoded text."""
        special = set(self.tokenizer.all_special_ids)
        # Special tokens belong to no text: their pieces are empty, and their offsets (0, 0).
        pieces = ["" if token in special else self.decode_token(token) for token in ids]
        lengths = torch.tensor([len(piece) for piece in pieces])
        offsets = torch.stack([lengths.cumsum(0) - lengths, lengths.cumsum(0)], 1)
        offsets[torch.tensor([token in special for token in ids])] = 0
        mask = None if attention_mask is None else torch.as_tensor(attention_mask)[None]
        return Hierarchy.from_text("".join(pieces), offsets, self.levels, mask).to_ids()[0]

    def decode_token(self, token: int) -> str:
        """Return the text that a token adds after another one, including its space."""
        if token not in self._read:
            # Some tokenizers drop a leading space, so the token is decoded behind an "a", which is
            # cut off again.
            before = self.tokenizer.encode("a", add_special_tokens=False)[-1:]
            prefix = self.tokenizer.decode(before, clean_up_tokenization_spaces=False)
            both = self.tokenizer.decode([*before, token], clean_up_tokenization_spaces=False)
            self._read[token] = str(both[len(prefix) :])
        return self._read[token]

    def pad_ids(self, ids: list[Tensor], batch: dict) -> Tensor:
        """Return the group ids of a batch, [batch, length, levels], -1 at padding."""
        rows, length = batch["input_ids"].shape[:2]
        if rows != len(ids) or any(len(row) > length for row in ids):
            raise ValueError(
                f"{type(self.collator).__name__} made {rows} rows of {length} tokens from {len(ids)} features of up "
                f"to {max(map(len, ids))}; allowed: collators that pad each feature into a row of its own"
            )
        levels = max(row.shape[1] for row in ids)
        padded = torch.full((rows, length, levels), -1, dtype=torch.long)
        for row, row_ids in enumerate(ids):
            begin = length - len(row_ids) if self.tokenizer.padding_side == "left" else 0
            padded[row, begin : begin + len(row_ids)] = deepened_ids(row_ids, levels)
        return padded
