"""What users may have saved: tiny checkpoints and adapters with every mechanism, rule and option.

`python -m tests.saved.write` writes them with the code that is installed. The committed ones were written by commit
5206cf7, and every later version has to load them with the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
import transformers as hf
from torch import Tensor, nn

import hf_hyperattn as ha
from hf_hyperattn.integration.architectures.hsa_encoder import HsaEncoder, HsaEncoderConfig
from hf_hyperattn.rules import Clusters, Exact, NestedWindows, Pages, VerticalSlash, Window
from tests.registries import restored

TEXT = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)
GPT2 = dict(
    vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=64, n_inner=16, initializer_range=0.3
)
BART = dict(
    vocab_size=40,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    max_position_embeddings=64,
    init_std=0.3,
)


def bart() -> nn.Module:
    tokens = dict(
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    return hf.BartForConditionalGeneration(hf.BartConfig(**BART, **tokens))


#: The stock model of each family.
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=2)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
    "bart": bart,
}
#: How the checkpoints of each family are loaded.
AUTO: dict[str, Any] = {
    "llama": hf.AutoModelForCausalLM,
    "gpt2": hf.AutoModelForCausalLM,
    "bert": hf.AutoModelForMaskedLM,
    "bart": hf.AutoModelForSeq2SeqLM,
    "hsa_encoder": HsaEncoder,
}


#: The name of the score below, which stands for its config among the mechanisms of a case.
SCORE = "saved_dot_and_cosine"


def dot_and_cosine(dot, query_norm, key_norm, weight=0.5):
    """A score of a user's own: scale · q·k + weight · cos(q, k)."""
    return dot + weight * dot / (query_norm * key_norm)


@dataclass(frozen=True)
class Saved:
    """One checkpoint or adapter.

    Args:
        family: A key of `FAMILIES`, or "hsa_encoder".
        mechanisms: Configs, as `patch_model` takes them.
        how: "patch", "name" (`attn_implementation=`), "convert", "adapter" (HyperLoRA), "adapter of a patch" (LoRA that
            trains a patched model), or "encoder".
        name: The attention implementation, for how="name".
        options: More arguments of `patch_model`, or of the adapter's config.
    """

    family: str = "llama"
    mechanisms: tuple = ()
    how: str = "patch"
    name: str = ""
    options: dict = field(default_factory=dict)

    def build_base(self, seed: int) -> nn.Module:
        """The model with random weights that an adapter is put on, or that is changed."""
        torch.manual_seed(seed)
        if self.how == "encoder":
            return HsaEncoder(HsaEncoderConfig(**self.options))
        model = FAMILIES[self.family]()
        if self.how == "adapter of a patch":
            ha.patch_model(model, *self.mechanisms)
        return model

    def build(self, seed: int) -> nn.Module:
        """The whole model, its added parameters moved away from where they start."""
        model = self.build_base(seed)
        if self.how == "patch":
            configs = [
                ha.ScoreConfig(SCORE) if config == SCORE else config for config in self.mechanisms
            ]
            ha.patch_model(model, *configs, **self.options)
        if self.how == "convert":
            model = ha.convert(model, *self.mechanisms)
        if self.how == "name":
            if self.mechanisms:
                model.config.hyperattn = ha.HyperAttnConfig(list(self.mechanisms)).to_dict()
            model.set_attn_implementation(self.name)
        if self.how == "adapter":
            config = ha.HyperLoraConfig(mechanisms=list(self.mechanisms), r=2, **self.options)
            model = peft.get_peft_model(model, config)
        if self.how == "adapter of a patch":
            model = peft.get_peft_model(model, ha.lora_config(model, r=2))
        if self.how in ("patch", "adapter", "adapter of a patch"):
            move_added_parameters(model)
        return model.eval()

    @contextlib.contextmanager
    def registered(self):
        """Have the score that the case uses, and forget it afterwards: other tests count what is registered."""
        if SCORE not in self.mechanisms:
            yield
            return
        with restored():
            ha.score(SCORE)(dot_and_cosine)
            yield

    @property
    def is_adapter(self) -> bool:
        return self.how.startswith("adapter")


