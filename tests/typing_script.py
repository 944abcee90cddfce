"""What a user writes, for type checkers, not to be run: they must flag the lines marked `# error` and no other."""

import torch
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn import ConeConfig, Hierarchy, HyperAttnConfig, HyperbolicConfig
from hf_hyperattn.functional import cone_attention
from hf_hyperattn.geometry import poincare

model = AutoModelForCausalLM.from_pretrained("a/model", attn_implementation="cone")
model = ha.patch_model(model, ConeConfig(variant="penumbral", gamma=2.0), layers="last-third")
ha.patch_model(
    model, ha.HsaConfig(windows=(16, 64), tying="key", near=(32, 64)), heads=[0, 1], mode="blend"
)
ha.patch_model(
    model, HyperAttnConfig([HyperbolicConfig(), ha.HypeConfig(mu=0.01)], layers=range(4))
)
ha.patch_model(
    model,
    ha.HeadFusionConfig(),
    ha.TalkingHeadsConfig(after=False),
    ha.TrilinearConfig(windows=(8, None)),
)
model.save_pretrained("a/folder")
ha.unpatch_model(model)
linear = ha.patch_model(torch.nn.Linear(2, 2), ha.MklConfig(kind="global"))
width: int = linear.in_features
hosts = ha.describe(model)["hosts"]
converted = ha.convert(model, ha.HatConfig(pooling="mean", cross_blocks="new"))
ha.convert(model, ha.CollaborativeConfig(rank=8))
names = [mechanism["name"] for mechanism in ha.list_mechanisms()]

x = torch.randn(1, 2, 8, 4)
out: torch.Tensor = cone_attention(x, x, x, is_causal=True, variant="umbral", gamma=torch.ones(2))
out = ha.functional.hyperbolic_attention(x, x, x, distance="squared_lorentz", aggregation="mean")
out = ha.functional.hierarchical_attention(
    x, x, x, hierarchy=Hierarchy.windows(8, (2, 4)), tying="both"
)
bias: torch.Tensor = ha.functional.hype_bias(
    torch.arange(8), torch.arange(8), mu=0.1, tau=1.0, form="cosh"
)
distance: torch.Tensor = poincare.distance(x, x, 1.0)
variant: str = ConeConfig().variant


@ha.score("softened", paper="none")
def softened(dot: torch.Tensor, height: float = 1.0) -> torch.Tensor:
    return height * torch.tanh(dot / height)


ha.patch_model(model, ha.ScoreConfig("softened", height=[2.0, 3.0]))
out = ha.functional.scored_attention(
    x, x, x, score="softened", height=torch.ones(2), is_causal=True
)
out = ha.functional.scored_attention(x, x, x, score=softened, backend="cpu")
out = softened(x, 2.0)

ConeConfig(variant="umbrall")  # error
ConeConfig(gama=1.0)  # error
ConeConfig(gamma="large")  # error
ha.ConConfig()  # error
ha.ScoreConfig("softened", height="large")  # error
ha.HsaConfig(tying="keys")  # error
ha.HatConfig(pooling="min")  # error
ha.HypeConfig(slopes="alibis")  # error
ha.MklConfig(kind="local")  # error
ha.TrilinearConfig(tensor="cpd")  # error
HyperAttnConfig([ConeConfig()], mode="add")  # error
ha.patch_model(model, ConeConfig(), mode="blended")  # error
ha.patch_model(model, ConeConfig(), layer=[0])  # error
ha.patch_model(model, "cone")  # error
ha.functional.cone_attn(x, x, x)  # error
cone_attention(x, x, x, mapping="chi")  # error
ha.functional.hyperbolic_scores(x, x, distance="chord")  # error
klein = ha.geometry.klein  # error
HyperbolicConfig().curvature = 2.0  # error
