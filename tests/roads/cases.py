"""What travels: tiny models with each mechanism, by patch, by name and by conversion, and the stock models beside them.

A case's parameters are moved away from where they start, the same in every run, so that its logits are far from those
of the stock model: a mechanism that is lost on the way cannot go unseen.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor, nn

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Pages
from tests.integration.architectures.collaborative import quiet
from tests.integration.models import TEXT

SIZES = TEXT | dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=3,
    max_position_embeddings=128,
    initializer_range=0.15,
)
GPT2 = dict(vocab_size=99, n_embd=64, n_layer=3, n_head=4, n_positions=128, initializer_range=0.15)
LENGTH = 20
#: Logits of a case and of its stock model differ at least by this much, 1,000 times the tolerance.
MARGIN = 1e-2
#: The layers that are patched: all but one, so that each patched model has a layer without a mechanism.
LAYERS = [1, 2]

#: family -> its causal model, or the masked one where it has none
FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
}
AUTO = {
    "llama": hf.AutoModelForCausalLM,
    "gpt2": hf.AutoModelForCausalLM,
    "bert": hf.AutoModelForMaskedLM,
}


hf.utils.logging.disable_progress_bar()


@functools.cache
def workplace() -> Path:
    """A folder for what the cases save, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="hf_hyperattn_roads_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def inputs_of(length: int = LENGTH, rows: int = 2, seed: int = 1) -> dict:
    """Rows of random tokens, the first one padded at its left by 3."""
    ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return dict(input_ids=ids, attention_mask=mask)


@torch.no_grad()
def logits(model: nn.Module, inputs: dict | None = None) -> Tensor:
    """The logits [tokens, vocabulary] of all tokens that are not padding, float32, in evaluation mode."""
    inputs = inputs or inputs_of()
    found = model.eval()(**inputs).logits
    mask = inputs.get("attention_mask")
    found = found[:, -inputs["input_ids"].shape[1] :]  # without virtual tokens of prompt tuning
    return (found if mask is None else found[mask.bool()]).float().cpu()


