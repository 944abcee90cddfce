"""HsaEncoder against the recursion of the paper in loops, and as a model of Transformers."""

import copy
import math
import pickle

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.hierarchy.text import kinds_of
from hf_hyperattn.integration.architectures.hsa_encoder import (
    HsaEncoder,
    HsaEncoderConfig,
    HsaEncoderForSequenceClassification,
    modeling,
)

TEXTS = ["The cde fg. Hij kl!", "Abc. Def."]
#: Spans of the tokens: words, and what ends a sentence.
OFFSETS = [[(0, 3), (4, 7), (8, 10), (10, 11), (12, 15), (16, 18), (18, 19)], [(0, 4), (5, 9)]]
LEVELS = ("sentence",)
#: The same as nested lists, (kind, children): tokens of the text, then patches, which begin at 7, 3 in a row.
IMAGE = ("image", [("cell", [7, 8, 10, 11]), ("cell", [9, 12]), ("cell", [13, 14]), 15])
TREES = [
    ("signals", [("text", [("sentence", [0, 1, 2, 3]), ("sentence", [4, 5, 6])]), IMAGE]),
    ("signals", [("text", [0, 1]), IMAGE]),
]
MASK = torch.tensor([[1] * 7, [1, 1, 0, 0, 0, 0, 0]])


def config_of(**changes):
    small = dict(
        vocab_size=11, image_size=12, hidden_size=16, intermediate_size=24, num_attention_heads=2
    )
    small |= dict(
        max_position_embeddings=8, sibling_size=3, num_labels=3, text_kinds=list(kinds_of(LEVELS))
    )
    return HsaEncoderConfig(**(small | changes))


