"""Hierarchies of texts in training: made with the tokens, kept by the Trainer, padded with the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerBase

from ..hierarchy import Hierarchy
from ..hierarchy.ids import deepened_ids
from ..hierarchy.text import Level, checked_levels

NAME = "hierarchy"


class HierarchyCollator:
    """A data collator that adds the hierarchy of every text to the batch, for `model(..., hierarchy=...)`.

    A feature may bring its group ids in a column `hierarchy`; `tokenize` makes it, for `dataset.map`, and the Trainer
    keeps it, since a model patched with a structure takes it. Features without it get the outline of what their
    tokens read as, which is exact where decoding gives back the text, line breaks included.

    Args:
        tokenizer: a fast tokenizer.
        levels: as in `Hierarchy.from_text`, coarse to fine.
        collator: makes the rest of the batch; None: `DataCollatorWithPadding(tokenizer)`.

    Raises:
        ValueError: a slow tokenizer, an unknown level.
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
        self.tokenizer, self.levels = tokenizer, checked_levels(levels)
        self.collator = DataCollatorWithPadding(tokenizer) if collator is None else collator
        self._read: dict[int, str] = {}

    def tokenize(self, text: list, text_pair: list[str] | None = None, **options) -> BatchEncoding:
        """What the tokenizer gives, with the column `hierarchy`; for `dataset.map(..., batched=True)`.

        Args:
            text: a list of texts.
            text_pair: a second text for each.
            options: for the tokenizer; `return_tensors` is not among them.
        """
        kept = options.pop("return_offsets_mapping", False)
        encoding = self.tokenizer(text, text_pair, return_offsets_mapping=True, **options)
        ids = []
        for row, offsets in enumerate(encoding["offset_mapping"]):
            whole = text[row] if text_pair is None else (text[row], text_pair[row])
            mask = (
                encoding["attention_mask"][row]
                if "attention_mask" in encoding
                else [1] * len(offsets)
            )
            numbers = None if text_pair is None else [encoding.sequence_ids(row)]
            tree = Hierarchy.from_text(
                [whole], [offsets], self.levels, torch.tensor([mask]), numbers
            )
            ids.append(tree.to_ids()[0])
        levels = max((row.shape[1] for row in ids), default=1)
        encoding[NAME] = [deepened_ids(row, levels).tolist() for row in ids]
        if not kept:
            del encoding["offset_mapping"]
        return encoding

    def __call__(self, features: Sequence[dict], *args, **kwargs) -> dict:
        """The batch, with group ids [batch, length, levels] under `hierarchy`.

        Raises:
            ValueError: the collator changed the number of rows or of tokens.
        """
        ids = [self.read_ids(feature) for feature in features]
        rest = [{k: v for k, v in feature.items() if k != NAME} for feature in features]
        batch = self.collator(rest, *args, **kwargs)
        batch[NAME] = self.pad_ids(ids, batch)
        return batch

    def read_ids(self, feature: dict) -> Tensor:
        """Group ids [length, levels] of one feature, without padding."""
        if feature.get(NAME) is not None:
            ids = torch.as_tensor(feature[NAME]).long()
            return ids[:, None] if ids.dim() == 1 else ids
        return self.read_outline(
            torch.as_tensor(feature["input_ids"]).tolist(), feature.get("attention_mask")
        )

    def read_outline(self, ids: list[int], attention_mask=None) -> Tensor:
        """Group ids [length, levels] of tokens, from the text that they read as."""
        special = set(self.tokenizer.all_special_ids)
        pieces = ["" if token in special else self.decode_token(token) for token in ids]
        lengths = torch.tensor([len(piece) for piece in pieces])
        offsets = torch.stack([lengths.cumsum(0) - lengths, lengths.cumsum(0)], 1)
        offsets[torch.tensor([token in special for token in ids])] = 0
        mask = None if attention_mask is None else torch.as_tensor(attention_mask)[None]
        return Hierarchy.from_text("".join(pieces), offsets, self.levels, mask).to_ids()[0]

    def decode_token(self, token: int) -> str:
        """What a token adds to the text after another one, its space included."""
        if token not in self._read:
            before = self.tokenizer.encode("a", add_special_tokens=False)[-1:]
            both = self.tokenizer.decode([*before, token], clean_up_tokenization_spaces=False)
            alone = self.tokenizer.decode(before, clean_up_tokenization_spaces=False)
            self._read[token] = str(both[len(alone) :])
        return self._read[token]

    def pad_ids(self, ids: list[Tensor], batch: dict) -> Tensor:
        """Group ids of a batch, -1 where it has padding."""
        rows, length = batch["input_ids"].shape[:2]
        if rows != len(ids) or any(len(row) > length for row in ids):
            raise ValueError(
                f"{type(self.collator).__name__} made {rows} rows of {length} tokens from {len(ids)} features of up "
                f"to {max(map(len, ids))}; allowed: collators that pad each feature into a row of its own"
            )
        levels = max(row.shape[1] for row in ids)
        padded = torch.full((rows, length, levels), -1, dtype=torch.long)
        for row, of_row in enumerate(ids):
            begin = length - len(of_row) if self.tokenizer.padding_side == "left" else 0
            padded[row, begin : begin + len(of_row)] = deepened_ids(of_row, levels)
        return padded
