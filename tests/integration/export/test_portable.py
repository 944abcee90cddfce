"""Programs that `torch.export` and `torch.onnx.export` make of a model: they need nothing of this package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers.utils.hub import PushToHubMixin

import hf_hyperattn as ha
from tests.covering import choose_covering
from tests.integration.architectures.collaborative import shared
from tests.integration.architectures.hat_models import hat
from tests.integration.models import TEXT, bert, llama, perturb, set_implementation
from tests.oracles.marks import first_always

ONE_LAYER = dict(num_hidden_layers=1, initializer_range=0.15)
HSA = ha.HsaConfig(
    windows=(2, 4), near=2, sinks=1, refine_top_k=1
)  # blocks stay closed in short texts too
MECHANISMS = {
    "cone": [ha.ConeConfig(gamma=0.5)],
    "cone_penumbral": [ha.ConeConfig(variant="penumbral", gamma=0.5, radius=2.0)],
    "hyperbolic": [ha.HyperbolicConfig(aggregation="mean")],
    "hyperbolic, midpoint": [ha.HyperbolicConfig(distance="squared_lorentz")],
    "hype": [ha.HypeConfig()],
    "hsa": [HSA],
    "head_fusion": [ha.HeadFusionConfig()],
    "talking_heads": [ha.TalkingHeadsConfig()],
    "mkl": [ha.MklConfig(kind="conditional")],
    "trilinear": [ha.TrilinearConfig(windows=(4, 3))],
    "collaborative": [ha.CollaborativeConfig()],
    "cone, hype, head_fusion": [ha.ConeConfig(), ha.HypeConfig(), ha.HeadFusionConfig()],
    "cone by name": "cone",
    "cone_penumbral by name": "cone_penumbral",
    "hyperbolic by name": "hyperbolic",
    "hype by name": "hype",
    "hsa by name": "hsa",
}
#: What ExecuTorch takes beside core operators: a norm, and checks that it leaves out.
BESIDE_CORE = {
    "aten.linalg_vector_norm.default",
    "aten._assert_tensor_metadata.default",
    "aten._assert_async.msg",
}
#: The first is tested with every change; another test takes the second.
FEW = [
    ("llama", "cone, hype, head_fusion"),
    ("llama", "hsa"),
    ("bert", "hsa"),
    ("bert", "talking_heads"),
]


class Logits(torch.nn.Module):
    """Tensors in, tensor out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def make(family: str, mechanism: str) -> Logits:
    torch.manual_seed(0)
    if family == "llama":
        config = hf.LlamaConfig(**TEXT | ONE_LAYER, num_key_value_heads=2, use_cache=False)
        model = hf.LlamaForCausalLM(config).eval()
    else:
        model = bert(**ONE_LAYER)
    how = MECHANISMS[mechanism]
    if isinstance(how, str):
        set_implementation(model, how)
    else:
        ha.patch_model(model, *how)
        perturb(model)
    return Logits(model)


def inputs(rows: int, length: int) -> tuple:
    """The first row is padded at its left."""
    ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


SIZES = (2, 20), (3, 31)  # of the call that is exported, and of another one


@torch.no_grad()
def program(model: Logits, least: int = 5, **options):
    """A program for any batch and length, from `least` on."""
    sizes = {
        0: torch.export.Dim("batch", min=1, max=64),
        1: torch.export.Dim("length", min=least, max=64),
    }
    shapes = dict(input_ids=sizes, attention_mask=sizes)
    return torch.export.export(model, inputs(*SIZES[0]), dynamic_shapes=shapes, **options)


@torch.no_grad()
def assert_same(run, model: Logits, tolerance: float) -> None:
    """`run(ids, mask)` gives what the model gives, but for padding."""
    for size in SIZES:
        ids, mask = inputs(*size)
        assert (run(ids, mask) - model(ids, mask))[mask.bool()].abs().max() < tolerance, size


def ours(exported) -> list[str]:
    return [
        str(node.target) for node in exported.graph.nodes if "hf_hyperattn." in str(node.target)
    ]


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_windows_of_a_program_count_tokens(family):
    """Padding inside a row is not counted: the program gives what the same text without it gives."""
    model = make(family, "trilinear")
    run = program(model).module()
    ids, mask = inputs(2, 20)
    mask[:] = 1
    mask[0, 6:10] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    keep = mask[0].bool()
    with torch.no_grad():
        found = run(ids, mask)
        whole = model.model(input_ids=ids, attention_mask=mask)[0]
        assert (found - whole)[mask.bool()].abs().max() < 1e-4
        alone = model.model(input_ids=ids[:1, keep], position_ids=places[:1, keep])[0]
        same = model.model(input_ids=ids, attention_mask=mask, position_ids=places)[0]
    assert (same[0, keep] - alone[0]).abs().max() < 1e-4