def model_of(cls=HsaEncoder, **changes):
    model = cls(config_of(**changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def text_hierarchy():
    longest = [[*row, *[(0, 0)] * (7 - len(row))] for row in OFFSETS]
    return ha.Hierarchy.from_text(TEXTS, longest, LEVELS, MASK)


def batch(**changes):
    found = dict(
        input_ids=torch.randint(11, (2, 7)), attention_mask=MASK, hierarchy=text_hierarchy()
    )
    return found | dict(pixel_values=torch.randn(2, 1, 12, 12)) | changes


# --- the recursion, in loops ------------------------------------------------------------------------------------------


def leaves(node):
    return [node] if isinstance(node, int) else [i for child in node[1] for i in leaves(child)]


def mean_logits(S, node, tables):
    """S̄_BC + e_B·e_C for the children of a node."""
    kind, children = node
    found = [[None] * len(children) for _ in children]
    for b, B in enumerate(children):
        for c, C in enumerate(children):
            if b != c:
                mean = torch.stack([S[i, j] for i in leaves(B) for j in leaves(C)]).mean()
                found[b][c] = mean + tables[kind][b] @ tables[kind][c]
    return found


def rho(S, node, tables, keep):
    if isinstance(node, int):
        return S[node, node] if keep else torch.tensor(-math.inf, dtype=S.dtype)
    size = len(leaves(node))
    logs = log_z(S, node, tables, keep)
    return sum(len(leaves(B)) / size * z for B, z in zip(node[1], logs))


def log_z(S, node, tables, keep):
    means = mean_logits(S, node, tables)
    found = []
    for b, B in enumerate(node[1]):
        terms = [means[b][c] + math.log(len(leaves(C))) for c, C in enumerate(node[1]) if c != b]
        found.append(torch.stack([rho(S, B, tables, keep), *terms]).logsumexp(0))
    return found


def fill(S, node, tables, keep, P, inside):
    """Write the rows of P below a node whose leaves keep `inside` of their attention within it."""
    if isinstance(node, int):
        P[node][node] = inside
        return
    means, logs = mean_logits(S, node, tables), log_z(S, node, tables, keep)
    for b, B in enumerate(node[1]):
        for c, C in enumerate(node[1]):
            for i in leaves(B) if b != c else ():
                for j in leaves(C):
                    P[i][j] = inside * (means[b][c] - logs[b]).exp()
        fill(S, B, tables, keep, P, inside * (rho(S, B, tables, keep) - logs[b]).exp())


def by_loops(query, key, value, hierarchy, scale=None, keep_diagonal=True, siblings=None):
    """What `both` computes, by rows and heads, with the trees above; the hierarchy itself is not looked at."""
    zero = query.new_zeros(())
    out = []
    for row, tree in enumerate(TREES):
        for h in range(query.shape[1]):
            S = query[row, h] @ key[row, h].T / query.shape[-1] ** 0.5
            P = [[zero] * len(S) for _ in S]
            tables = {name: table[:, h] for name, table in zip(siblings.names, siblings.tables)}
            fill(S, tree, tables, keep_diagonal, P, torch.ones_like(zero))
            out.append(torch.stack([torch.stack(line) for line in P]) @ value[row, h])
    return torch.stack(out).unflatten(0, query.shape[:2])


@pytest.mark.parametrize("keep", [True, False])
def test_the_whole_model_is_the_recursion(keep, monkeypatch):
    model, inputs = model_of(keep_diagonal=keep).double(), batch()
    inputs["pixel_values"] = inputs["pixel_values"].double()
    weight = torch.randn(2, 16).double()
    found = {}
    for name, function in (("ours", modeling.attend_both), ("loops", by_loops)):
        monkeypatch.setattr(modeling, "attend_both", function)
        model.zero_grad()
        out = model(**inputs)
        (out.pooler_output * weight).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found[name] = out, gradients
    (ours, mine), (loops, theirs) = found["ours"], found["loops"]
    assert (ours.last_hidden_state - loops.last_hidden_state).abs().max() < 1e-10
    assert mine.keys() == theirs.keys() and any("siblings" in name for name in mine)
    assert max((mine[n] - theirs[n]).abs().max() for n in mine) < 1e-9
    assert ours.last_hidden_state[1, 2:7].abs().max() == 0  # padding


def test_what_is_pooled_is_the_mean_of_the_signals_means():
    out = model_of()(**batch())
    x = out.last_hidden_state
    expected = [(x[r, :n].mean(0) + x[r, 7:].mean(0)) / 2 for r, n in enumerate((7, 2))]
    assert (out.pooler_output - torch.stack(expected)).abs().max() < 1e-6


# --- forms of a call --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["tree", "flat"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_row_is_the_row_alone(attention, side):
    model, ids, image = (
        model_of(attention=attention),
        torch.randint(11, (1, 4)),
        torch.randn(1, 1, 12, 12),
    )
    groups = torch.tensor([[[0], [0], [1], [1]]])
    ask = (lambda h: {"hierarchy": h}) if attention == "tree" else (lambda h: {})
    alone = model(ids, pixel_values=image, **ask(groups))
    pad = (0, 3) if side == "right" else (3, 0)
    wide = [
        torch.nn.functional.pad(t, pad, value=v) for t, v in ((ids, 5), (torch.ones_like(ids), 0))
    ]
    groups = torch.nn.functional.pad(groups, (0, 0, *pad), value=-1)
    both_rows = [
        torch.cat([t, t.flip(1)]) for t in (*wide, groups)
    ]  # the other row has padding at the other end
    padded = model(both_rows[0], both_rows[1], image.expand(2, -1, -1, -1), **ask(both_rows[2]))
    assert (padded.pooler_output[0] - alone.pooler_output[0]).abs().max() < 1e-5


def test_group_ids_say_what_the_hierarchy_says():
    model, inputs = model_of(), batch()
    expected = model(**inputs).last_hidden_state
    ids = inputs.pop("hierarchy").to_ids()
    assert torch.equal(model(**inputs, hierarchy=ids).last_hidden_state, expected)
    # kinds count: with other names the sibling embeddings are other ones
    model.config.text_kinds = ["", "sentence", "pair", "text"]
    assert (model(**inputs, hierarchy=ids).last_hidden_state - expected).abs().max() > 1e-3


def test_the_hierarchy_matters_and_a_text_without_one_is_flat():
    tree = model_of(sibling_positions={})
    flat = HsaEncoder(config_of(attention="flat")).eval()
    flat.load_state_dict(tree.state_dict())
    inputs = batch()
    hierarchy, _ = inputs.pop("hierarchy"), inputs.pop("pixel_values")
    plain = flat(**inputs).pooler_output
    assert (tree(**inputs).pooler_output - plain).abs().max() < 1e-5
    assert (tree(**inputs, hierarchy=hierarchy).pooler_output - plain).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["tree", "flat"])
def test_either_signal_alone(attention):
    model, inputs = model_of(attention=attention), batch()
    text = model(inputs["input_ids"], MASK)
    image = model(pixel_values=inputs["pixel_values"], output_hidden_states=True)
    assert text.last_hidden_state.shape == (2, 7, 16) and image.last_hidden_state.shape == (
        2,
        9,
        16,
    )
    assert (image.pooler_output - image.last_hidden_state.mean(1)).abs().max() < 1e-6
    assert len(image.hidden_states) == 3 and text.hidden_states is None
    assert isinstance(model(inputs["input_ids"], return_dict=False), tuple)


ERRORS = [
    (
        {},
        dict(input_ids=None, pixel_values=None, hierarchy=None),
        "neither input_ids nor pixel_values",
    ),
    ({}, dict(input_ids=None, attention_mask=None), "hierarchy was given without input_ids"),
    (
        {},
        dict(input_ids=None, hierarchy=None),
        "attention_mask was given without input_ids, .* allowed: None",
    ),
    ({"attention": "flat"}, {}, "attention='flat', which has none"),
    (
        {"vocab_size": 0},
        dict(hierarchy=None),
        "input_ids was given to a model made with vocab_size=0",
    ),
    ({"image_size": 0}, {}, "pixel_values was given to a model made with image_size=0"),
    (
        {},
        dict(pixel_values=torch.zeros(2, 1, 8, 8)),
        r"pixel_values has shape \(2, 1, 8, 8\); allowed",
    ),
    ({}, dict(attention_mask=torch.zeros(2, 7)), "a real token in every row"),
    ({}, dict(attention_mask=None), "disagree about which tokens are padding"),
    ({}, dict(hierarchy=ha.Hierarchy.windows(6, (2,))), "hierarchy is over 6 tokens in 1 rows"),
    (
        {"max_position_embeddings": 5},
        {},
        "a text has 7 tokens; allowed: at most max_position_embeddings=5",
    ),
    ({"sibling_positions": {"text": 2}}, {}, "which have no sibling embeddings; allowed: 'text'"),
    (
        {"sibling_positions": {"text": 1, "signals": 2, "image": 4, "cell": 4, "sentence": 4}},
        {},
        "at most 1",
    ),
]


@pytest.mark.parametrize("settings, call, message", ERRORS)
def test_calls_that_make_no_sense(settings, call, message):
    model = model_of(**settings)
    with pytest.raises(ValueError, match=message):
        model(**batch(**call))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"attention": "trees"}, "attention='trees' is not allowed; allowed: 'tree' or 'flat'"),
        (
            {"hidden_size": 15},
            "hidden_size=15 is not allowed; allowed: multiples of num_attention_heads=2",
        ),
        ({"image_size": 13}, "image_size=13 is not allowed"),
        ({"vocab_size": 0, "image_size": 0}, "vocab_size=0 is not allowed"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 is not allowed; allowed: numbers from 0"),
        (
            {"hidden_dropout_prob": float("nan")},
            "hidden_dropout_prob=nan is not allowed; allowed: numbers from 0 to 1",
        ),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob=1.5 is not allowed"),
    ],
)
def test_configs_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        config_of(**settings)


