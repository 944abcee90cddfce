"""`hyperattn look`: its numbers against what the models themselves give, and a page that loads nothing."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.analysis import attention_report
from hf_hyperattn.analysis.attention import half_width_of
from hf_hyperattn.analysis.hyperbolicity import hyperbolicity
from hf_hyperattn.geometry import poincare
from hf_hyperattn.mechanisms.cone.reference import height_and_stretch
from hf_hyperattn.rules import Exact, Pages, Window
from hyperattn_cli import build_parser, main
from tests.cli import tiny

TEXT = "The </script> quick brown fox jumps over the <!-- lazy --> dog, then goes home & sleeps. "
HSA = ha.HsaConfig(windows=(4, 16), near=4, sinks=2, refine_top_k=1)
RULES = ha.SparseConfig(
    (Window(near=9, sinks=2), Pages(near=8, sinks=1, page=4, top=3), Exact(), Window(near=30))
)
CONFIGS = {
    "cone": ha.ConeConfig(gamma=0.5, radius=3.0),
    "penumbral": ha.ConeConfig(variant="penumbral"),
    "hyperbolic": ha.HyperbolicConfig(curvature=2.0),
    "hype": ha.HypeConfig(),
    "hsa": HSA,
    "sparse": RULES,
}
LENGTH, LAST = 72, 2  # tokens; and the layer that is patched


def gates(model, value: float) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate"):
                parameter.copy_(value * torch.arange(1, 1 + len(parameter)) / len(parameter))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, an unpatched model, and one for every config, its last layer patched."""
    folder = tmp_path_factory.mktemp("look")
    (folder / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    tiny.save(folder / "unpatched", num_hidden_layers=3)
    for name, config in CONFIGS.items():
        shutil.copytree(folder / "unpatched", folder / name)
        model = ha.patch_model(
            LlamaForCausalLM.from_pretrained(folder / name), config, layers=[LAST]
        )
        gates(model, 0.8)
        model.save_pretrained(folder / name)
    return folder


def look(place, name: str, *more: str) -> dict:
    out = place / f"{name}-{'seen-again' if more else 'seen'}"
    line = [
        "look",
        str(place / name),
        "--text",
        str(place / "text.txt"),
        "--out",
        str(out),
        "--length",
        str(LENGTH),
    ]
    assert main([*line, *more]) == 0
    return json.loads((out / "look.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def seen(place):
    return {name: look(place, name) for name in ("unpatched", *CONFIGS)}


@pytest.fixture(scope="module")
def stock(place):
    """The unpatched model's own words: ids, and what it returns."""
    model = LlamaForCausalLM.from_pretrained(
        place / "unpatched", attn_implementation="eager"
    ).eval()
    ids = torch.tensor([tiny.tokenizer()(TEXT * 3).input_ids[:LENGTH]])
    with torch.no_grad():
        return model(ids, output_attentions=True, output_hidden_states=True, use_cache=True)


def close(value, expected, digits=4) -> bool:
    return torch.allclose(
        torch.tensor(value, dtype=torch.float64),
        expected.double(),
        atol=0.6 * 10**-digits,
        rtol=1e-4,
    )


def test_an_unpatched_model(seen, stock):
    data = seen["unpatched"]
    weights = torch.stack(stock.attentions)[:, 0].double()  # [layers, H, N, N]
    assert close(data["entropy"]["model"], torch.special.entr(weights).sum(-1).mean(-1))
    assert close(data["sink"]["model"], weights[:, :, 1:, 0].mean(-1))
    assert (
        data["entropy"]["own"] == data["sink"]["own"] == [None] * 3
        and data["values"] == {}
        and data["patched"] == 0
    )
    assert (
        "".join(data["tokens"]) == (TEXT * 3)[: sum(map(len, data["tokens"]))]
        and len(data["tokens"]) == LENGTH
    )
    assert data["layers"] == [0, 1, 2] and data["queries"] == [8, 17, 26, 35, 44, 53, 62, 71]
    for detail in data["details"]:
        own = weights[detail["layer"]]
        assert list(detail) == ["layer", "attention"] and list(detail["attention"]) == ["model"]
        assert close(detail["attention"]["model"]["rows"], own[:, data["queries"]])
        sums = torch.tensor(detail["attention"]["model"]["map"]).sum(-1)
        assert sums.shape == (4, 64) and torch.allclose(sums, torch.ones(()), atol=64 * 6e-5)


def test_states_and_their_control(seen, stock):
    rows = seen["unpatched"]["hyperbolicity"]
    assert len(rows) == 4
    for row, state in zip(rows[1:], stock.hidden_states[1:], strict=True):
        again = hyperbolicity(state[0], size=4, draws=1, quadruples=4000, seed=7)
        assert abs(row["mean"] - again.mean) < 6 * (row["error"] + again.mean_error)
        assert 0 < row["control_error"] < row["control_mean"] < 1


@pytest.mark.parametrize("name", CONFIGS)
def test_own_attention_and_as_patched(seen, stock, place, name):
    """Below the patched layer all is as it was, so its own attention there is the unpatched model's."""
    data, own = seen[name], stock.attentions[LAST][0]
    (detail,) = data["details"]
    assert (
        data["layers"] == [LAST] and data["mechanisms"][0]["mechanism"] == CONFIGS[name].mechanism
    )
    assert close(detail["attention"]["own"]["rows"], own[:, data["queries"]])
    assert data["entropy"]["own"][:LAST] == [None] * LAST
    assert close(data["entropy"]["own"][LAST], torch.special.entr(own.double()).sum(-1).mean(-1))
    model = AutoModelForCausalLM.from_pretrained(place / name).eval()
    ids = torch.tensor([tiny.tokenizer()(TEXT * 3).input_ids[:LENGTH]])
    with torch.no_grad():
        patched = model(ids, output_attentions=True).attentions
    assert close(detail["attention"]["model"]["rows"], patched[LAST][0][:, data["queries"]])
    assert close(data["sink"]["model"], torch.stack(patched)[:, 0, :, 1:, 0].mean(-1))
    (gate,) = (rows for key, rows in data["values"].items() if key.endswith(".gate"))
    assert gate == [None, None, [0.2, 0.4, 0.6, 0.8]]


def keys(stock) -> torch.Tensor:
    """Keys of the patched layer for every query head, [H, N, d]."""
    return stock.past_key_values.layers[LAST].keys[0].repeat_interleave(2, 0)


@pytest.mark.parametrize("name, gamma, radius", [("cone", 0.5, 3.0), ("penumbral", 1.0, 1.0)])
def test_cones(seen, stock, name, gamma, radius):
    detail, key = seen[name]["details"][0]["cones"], keys(stock).double()
    last = key[..., -1]
    height = torch.exp(last / key.shape[-1]) if name == "cone" else radius * torch.sigmoid(last)
    assert close(detail["height"], height)
    assert detail["gamma"] == [gamma] * 4 and detail["radius"] == [radius] * 4
    # a point lies in the cone of another where that one is their lowest common ancestor
    scores = ha.functional.cone_scores(
        key[None], key[None], variant=detail["variant"], radius=radius
    )[0]
    ancestor = -scores if name == "cone" else (-scores).sqrt()
    inside = (ancestor <= height[:, :, None] * (1 + 1e-7)).sum(-1) - 1
    assert detail["holds"] == inside.tolist() and (name == "penumbral" or inside.sum() > 100)
    spread = torch.tensor(detail["across"]).square().sum(-1)
    across = key[..., :-1] * height[..., None]
    across = across - across.mean(1, keepdim=True)
    largest = torch.linalg.eigvalsh(across.mT @ across)[:, -1]
    assert torch.allclose(spread.double(), largest, rtol=1e-3)
    assert close(detail["explained"], largest / across.square().sum((-1, -2)))


@pytest.mark.parametrize("variant, mapping", [("umbral", "xi"), ("penumbral", "psi")])
def test_what_a_cone_holds(variant, mapping):
    """Points of three dimensions, of which many lie in cones; in float64, where no pair is at the rim."""
    torch.manual_seed(0)
    key, radius = (
        torch.randn(1, 1, 60, 3).double() * torch.tensor([0.3, 0.3, 3.0]),
        torch.tensor(1.5).double(),
    )
    height, stretch = height_and_stretch(key, mapping, radius)
    place = key[..., :-1] * stretch[..., None]
    width = half_width_of(variant, height[..., :, None], height[..., None, :], radius)
    ancestor = -ha.functional.cone_scores(key, key, variant=variant, radius=1.5)
    ancestor = ancestor if variant == "umbral" else ancestor.sqrt()
    inside = (place[..., None, :] - place[..., None, :, :]).norm(dim=-1) <= width
    assert (
        torch.equal(inside, (ancestor - height[..., None]).abs() < 1e-12)
        and 300 < inside.sum() < 3000
    )


def test_the_disk(seen, stock, place):
    data = seen["hyperbolic"]
    detail, key, c = data["details"][0]["disk"], keys(stock).double(), 2.0
    points = poincare.expmap0(key / key.shape[-1] ** 0.5, c)
    assert detail["curvature"] == [c] * 4 and detail["scored"] == "geodesic"
    assert close(detail["radius"], c**0.5 * points.norm(dim=-1), 5)
    # queries are not returned by the model: their distances are, through softmax(-distance / τ) by name
    model = LlamaForCausalLM.from_pretrained(
        place / "unpatched", attn_implementation="eager"
    ).eval()
    ha.patch_model(model, CONFIGS["hyperbolic"], layers=[LAST], mode="replace")
    ids = torch.tensor([tiny.tokenizer()(TEXT * 3).input_ids[:LENGTH]])
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[LAST][0]
    for at, query in enumerate(data["queries"]):
        distance = torch.tensor(detail["distance"])[:, at, : query + 1]
        assert torch.allclose(
            torch.softmax(-distance, -1), weights[:, query, : query + 1], atol=2e-4
        )


def test_blocks_of_hsa(seen, stock, place):
    """In the weights of a model that is tied alone, closed blocks are constant and nothing else is."""
    data = seen["hsa"]
    detail = data["details"][0]["hsa"]
    model = LlamaForCausalLM.from_pretrained(
        place / "unpatched", attn_implementation="eager"
    ).eval()
    ha.patch_model(model, HSA, layers=[LAST], mode="replace")
    ids = torch.tensor([tiny.tokenizer()(TEXT * 3).input_ids[:LENGTH]])
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[LAST][0]
    assert (detail["windows"], detail["tying"], detail["near"]) == ([4, 16], "key", [4] * 4)
    blocks = 0
    for head in range(4):
        for query, cover in zip(data["queries"], detail["covers"][head], strict=True):
            row = weights[head, query]
            same = torch.isclose(row[1:], row[:-1], rtol=1e-5, atol=0).tolist()
            expected = [False] * (LENGTH - 1)
            for start, stop in cover["closed"]:
                expected[start : stop - 1] = [True] * (stop - 1 - start)
            assert same[:query] == expected[:query]
            closed = sum(stop - start for start, stop in cover["closed"])
            assert cover["tokens"] + closed == query + 1
            blocks += len(cover["closed"])
    assert blocks > 20


def test_rules_of_sparse_heads(seen, place):
    """The weights of a model with these rules alone are 0 exactly where nothing is shown."""
    data = seen["sparse"]
    detail = data["details"][0]["rules"]
    model = LlamaForCausalLM.from_pretrained(
        place / "unpatched", attn_implementation="eager"
    ).eval()
    ha.patch_model(model, RULES, layers=[LAST], mode="replace")
    ids = torch.tensor([tiny.tokenizer()(TEXT * 3).input_ids[:LENGTH]])
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[LAST][0]
    for head in range(4):
        for query, spans in zip(data["queries"], detail["shown"][head], strict=True):
            shown = [False] * LENGTH
            for start, stop in spans:
                shown[start:stop] = [True] * (stop - start)
            assert (weights[head, query] > 0).tolist() == shown
        pairs = int((weights[head] > 0).sum())
        assert detail["share"][head] == pytest.approx(pairs / (LENGTH * (LENGTH + 1) / 2), abs=1e-4)
    assert detail["rules"][2] == "exact" and detail["rules"][0] == "window (near 9, sinks 2)"
    assert detail["share"][2] == 1


def test_what_hype_learns(seen):
    values = seen["hype"]["values"]
    assert list(values) == ["hype.gate", "hype.mu", "hype.tau"] and values["hype.mu"][0] is None
    assert close(values["hype.mu"][LAST], torch.full((4,), 1 / 96), 6)
    assert close(values["hype.tau"][LAST], torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]) * 96)


def test_panels_are_of_what_is_there(seen):
    extra = {name: set(data["details"][0]) - {"layer", "attention"} for name, data in seen.items()}
    panels = {"cone": {"cones"}, "penumbral": {"cones"}, "hyperbolic": {"disk"}, "hsa": {"hsa"}}
    panels["sparse"] = {"rules"}
    assert extra == {name: panels.get(name, set()) for name in seen}


@pytest.mark.parametrize("name", ["unpatched", *CONFIGS])
def test_the_page_holds_the_data_and_loads_nothing(seen, place, name):
    page = (place / f"{name}-seen" / "look.html").read_text(encoding="utf-8")
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    assert json.loads(data) == seen[name] and "<" not in data
    code = page.replace(data, "").replace(
        "http://www.w3.org/2000/svg", ""
    )  # the name of a namespace
    assert not re.search(
        r"https?:|//\w|\bsrc=|href=|@import|url\((?!#)|fetch\(|XMLHttp|<link|import\(", code
    )
    assert page.count("<script") == page.count("</script>") == 2 and "default-src 'none'" in page


def test_what_to_try_next_are_right_lines(seen):
    for data in seen.values():
        assert data["next"]
        for step in data["next"]:
            program, *words = shlex.split(step["command"])
            assert program == "hyperattn" and build_parser().parse_args(words)


def test_a_gate_that_has_not_moved(place, tmp_path):
    model = ha.patch_model(LlamaForCausalLM.from_pretrained(place / "unpatched"), ha.ConeConfig())
    shutil.copytree(place / "unpatched", place / "fresh")
    model.save_pretrained(place / "fresh")
    data = look(place, "fresh")
    assert "No gate has moved" in data["next"][0]["text"] and data["next"][0]["command"].startswith(
        "hyperattn look "
    )
    assert data["entropy"]["model"] == data["entropy"]["own"]


def test_what_is_chosen(place, capsys):
    data = look(place, "cone", "--layers", "last-2", "--query", "40", "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["next"] == data["next"] and said["page"].endswith("look.html")
    assert (
        data["layers"] == [1, 2]
        and 40 in data["queries"]
        and data["query"] == 40
        and len(data["queries"]) == 9
    )
    assert [set(d) for d in data["details"]] == [
        {"layer", "attention"},
        {"layer", "attention", "cones"},
    ]


def test_by_name_and_an_encoder(place):
    shutil.copytree(place / "unpatched", place / "named")
    model = LlamaForCausalLM.from_pretrained(place / "unpatched", attn_implementation="cone")
    model.save_pretrained(place / "named")
    data = look(place, "named")
    ids = torch.tensor([tiny.tokenizer()(TEXT * 3).input_ids[:LENGTH]])
    with torch.no_grad():
        weights = torch.stack(model.eval()(ids, output_attentions=True).attentions)[:, 0]
    assert data["by_name"] == "cone" and close(data["sink"]["model"], weights[:, :, 1:, 0].mean(-1))
    small = dict(
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=96, hidden_size=32
    )
    BertModel(BertConfig(vocab_size=260, intermediate_size=48, **small)).save_pretrained(
        place / "encoder"
    )
    tiny.tokenizer().save_pretrained(place / "encoder")
    data = look(place, "encoder")
    rows = torch.tensor(data["details"][0]["attention"]["model"]["rows"])
    assert torch.allclose(rows.sum(-1), torch.ones(()), atol=5e-3) and (rows[:, 0, -1] > 0).all()


@pytest.mark.parametrize(
    "settings, allowed",
    [({"layers": [7]}, "0 to 2"), ({"queries": [16]}, "0 to 15"), ({"layers": []}, "0 to 2")],
)
def test_what_is_not_there(settings, allowed):
    model = LlamaForCausalLM._from_config(
        tiny.config(num_hidden_layers=3), attn_implementation="eager"
    )
    with pytest.raises(ValueError, match=f"{next(iter(settings))} has .*; allowed: {allowed}"):
        attention_report(model, torch.arange(16), **settings)


def test_models_without_weights_are_refused():
    model = LlamaForCausalLM._from_config(tiny.config(), attn_implementation="sdpa")
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        attention_report(model, torch.arange(16))


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("name", ["cone", "hyperbolic", "hsa", "sparse", "unpatched"])
def test_in_a_browser(seen, place, name):
    browser = shutil.which("chromium") or pytest.skip("no chromium")
    page = place / f"{name}-seen" / "look.html"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [browser, *flags, page.as_uri()], capture_output=True, text=True, timeout=100
    )
    assert "CONSOLE" not in done.stderr and done.returncode == 0
    assert done.stdout.count("<section") == 6 + 2 * (name != "unpatched")
    assert done.stdout.count("<canvas") == (1 if name == "unpatched" else 2)


@pytest.mark.slow
def test_smollm2(tmp_path, place):
    from hyperattn_cli.shared.smollm2 import smollm2

    ids = tmp_path / "text.txt"
    ids.write_text((TEXT * 40), encoding="utf-8")
    assert (
        main(
            [
                "look",
                str(smollm2()),
                "--text",
                str(ids),
                "--out",
                str(tmp_path / "seen"),
                "--length",
                "128",
            ]
        )
        == 0
    )
    data = json.loads((tmp_path / "seen" / "look.json").read_text(encoding="utf-8"))
    assert len(data["entropy"]["model"]) == 30 and data["layers"] == [0, 14, 29]
    shares = [share for row in data["sink"]["model"] for share in row]
    assert sum(share > 0.5 for share in shares) > 20  # of 270 heads: known of this model
    assert (tmp_path / "seen" / "look.html").stat().st_size < 3e6


def places(nearer: int, farther: int, neither: int) -> list[dict]:
    """What was measured in so many places."""
    return [
        {"mean": mean, "control_mean": 1.0}
        for mean, n in ((0.5, nearer), (1.5, farther), (1.0, neither))
        for _ in range(n)
    ]


@pytest.mark.parametrize(
    ("nearer", "farther", "neither", "curved"),
    [
        (2, 20, 9, False),
        (0, 0, 31, False),
        (4, 0, 0, False),
        (5, 0, 26, True),
        (20, 2, 9, True),
        (16, 15, 0, False),
        (20, 11, 0, False),
        (21, 10, 0, True),
    ],
)
def test_both_sides_count_for_curved_space(nearer, farther, neither, curved):
    """One-sided sign test at 5 %: 5 of 5 is 1/32, 4 of 4 is 1/16, 20 of 31 is 0.075, 21 of 31 is 0.035."""
    from types import SimpleNamespace

    from hyperattn_cli.commands.look import suggest_for_unpatched

    data = {"sink": {"model": [[0.1]]}, "hyperbolicity": places(nearer, farther, neither)}
    text, command = suggest_for_unpatched(SimpleNamespace(model="m", text="t"), data)[1]
    assert ("hyperbolic" in command) == curved
    assert f"control at {nearer} of" in text and f"less at {farther}." in text
    assert "sign test" in text