@torch.no_grad()
def move_added_parameters(model: nn.Module) -> None:
    """Move what mechanisms and LoRA added away from where it starts."""
    for name, parameter in model.named_parameters():
        trained_copy = "original_module" not in name
        if trained_copy and ".hyper." in name:
            parameter.add_(0.5 * torch.randn_like(parameter))
        if "lora_" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))


def patch(*mechanisms, family: str = "llama", **options) -> Saved:
    return Saved(family=family, mechanisms=mechanisms, options=options)


def replace(*mechanisms, family: str = "llama") -> Saved:
    return patch(*mechanisms, family=family, mode="replace")


def sparse(*rules, **options) -> Saved:
    return replace(ha.SparseConfig(rules, **options))


PAGES = dict(near=3, sinks=1, page=2, top=2)
NESTED = dict(windows=(2, 4), near=3, sinks=1, top=1)
CLUSTERS = dict(near=3, sinks=1, segment=8, size=2, top=1)
LINES = dict(near=3, sinks=1, columns=2, diagonals=2, every=8, measured=4)
KEY = dict(windows=(2, 4), near=2, sinks=1, refine_top_k=1)

CASES: dict[str, Saved] = {
    # Scores
    "cone": patch(ha.ConeConfig()),
    "cone-psi": replace(ha.ConeConfig(mapping="psi", gamma=0.4)),
    "cone-expmap": replace(ha.ConeConfig(mapping="expmap", radius=2.0)),
    "cone-penumbral": patch(ha.ConeConfig(variant="penumbral", radius=2.0, gamma=0.5)),
    "cone-penumbral-xi": replace(
        ha.ConeConfig(variant="penumbral", mapping="xi", clamp_heights=True)
    ),
    "cone-penumbral-heights": replace(ha.ConeConfig(variant="penumbral", squared=False)),
    "cone-heads": patch(ha.ConeConfig(), heads=[0, 2], layers=[1]),
    "cone-override": patch(
        ha.HyperAttnConfig(
            [ha.ConeConfig()],
            overrides={"model.layers.1.self_attn": [ha.ConeConfig(gamma=0.5, mapping="psi")]},
        )
    ),
    "cone-cross-attention": patch(ha.ConeConfig(), family="bart", include_cross_attention=True),
    "cone-encoder": patch(ha.ConeConfig(), family="bert"),
    "hyperbolic": patch(ha.HyperbolicConfig()),
    "hyperbolic-mean": replace(
        ha.HyperbolicConfig(aggregation="mean", curvature=0.5, temperature=2.0)
    ),
    "hyperbolic-lorentz": replace(ha.HyperbolicConfig(distance="squared_lorentz")),
    "hyperbolic-lorentz-mean": patch(
        ha.HyperbolicConfig(distance="squared_lorentz", aggregation="mean")
    ),
    "score": patch(SCORE),
    # Biases
    "hype": patch(ha.HypeConfig(max_length=64)),
    "hype-numbers": replace(ha.HypeConfig(mu=0.02, tau=(0.5, 1.0, 1.5, 2.0))),
    "hype-slopes": replace(ha.HypeConfig(slopes=(0.5, 0.25, 0.125, 0.0625), max_length=32)),
    "hype-cosh": patch(ha.HypeConfig(max_length=64), family="bert"),
    # Heads
    "head-fusion": patch(ha.HeadFusionConfig()),
    "head-fusion-size": patch(ha.HeadFusionConfig(size=3, spread=0.1, seed=4), family="bert"),
    "talking-heads": patch(ha.TalkingHeadsConfig()),
    "talking-heads-before": patch(ha.TalkingHeadsConfig(after=False), family="gpt2"),
    "mkl": patch(ha.MklConfig()),
    "mkl-conditional": patch(ha.MklConfig(kind="conditional")),
    "mkl-combine": replace(ha.MklConfig(combine=True), family="gpt2"),
    # Three tokens
    "trilinear": patch(ha.TrilinearConfig(windows=(4, 3))),
    "trilinear-bidaf": patch(ha.TrilinearConfig(form="bidaf")),
    "trilinear-distmult": replace(ha.TrilinearConfig(windows=(4, 3), tensor="distmult")),
    "trilinear-cp": patch(ha.TrilinearConfig(windows=(4, 3), tensor="cp", rank=2), family="bert"),
    # Structure: Hierarchical Self-Attention
    "hsa": patch(ha.HsaConfig(windows=(4, 8))),
    "hsa-key": replace(ha.HsaConfig(**KEY)),
    "hsa-key-by-head": replace(
        ha.HsaConfig(
            windows=(2, 4), near=(0, 2, 4, 8), sinks=(0, 1, 2, 3), refine_top_k=(0, 1, 2, 0)
        )
    ),
    "hsa-key-bias": patch(ha.HsaConfig(**KEY, block_bias=-0.5)),
    "hsa-key-bias-by-head": replace(
        ha.HsaConfig(**KEY, block_bias=(0.0, -1.0, 0.5, -float("inf")))
    ),
    "hsa-key-dropped": replace(ha.HsaConfig(**KEY, block_bias=-float("inf"), tuned_length=32)),
    "hsa-key-flat": replace(ha.HsaConfig(windows=(), near=2, sinks=1, refine_top_k=3)),
    "hsa-key-one-level": replace(ha.HsaConfig(windows=(4,), near=4, sinks=2, refine_top_k=1)),
    "hsa-both": patch(ha.HsaConfig(windows=(4, 8)), family="bert"),
    "hsa-both-diagonal": replace(
        ha.HsaConfig(windows=(2, 4), tying="both", keep_diagonal=False), family="bert"
    ),
    "hsa-key-encoder": replace(ha.HsaConfig(**KEY, tying="key"), family="bert"),
    "hsa-override": patch(
        ha.HyperAttnConfig(
            [ha.HsaConfig(**KEY)],
            mode="replace",
            overrides={
                "model.layers.0.self_attn": [
                    ha.HsaConfig(windows=(4,), near=(2, 2, 4, 4), refine_top_k=0)
                ]
            },
        )
    ),
    # Structure: sparse rules
    "sparse-exact": sparse(Exact()),
    "sparse-window": sparse(Window(near=4, sinks=2)),
    "sparse-pages": sparse(Pages(**PAGES)),
    "sparse-pages-mean": sparse(Pages(**PAGES, summary="mean", channels=0.5)),
    "sparse-pages-first": sparse(Pages(**PAGES, query="first", chunk=4)),
    "sparse-pages-previous": sparse(Pages(**PAGES, query="previous", chunk=2)),
    "sparse-pages-chunk": sparse(Pages(**PAGES, query="chunk", chunk=4)),
    "sparse-keys": sparse(Pages(near=3, sinks=1, page=1, top=3)),
    "sparse-keys-previous": sparse(
        Pages(near=3, sinks=1, page=1, top=3, query="previous", chunk=2, channels=0.5)
    ),
    "sparse-clusters": sparse(Clusters(**CLUSTERS)),
    "sparse-clusters-previous": sparse(Clusters(**CLUSTERS, rounds=2, query="previous", chunk=2)),
    "sparse-vertical-slash": sparse(VerticalSlash(**LINES)),
    "sparse-nested": sparse(NestedWindows(**NESTED)),
    "sparse-nested-bounds": sparse(
        NestedWindows(**NESTED, summary="bounds", query="first", chunk=4)
    ),
    "sparse-by-head": sparse(
        Exact(),
        Window(near=4),
        Pages(**PAGES, query="previous", chunk=2),
        Pages(near=3, sinks=1, page=1, top=3),
    ),
    "sparse-lengths": sparse((Exact(),), (Window(near=4, sinks=2),), lengths=(8, 16)),
    "sparse-blend": patch(ha.SparseConfig(Pages(**PAGES)), layers=[1]),
    "sparse-override": patch(
        ha.HyperAttnConfig(
            [ha.SparseConfig(Pages(**PAGES))],
            mode="replace",
            overrides={
                "model.layers.1.self_attn": [
                    ha.SparseConfig([Exact(), Window(4), Window(4), Exact()])
                ]
            },
        )
    ),
    # Several mechanisms
    "together": patch(ha.ConeConfig(), ha.HypeConfig(max_length=64), ha.HeadFusionConfig()),
    "together-sparse": replace(ha.HypeConfig(max_length=64), ha.SparseConfig(Window(near=6))),
    # Conversions and encoders of our own
    "collaborative": patch(ha.CollaborativeConfig(), family="gpt2"),
    "collaborative-compressed": Saved(
        "gpt2", (ha.CollaborativeConfig(rank=12, steps=5),), "convert"
    ),
    "hat": Saved("bert", (ha.HatConfig(segment_length=8, max_length=32),), "convert"),
    "hat-mean": Saved(
        "bert",
        (ha.HatConfig(segment_length=8, max_length=32, pooling="mean", gated=True),),
        "convert",
    ),
    "hsa-encoder": Saved(
        "hsa_encoder",
        how="encoder",
        options=dict(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
        ),
    ),
    # Names
    "name-cone": Saved(how="name", name="cone"),
    "name-cone-config": Saved(
        how="name", name="cone", mechanisms=(ha.ConeConfig(gamma=0.4, mapping="psi"),)
    ),
    "name-cone_penumbral": Saved(how="name", name="cone_penumbral"),
    "name-hyperbolic": Saved(how="name", name="hyperbolic"),
    "name-hype": Saved(how="name", name="hype"),
    "name-hsa": Saved(how="name", name="hsa", mechanisms=(ha.HsaConfig(**KEY),)),
    # Adapters
    "adapter-cone": Saved(how="adapter", mechanisms=(ha.ConeConfig(),)),
    "adapter-hsa": Saved(how="adapter", mechanisms=(ha.HsaConfig(**KEY),)),
    "adapter-hype-fusion": Saved(
        how="adapter",
        mechanisms=(ha.HypeConfig(max_length=64), ha.HeadFusionConfig()),
        options=dict(layers=[1]),
    ),
    "adapter-sparse": Saved(how="adapter", mechanisms=(ha.SparseConfig(Pages(**PAGES)),)),
    "adapter-encoder": Saved("bert", how="adapter", mechanisms=(ha.HyperbolicConfig(),)),
    "lora-of-a-patch": Saved(
        how="adapter of a patch", mechanisms=(ha.ConeConfig(), ha.TalkingHeadsConfig())
    ),
}


def make_inputs(case: Saved) -> dict[str, Tensor]:
    """Two rows of 21 tokens, the first padded: at its left for decoders, at its right for encoders."""
    ids = torch.randint(5, 40, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    padded = slice(0, 3) if case.family in ("llama", "gpt2") else slice(18, 21)
    ids[0, padded], mask[0, padded] = 0, 0
    inputs = dict(input_ids=ids, attention_mask=mask)
    return inputs | dict(decoder_input_ids=ids[:, :9]) if case.family == "bart" else inputs


@torch.no_grad()
def compute_output(model: nn.Module, case: Saved) -> Tensor:
    """What the model says of every token that is not padding, in the dtype of the model."""
    inputs = make_inputs(case)
    found = model.eval()(**inputs)
    states = found.logits if "logits" in found else found.last_hidden_state
    return states if case.family == "bart" else states[inputs["attention_mask"].bool()]