def test_a_saved_config_of_flat_attention_without_diagonal_loads_with_a_warning(tmp_path, caplog):
    config_of(attention="flat", keep_diagonal=False).save_pretrained(tmp_path)
    caplog.clear()
    assert not ha.HsaEncoderConfig.from_pretrained(tmp_path).keep_diagonal
    assert "keep_diagonal=False says nothing with attention='flat'" in caplog.text


# --- a model of Transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["tree", "flat"])
def test_saved_and_loaded_by_the_auto_classes(attention, tmp_path):
    model, inputs = model_of(HsaEncoderForSequenceClassification, attention=attention), batch()
    if attention == "flat":
        del inputs["hierarchy"]
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is HsaEncoderForSequenceClassification and torch.equal(
        again(**inputs).logits, expected
    )
    ignored = {"_name_or_path": None, "dtype": None}
    assert again.config.to_dict() | ignored == model.config.to_dict() | ignored
    body = hf.AutoModel.from_pretrained(tmp_path)
    assert type(body) is HsaEncoder
    assert torch.equal(body(**inputs).pooler_output, model.encoder(**inputs).pooler_output)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(clone(**inputs).logits, expected)


def test_made_anew_every_parameter_is_set():
    model = HsaEncoder(config_of())
    tables = [t for layer in model.layers for t in layer.attention.siblings.tables]
    assert len(tables) == 2 * 8 and all(0.01 < t.std() < 0.03 for t in tables if t.numel() > 50)
    with torch.device("meta"):
        empty = HsaEncoder(config_of())
    empty.to_empty(device="cpu")
    for p in empty.parameters():
        p.data.fill_(7)
        p._is_hf_initialized = False
    empty.init_weights()
    assert not any((p == 7).any() for p in empty.parameters())


def test_checkpointing_and_half_precision():
    model, inputs = (
        model_of(HsaEncoderForSequenceClassification).train(),
        batch(labels=torch.tensor([0, 2])),
    )
    out = model(**inputs)
    assert out.loss == torch.nn.functional.cross_entropy(out.logits, inputs["labels"])
    out.loss.backward()
    learned = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**inputs).loss.backward()
    parameters = dict(model.named_parameters())
    assert all(torch.allclose(parameters[n].grad, g, atol=1e-7) for n, g in learned.items())
    half = model.to(torch.bfloat16).eval()(**inputs)
    assert (
        half.logits.dtype == torch.bfloat16 and (half.logits.float() - out.logits).abs().max() < 0.2
    )


@pytest.mark.parametrize("attention", ["tree", "flat"])
def test_it_learns_what_neither_signal_tells_alone(attention):
    torch.manual_seed(1)
    model = HsaEncoderForSequenceClassification(
        config_of(attention=attention, num_labels=4, hidden_size=32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    known = {"hierarchy": ha.Hierarchy.from_ids(torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))}
    for _ in range(80):
        word, bright = torch.randint(2, (2, 32))
        ids = torch.randint(2, 11, (32, 7))
        ids[:, 2] = word
        image = torch.randn(32, 1, 12, 12)
        image[:, :, 4:8, 4:8] += (4 * bright - 2)[:, None, None, None]
        out = model(
            ids,
            pixel_values=image,
            labels=2 * word + bright,
            **known if attention == "tree" else {},
        )
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert out.loss < 0.2