@dataclass(frozen=True)
class Case:
    """One mechanism, put into one family in one way.

    Args:
        mechanism: its name, with a setting where it comes in several.
        how: "patch", "name", "convert", or "stock" for the control.
        family: one of `FAMILIES`.
        config: the mechanism's config; None where it is used by name with its defaults.
        name: for how="name": what `attn_implementation=` gets.
        tolerance: of its logits on every road, where it is more than a road's own.
    """

    mechanism: str
    how: str
    family: str = "llama"
    config: object = None
    name: str = ""
    tolerance: float = 0.0

    @property
    def label(self) -> str:
        return self.family if self.how == "stock" else f"{self.mechanism} ({self.how})"

    @property
    def auto(self):
        return AUTO[self.family]

    @property
    def causal(self) -> bool:
        return self.family != "bert"

    @property
    def parametric(self) -> bool:
        """Whether something can be learned: by name nothing can."""
        return self.how in ("patch", "convert")

    @property
    def control(self) -> Case:
        """The stock model of the same family."""
        return Case("", "stock", self.family)

    def stock(self) -> nn.Module:
        """The stock model, loaded anew."""
        return self.auto.from_pretrained(stock_folder(self.family)).eval()

    def fresh(self) -> nn.Module:
        """The model as it is right after it was patched, converted, or loaded by name."""
        if self.how == "name":
            return self.by_name()
        model = self.stock()
        if self.how == "patch":
            ha.patch_model(model, self.config, layers=LAYERS)
        if self.how == "convert":
            with quiet():
                model = ha.convert(model, self.config)
        return model.eval()

    def by_name(self, **options) -> nn.Module:
        """The stock checkpoint, loaded by the name."""
        config = hf.AutoConfig.from_pretrained(stock_folder(self.family))
        if self.config is not None:
            config.hyperattn = ha.HyperAttnConfig([self.config]).to_dict()
        options = dict(config=config, attn_implementation=self.name) | options
        return self.auto.from_pretrained(stock_folder(self.family), **options).eval()

    def model(self) -> nn.Module:
        """The model with its added parameters moved, which every road starts from; the same in every call."""
        if self.how == "stock":
            return self.stock()
        model = self.fresh()
        if self.parametric:
            model.load_state_dict(torch.load(state_file(self)))
        return model

    def added(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that the stock model does not have, by the names they have in `model`."""
        names = {n for n, _ in self.stock().named_parameters(remove_duplicate=False)}
        clean = lambda n: n.removeprefix("base_model.model.").replace(".base_layer.", ".")
        return {
            n: p for n, p in model.named_parameters() if clean(n) not in names and ".lora_" not in n
        }

    @functools.cached_property
    def logits(self) -> Tensor:
        """What the model computes."""
        return logits(self.model())

    @functools.cached_property
    def margin(self) -> float:
        """How far its logits are from the stock model's, as a share of the largest where that is above 1."""
        found = (self.logits - logits(self.stock())).abs().max() / self.logits.abs().max().clamp(
            min=1
        )
        return found.item()

    def folder(self, *_) -> Path:
        """Its checkpoint, written once; not to be changed."""
        return saved_folder(self)

    def __hash__(self):
        return hash((self.mechanism, self.how, self.family))


@functools.cache
def stock_folder(family: str) -> Path:
    """A checkpoint of the stock model, with a tokenizer."""
    folder = workplace() / family
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def saved_folder(case: Case) -> Path:
    folder = workplace() / case.label.replace("/", "-")
    case.model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def state_file(case: Case) -> Path:
    """The state dict of the moved model."""
    model = case.fresh()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in case.added(model).items():
            amount = 0.1 if case.how == "convert" else 1.0 if name.endswith("gate") else 0.5
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    file = workplace() / f"{case.label}.pt"
    torch.save(model.state_dict(), file)
    return file


@functools.cache
def tokenizer() -> hf.PreTrainedTokenizerFast:
    """A word for every id, `w5 w6 ...`, which is how the tests write text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": 3, "<unk>": 4} | {
        f"w{i}": i for i in range(5, 99)
    }
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


HSA = ha.HsaConfig(windows=(2, 4), near=2, sinks=1, refine_top_k=1)
CASES = [
    Case("cone", "patch", config=ha.ConeConfig(gamma=0.5)),
    Case(
        "cone_penumbral", "patch", config=ha.ConeConfig(variant="penumbral", gamma=0.5, radius=2.0)
    ),
    Case("hyperbolic", "patch", config=ha.HyperbolicConfig(aggregation="mean")),
    # Rounding grows 40-fold on its way to these logits: against float64 they are off by 4e-5 of the largest, on every
    # engine, and as much where the layer beneath, in float64, takes its softmax in float32, as Llama's eager does.
    Case(
        "hyperbolic, midpoint",
        "patch",
        config=ha.HyperbolicConfig(distance="squared_lorentz"),
        tolerance=5e-4,  # gradients are off by 3e-4 of the largest
    ),
    Case("hype", "patch", config=ha.HypeConfig(max_length=64)),
    Case("hsa", "patch", config=HSA),
    Case(
        "sparse",
        "patch",
        config=ha.SparseConfig(Pages(near=2, sinks=1, page=2, top=1, query="previous", chunk=2)),
    ),
    Case("head_fusion", "patch", config=ha.HeadFusionConfig()),
    Case("talking_heads", "patch", config=ha.TalkingHeadsConfig()),
    Case("mkl", "patch", config=ha.MklConfig(kind="conditional")),
    Case("trilinear", "patch", config=ha.TrilinearConfig(windows=(4, 3))),
    Case("collaborative", "patch", "gpt2", ha.CollaborativeConfig()),
    Case("cone", "name", name="cone"),
    Case("cone_penumbral", "name", name="cone_penumbral"),
    Case("hyperbolic", "name", name="hyperbolic"),
    Case("hype", "name", name="hype"),
    Case("hsa", "name", config=HSA, name="hsa"),  # of its default windows a short text has one
    Case("collaborative, compressed", "convert", "gpt2", ha.CollaborativeConfig(rank=48, steps=5)),
    Case("hat", "convert", "bert", ha.HatConfig(segment_length=5)),
]
CONTROLS = [Case("", "stock", family) for family in FAMILIES]
BY_LABEL = {case.label: case for case in CASES + CONTROLS}


def copy_of(folder: Path, to: Path) -> Path:
    """A copy of a checkpoint that a road may change."""
    shutil.copytree(folder, to)
    return to