@first_always("family, mechanism", FEW)
def test_a_program_has_plain_operators_alone(family, mechanism):
    """And can be lowered to core ones, which is what ExecuTorch and other runtimes have kernels for."""
    model = make(family, mechanism)
    exported = program(model)
    assert not ours(exported)
    assert_same(exported.module(), model, 1e-4)
    lowered = exported.run_decompositions()
    called = {node.target for node in lowered.graph.nodes if node.op == "call_function"}
    operators = {target for target in called if isinstance(target, torch._ops.OpOverload)}
    assert {str(o) for o in operators if torch.Tag.core not in o.tags} <= BESIDE_CORE
    assert {o.__module__ for o in called - operators} <= {"_operator"}  # arithmetic on sizes


def test_a_program_refuses_a_mask_that_tying_both_forbids():
    """Whatever the mask was that it was exported with."""
    model, (ids, _) = make("bert", "hsa"), inputs(*SIZES[0])
    mask = torch.ones(*ids.shape[:1], 1, *ids.shape[1:] * 2, dtype=torch.bool)
    with torch.no_grad():
        run = torch.export.export(model, (ids, mask)).module()
    assert (run(ids, mask) - model(ids, mask)).abs().max() < 1e-4
    mask[0, 0, 3, 4] = False
    with pytest.raises(RuntimeError, match="tying='both' got a mask that hides more than padding"):
        run(ids, mask)


@pytest.mark.slow  # an export with code runs without the package in test_export.py
def test_a_program_runs_without_the_package(tmp_path):
    model = make("llama", "hsa")
    torch.export.save(program(model), tmp_path / "program.pt2")
    torch.save(inputs(*SIZES[1]), tmp_path / "inputs.pt")
    code = (
        "import sys, torch; run = torch.export.load('program.pt2').module()\n"
        "torch.save(run(*torch.load('inputs.pt')), 'out.pt'); assert 'hf_hyperattn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    got = torch.load(tmp_path / "out.pt")
    ids, mask = inputs(*SIZES[1])
    assert (got - model(ids, mask))[mask.bool()].abs().max() < 1e-4


def test_an_engine_that_was_chosen_stays():
    model = make("llama", "cone")
    ha.set_backend(model.model, "blockwise")
    exported = program(model)
    assert ours(exported) == ["hf_hyperattn.blockwise.default"]
    assert_same(exported.module(), model, 1e-4)


def test_nothing_is_left_behind_by_an_export():
    model = make("bert", "cone")
    before = model(*inputs(*SIZES[0]))
    program(model)
    assert torch.equal(model(*inputs(*SIZES[0])), before)


def onnx_runtime():
    """The module onnxruntime, where all that an export needs is installed."""
    reason = "needs pip install onnx onnxscript onnxruntime"
    return [
        pytest.importorskip(name, reason=reason) for name in ("onnx", "onnxscript", "onnxruntime")
    ][-1]


@pytest.mark.extras
def test_the_page(tmp_path, monkeypatch):
    onnx_runtime()
    make("llama", "cone").model.save_pretrained(tmp_path / "your-name/SmolLM2-135M-cone")
    llama().save_pretrained(tmp_path / "HuggingFaceTB/SmolLM2-135M")
    monkeypatch.setattr(
        PushToHubMixin,
        "push_to_hub",
        lambda self, repo_id, **settings: self.save_pretrained(repo_id),
    )
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs/export.md").read_text()
    for code in re.findall("```python\n(.*?)```", page, re.DOTALL):
        exec(code, names := {})
    assert (names["logits"] - torch.from_numpy(names["same_logits"])).abs().max() < 1e-4


def list_onnx_cases() -> list[tuple[str, str]]:
    """Families and mechanisms: both families meet every mechanism and every way in which it is asked for."""
    cases = [
        (family, mechanism)
        for mechanism in MECHANISMS
        for family in ("llama", "bert")
        if (family, mechanism) != ("llama", "collaborative")  # refuses rotary positions
    ]
    return choose_covering(cases, lambda case: (case[0], *case[1].partition(" by name")[:2]))


@pytest.mark.extras
@pytest.mark.parametrize("family, mechanism", list_onnx_cases())
def test_onnx(family, mechanism, tmp_path):
    onnx_runtime()
    model = make(family, mechanism)
    assert_same_in_onnx(program(model), model, tmp_path)


@pytest.mark.extras
@pytest.mark.parametrize("kind", ["hat", "collaborative"])
def test_onnx_of_a_conversion(kind, tmp_path):
    onnx_runtime()
    model = Logits(
        hat(vocab_size=99, segment_length=5).float() if kind == "hat" else shared("bert")[0]
    )
    segment = 5  # tokens; a text of one segment is another program
    exported = program(
        model, segment + 1, prefer_deferred_runtime_asserts_over_guards=kind == "hat"
    )
    assert not ours(exported)
    assert_same_in_onnx(exported, model, tmp_path)


def assert_same_in_onnx(exported, model: Logits, folder: Path) -> None:
    file = str(folder / "model.onnx")
    torch.onnx.export(exported, f=file, dynamo=True, verbose=False)
    session = onnx_runtime().InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    run = lambda *tensors: torch.from_numpy(
        session.run(None, {n: t.numpy() for n, t in zip(names, tensors)})[0]
    )
    assert_same(run, model, 1e-4)
