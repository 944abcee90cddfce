"""HAT models against the definition in loops, and conversion of pretrained encoders against what they were."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.integration import convert
from hf_hyperattn.integration.architectures.hat import HatModel
from hf_hyperattn.mechanisms.hat.config import LAYOUTS
from tests.integration.architectures.hat_models import CONFIGS, HEADS, batch, encoder, hat, texts
from tests.oracles.hat import encode, tokens

#: No cross-segment block: a text of one segment is encoded as before.
PLAIN = ha.HatConfig(segment_length=16, layout="S S S")


# --- the definition ---------------------------------------------------------------------------------------------------


def check_against_loops(model, given, within=1e-12):
    """Outputs and gradients of all parameters."""
    weights = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = model(**given)
    loss = (
        out.last_hidden_state.pow(2).sum(-1) @ torch.ones(out.last_hidden_state.shape[1]).double()
    ) @ weights
    (loss + out.pooler_output.sin().sum()).backward()
    mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = 0
    for row, text in enumerate(texts(given)):
        segments, pooled = encode(model, text)
        states, found = tokens(segments), out.last_hidden_state[row]
        here = given["attention_mask"][row] != 0
        assert (found[here] - states).abs().max() < within and (found[~here] == 0).all()
        assert (out.pooler_output[row] - pooled).abs().max() < within
        assert int(out.segment_mask[row].sum()) == len(segments)
        rows = torch.stack([x[0] for x in segments])
        assert (out.segment_states[row][: len(rows)] - rows).abs().max() < within
        expected = expected + weights[row] * states.pow(2).sum() + pooled.sin().sum()
    expected.backward()
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    largest = max(1, *(g.abs().max() for g in theirs.values()))
    for name, g in theirs.items():
        assert (mine[name] - g).abs().max() < 100 * within * largest, name
    assert all(mine[n].abs().max() == 0 for n in mine.keys() - theirs.keys())


@pytest.mark.parametrize("layout", [*LAYOUTS, "S S S", "SCC S SC"])
def test_the_model_is_the_definition(layout):
    side = ("right", "left", "scattered")[len(layout) % 3]
    check_against_loops(hat(layout=layout), batch(width=15, side=side))


@pytest.mark.parametrize("pooling", ["max", "mean", "tokens"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_pooling_gates_and_attention_functions(pooling, gated, attention):
    model = hat(pooling=pooling, gated=gated)
    model.set_attn_implementation(attention)
    check_against_loops(model, batch())


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 5, 6), (64, 3, 9), (5, 5, 5)])
@pytest.mark.parametrize("segment_length", [2, 5, 64])
def test_all_lengths(lengths, segment_length):
    check_against_loops(hat(segment_length=segment_length), batch(lengths))


def test_segments_of_the_callers_own():
    model, given = hat(), batch((13, 1, 9), side="left")
    groups = torch.arange(13).expand(3, 13) // 3
    out = model(**given, segment_ids=groups)
    for row, text in enumerate(texts(given)):
        here = given["attention_mask"][row] != 0
        segments, pooled = encode(model, text, groups[row][here].tolist())
        assert (out.last_hidden_state[row][here] - tokens(segments)).abs().max() < 1e-12
        assert (out.pooler_output[row] - pooled).abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"segment_ids has shape \(13,\); allowed: \(3, 13\)"):
        model(**given, segment_ids=groups[0])
    long = batch((40,))
    with pytest.raises(ValueError, match="makes 39 segments; allowed: at most 16"):
        model(**long, segment_ids=torch.arange(40)[None])


def test_large_values():
    model = hat()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(20)
    check_against_loops(model, batch(), within=1e-9)


# --- what does not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left", "scattered"])
def test_neither_padding_nor_other_texts_matter(side):
    model, given = hat(), batch((14, 3, 9), side=side, width=21)
    out = model(**given)
    for row, text in enumerate(texts(given)):
        alone = model(torch.tensor([text]))
        here = given["attention_mask"][row] != 0
        assert (out.last_hidden_state[row][here] - alone.last_hidden_state[0]).abs().max() < 1e-12
        assert (out.pooler_output[row] - alone.pooler_output[0]).abs().max() < 1e-12
    noise = given["input_ids"].where(given["attention_mask"] != 0, torch.tensor(60))
    assert torch.equal(
        model(noise, given["attention_mask"]).last_hidden_state, out.last_hidden_state
    )


def test_other_segments_matter_by_their_cls_rows_alone():
    model, given = hat(layout="S S SC"), batch((14,))
    changed = given["input_ids"].clone()
    changed[0, 13] = 59 if changed[0, 13] != 59 else 58
    difference = (
        (model(changed).last_hidden_state - model(given["input_ids"]).last_hidden_state)
        .abs()
        .amax(-1)[0]
    )
    # the last token is in the last of four segments; of the first one only the CLS row, in its place 0, hears of it
    assert difference[0] > 1e-6 and difference[1:13].max() == 0 and difference[13] > 1e-3
    assert (hat(layout="S S S")(**given).last_hidden_state != 0).all()


def test_kinds_and_embeddings():
    model, given = hat(), batch((13, 6))
    kinds = torch.randint(2, given["input_ids"].shape)
    kinds[:, 0] = 0
    out = model(**given, token_type_ids=kinds).last_hidden_state
    assert (out - model(**given).last_hidden_state).abs().max() > 1e-3
    words = model.get_input_embeddings()(given["input_ids"])
    found = model(inputs_embeds=words, attention_mask=given["attention_mask"], token_type_ids=kinds)
    assert torch.equal(found.last_hidden_state, out)


def test_kinds_of_a_model_without_them_are_refused():
    model, given = hat(type_vocab_size=0), batch((13, 6))
    message = r"token_type_ids was given to a model made with type_vocab_size=0; allowed: None, as tokenizer"
    with pytest.raises(ValueError, match=message):
        model(**given, token_type_ids=torch.zeros_like(given["input_ids"]))
    assert model(**given).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    "settings, name", [({"gated": True}, "gated=True"), ({"cross_blocks": "new"}, "cross_blocks=")]
)
def test_what_says_nothing_without_cross_segment_blocks_is_refused(settings, name):
    with pytest.raises(
        ValueError, match=f"HatConfig.{name}.*, since layout='S S' has no cross-segment block"
    ):
        ha.HatConfig(layout="S S", **settings)
    assert ha.HatConfig(layout="S SC", **settings) and ha.HatConfig(
        layout="S S", gated=False, cross_blocks="copy"
    )


def test_a_cls_token_is_put_before_texts_that_lack_it():
    plain, told = hat(), hat(cls_token_id=2)
    told.load_state_dict(plain.state_dict(), strict=False)
    ids = batch((14,))["input_ids"]
    expected = plain(ids)
    assert torch.equal(told(ids).last_hidden_state, expected.last_hidden_state)
    both = torch.cat(
        [torch.cat([ids[:, 1:], ids[:, :1]], 1), ids]
    )  # the first row has its CLS token cut away
    mask = torch.ones_like(both)
    mask[0, -1] = 0
    found = told(both, mask)
    assert (found.last_hidden_state[0, :13] - expected.last_hidden_state[0, 1:]).abs().max() < 1e-12
    assert (found.pooler_output - expected.pooler_output).abs().max() < 1e-12


# --- from pretrained encoders -----------------------------------------------------------------------------------------


def logits_of(out):
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("config", [PLAIN, ha.HatConfig(segment_length=16, gated=True)])
def test_a_text_of_one_segment_is_encoded_as_before(family, head, config):
    model = encoder(family, head)
    pad = model.config.pad_token_id
    given = batch((16, 3, 9))
    given["input_ids"][given["attention_mask"] == 0] = pad
    before = model(**given)
    found = convert(model, config)
    assert type(found).__name__ == "Hat" + head and not found.training
    after, here = found(**given), given["attention_mask"] != 0
    a, b = logits_of(before), logits_of(after)
    assert (a - b)[here if a.ndim == 3 else slice(None)].abs().max() < 1e-5
    if head == "Model" and getattr(before, "pooler_output", None) is not None:
        assert (before.pooler_output - after.pooler_output).abs().max() < 1e-5
    assert torch.equal(logits_of(model(**given)), a)


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_segments_are_texts_of_their_own_to_the_pretrained_layers(family):
    model = encoder(family)
    found = convert(model, PLAIN)
    ids = batch((40,))["input_ids"]
    out = found(ids).last_hidden_state[0]
    second = torch.cat([ids[0, :1], ids[0, 16:31]])[None]
    assert (out[:16] - model(ids[:, :16]).last_hidden_state[0]).abs().max() < 1e-5
    assert (out[16:31] - model(second).last_hidden_state[0, 1:]).abs().max() < 1e-5


def test_what_is_copied():
    model = encoder()
    found = convert(model, ha.HatConfig(segment_length=8, layout="S SCC S", max_length=64))
    assert len(found.cross_blocks) == 2
    source = dict(model.encoder.layer[1].named_parameters())
    for block in (found.segment_blocks[1], *found.cross_blocks):
        assert torch.equal(block.attention.key.weight, source["attention.self.key.weight"])
        assert torch.equal(block.norm.bias, source["output.LayerNorm.bias"])
    positions = model.embeddings.position_embeddings.weight
    assert torch.equal(found.embeddings.positions.weight, positions[:8])
    assert torch.equal(found.segment_positions.weight, positions[:9])  # 64 tokens: 1 + 9 · 7
    found.segment_blocks[1].up.weight.data.zero_()
    assert source["intermediate.dense.weight"].abs().min() > 0  # a copy, not a view


def test_new_blocks_and_stretched_positions():
    torch.manual_seed(0)
    model = encoder()
    found = convert(model, ha.HatConfig(segment_length=3, cross_blocks="new", max_length=160))
    assert 0.015 < found.cross_blocks[0].up.weight.std() < 0.025
    table, positions = found.segment_positions.weight, model.embeddings.position_embeddings.weight
    assert table.shape == (80, 16)
    assert torch.equal(table[0], positions[0]) and torch.allclose(table[-1], positions[-1])
    at = 39 * 20 / 79  # between positions 9 and 10
    assert torch.allclose(table[20], (10 - at) * positions[9] + (at - 9) * positions[10], atol=1e-5)


def test_dtype_mode_labels_and_attention_are_kept():
    model = (
        encoder(head="ForSequenceClassification", id2label={0: "a", 1: "b", 2: "c"})
        .to(torch.bfloat16)
        .train()
    )
    model.set_attn_implementation("eager")
    found = convert(model, PLAIN)
    assert found.training and found.dtype == torch.bfloat16
    assert found.config._attn_implementation == "eager" and found.config.id2label == {
        0: "a",
        1: "b",
        2: "c",
    }


def test_the_original_is_given_back():
    model = encoder()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    found = convert(model, PLAIN, keep_original=True)
    assert not any("original" in name for name in found.state_dict())
    assert ha.unpatch_model(found) is model
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="keep_original=True"):
        ha.unpatch_model(convert(model, PLAIN))
    with pytest.raises(ValueError, match="converted already, by hat"):
        convert(found, PLAIN)


REFUSED = [
    (
        lambda: encoder("Bert", "ForQuestionAnswering"),
        {},
        "has a head that HAT lacks; allowed: its body, model.bert",
    ),
    (lambda: encoder("Bert", is_decoder=True), {}, "BertModel is a decoder"),
    (lambda: encoder(), {"segment_length": 41}, "allowed: numbers from 2 to 40, the positions of"),
    (
        lambda: encoder("Roberta"),
        {"segment_length": 39},
        "allowed: numbers from 2 to 38, the positions of",
    ),
    (
        lambda: encoder(),
        {"layout": "S S"},
        "has 2 groups; allowed: one for each of the 3 segment-wise blocks",
    ),
    (
        lambda: encoder(),
        {"cls_token_id": 61},
        "cls_token_id=61 is not allowed; allowed: None, or numbers below",
    ),
]


@pytest.mark.parametrize("make, settings, message", REFUSED)
def test_what_cannot_be_converted(make, settings, message):
    with pytest.raises(ValueError, match=message):
        convert(make(), ha.HatConfig(**({"segment_length": 8} | settings)))


def test_other_families_are_refused_by_name():
    import transformers as hf

    model = hf.GPT2Model(hf.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(
        ValueError, match="'gpt2', which cannot be converted to HAT; allowed: bert, camembert, dist"
    ):
        convert(model, ha.HatConfig())


def test_patching_with_it_is_refused():
    with pytest.raises(ValueError, match="convert"):
        ha.patch_model(encoder(), ha.HatConfig())


@pytest.mark.parametrize("pooling", ["max", "mean", "tokens"])
@pytest.mark.parametrize("side", ["right", "left", "scattered"])
def test_rows_of_padding_alone(side, pooling):
    """They leave the other rows as they are, and give finite numbers."""
    model, given = hat(pooling=pooling, cls_token_id=2), batch(side=side)
    ids, mask = given["input_ids"], given["attention_mask"]
    filled = dict(
        input_ids=torch.cat([ids[:1], ids]), attention_mask=torch.cat([0 * mask[:1], mask])
    )
    expected, found = model(**given), model(**filled)
    for name in ("last_hidden_state", "pooler_output", "segment_states"):
        assert torch.allclose(found[name][1:], expected[name], atol=1e-12), name
        assert found[name].isfinite().all(), name
    found.pooler_output[1:].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    nothing = model(input_ids=ids, attention_mask=0 * mask)
    assert nothing.pooler_output.isfinite().all() and not nothing.last_hidden_state.any()


def test_calls_that_make_no_sense():
    model, given = hat(), batch()
    mask = given["attention_mask"]
    for call, message in [
        ({}, "needs input_ids or inputs_embeds"),
        (
            given | {"attention_mask": mask[:, None, None]},
            r"attention_mask has shape \(3, 1, 1, 13\)",
        ),
        (given | {"position_ids": mask}, "position_ids was given to HatModel"),
        (given | {"output_attentions": True}, "set_attn_implementation"),
        (batch((65,)), "a text has 65 tokens; allowed: at most max_position_embeddings=64"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**call)
    assert isinstance(model, HatModel) and model(
        **batch((64,), width=70)
    ).last_hidden_state.shape == (
        1,
        70,
        16,
    )


def test_a_config_of_earlier_versions_with_gates_that_are_nowhere_loads_with_a_warning(
    tmp_path, caplog
):
    config = ha.HatEncoderConfig(layout="S S", num_hidden_layers=2, gated=True)
    (said,) = (r.getMessage() for r in caplog.records)
    assert "HatEncoderConfig.gated says nothing: layout='S S' has no gate" in said
    config.save_pretrained(tmp_path)
    assert ha.HatEncoderConfig.from_pretrained(tmp_path).to_dict()["gated"] is True


@pytest.mark.parametrize(
    "name", ["position_ids", "hierarchy", "encoder_hidden_states", "past_key_values", "cache"]
)
def test_what_the_segments_replace_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} was given to HatModel[^\n]*allowed: None"):
        hat().float()(**batch(), **{name: torch.zeros(3, 13)})
