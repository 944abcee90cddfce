"""Healing: a model with sparse attention learns from itself with its own attention what the sparsity lost.

The teacher is the same weights: its hosts run without their patch, its adapters are off. The student lowers

    KL(teacher ‖ student) = Σ p (log p - log q),  mean over the tokens of a window,

p and q being the two models' probabilities of the next token (Hinton et al., arXiv 1503.02531, at temperature 1).
What learns is what the patch added (block biases, gates, whatever its layers hold) and, where it is asked for, LoRA.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..analysis.perplexity import evaluation_mode
from ..files import write_atomically
from ..integration import lora_config, parameter_groups
from ..integration.checkpoint_files import errors_as
from ..integration.training import hosts_of_patched, hyper_parameters
from .gradients import checkpointed, divergence, final_hidden, head_of, loss_of
from .kept import fingerprint

Losses = dict[str, tuple[float, float, float]]
#: Learning rates where none is given: of LoRA's matrices, and of what the patch added.
LR, PATCH_LR = 3e-4, 1e-2


@dataclass
class Healing:
    """Distils a patched causal model from itself without the patch; `run` does it.

    Args:
        model: in float32 and patched; it is put inside `adapter`, a PEFT model.
        texts: token ids [N] by name, each at least twice `length` long; the last `length` of each are held out.
        length: tokens of a window; a step learns from one. steps: how many.
        rank: of LoRA's matrices; 0 for none. seed: of the windows and of LoRA's start.
        lr, patch_lr: learning rates of LoRA's matrices and of what the patch added; None: 3e-4 and 1e-2. They fall to 0
            in a line over all steps, times a line that rises over the first twentieth: 300 steps reach 95 % of them.
        prefix: tokens that every window begins with, such as the BOS token of a tokenizer that puts one before a text;
            they count among its `length`.
        bf16: steps multiply matrices in bfloat16, by autocast, logits too, so that `losses` are a little rounded; what
            learns and `held_out` stay in float32.

    Attributes:
        losses: KL in nats a token, of every step that is done.

    Raises:
        ValueError: the model has no patch, nothing in it can learn, a rate is given for what is not there, or a text is
            too short.
    """

    model: PreTrainedModel
    texts: Mapping[str, Tensor]
    length: int
    steps: int = 300
    rank: int = 0
    lr: float | None = None
    patch_lr: float | None = None
    seed: int = 0
    prefix: Sequence[int] = ()
    bf16: bool = False
    losses: list[float] = field(default_factory=list, init=False)

    def __post_init__(self):
        for name in (name for name, ids in self.texts.items() if len(ids) < 2 * self.length):
            raise ValueError(
                f"the text {name} is short of tokens; allowed: {2 * self.length} or more"
            )
        self.origin = fingerprint(self.model, torch.empty(0), ())  # before anything learns
        if not hyper_parameters(self.model) and not self.rank:
            raise ValueError(
                f"the patch of {type(self.model).__name__} has no parameter that could learn; allowed: --lora R "
                "(rank=R), which trains LoRA's matrices beside it"
            )
        if self.lr is not None and not self.rank:
            raise ValueError(
                f"lr {self.lr:g} is of LoRA's matrices; allowed: with --lora R (rank=R)"
            )
        if self.patch_lr is not None and not hyper_parameters(self.model):
            raise ValueError(
                f"patch_lr {self.patch_lr:g}: the patch has no parameter that could learn; leave it out"
            )
        lr, patch_lr = (
            LR if self.lr is None else self.lr,
            PATCH_LR if self.patch_lr is None else self.patch_lr,
        )
        self.lr, self.patch_lr = lr, patch_lr  # a state says what was used
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.adapter = get_peft_model(self.model, lora_config(self.model, self.rank))
        self.head = head_of(self.model, next(iter(self.texts.values())))
        groups = parameter_groups(self.adapter, lr, patch_lr)
        self.optimizer = torch.optim.AdamW(groups, foreach=False)
        self.rates = [group["lr"] for group in groups]

    def run(
        self,
        state: Path | None = None,
        save_every: int = 25,
        on_step: Callable[[float], None] | None = None,
    ):
        """Learn what is left to learn; `on_step` hears the loss of every step.

        Every `save_every` steps the work is kept in the file `state`; what it holds is gone on from, to the bit.

        Raises:
            ValueError: the file is of a run with other settings or texts, or damaged.
        """
        if state is not None and state.exists():
            self.read(state)
        for step in range(len(self.losses), self.steps):
            with (
                torch.autocast(self.model.device.type, torch.bfloat16)
                if self.bf16
                else nullcontext()
            ):
                self.losses.append(self.step(self.window(step)))
            if on_step:
                on_step(self.losses[-1])
            if state is not None and (step + 1) % save_every == 0:
                self.write(state)

    def window(self, step: int) -> Tensor:
        """The tokens [length] of a step, drawn by the seed and the step alone; held-out ones are never among them."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        pick = lambda below: int(torch.randint(below, (), generator=draw))
        ids = list(self.texts.values())[pick(len(self.texts))]
        return self.opened(
            ids[pick(len(ids) - 2 * self.length + 1) :][: self.length - len(self.prefix)]
        )

    def opened(self, ids: Tensor) -> Tensor:
        """Tokens of a text behind the prefix."""
        return torch.cat([ids.new_tensor(self.prefix), ids])

    def step(self, ids: Tensor) -> float:
        """Learn from one window; the loss before that."""
        done, teacher = len(self.losses), self.teacher(ids)
        part = min(1.0, (done + 1) / max(1, self.steps // 20)) * (1 - done / self.steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * part
        ask = self.model.get_input_embeddings().register_forward_hook(
            lambda _, __, out: out.requires_grad_()
        )
        with ask, checkpointed(self.model), torch.enable_grad():
            hidden = final_hidden(self.model, ids)
            loss, gradient = divergence(self.head, hidden, teacher)
            (hidden / len(ids)).backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def teacher(self, ids: Tensor) -> Tensor:
        """The final hidden states [N, e] of the model with its own attention."""
        with untouched(self.model, self.adapter), evaluation_mode(self.model):
            return final_hidden(self.model, ids)

    @torch.no_grad()
    def held_out(self) -> Losses:
        """By text, on the last `length` tokens: the teacher's loss, the student's, and KL; nats a token."""
        losses = {}
        last = self.length - len(self.prefix)
        for name, ids in ((name, self.opened(ids[-last:])) for name, ids in self.texts.items()):
            with evaluation_mode(self.model):
                teacher, student = self.teacher(ids), final_hidden(self.model, ids)
            own, now = (
                loss_of(self.head, hidden, ids, gradient=False)[0] for hidden in (teacher, student)
            )
            losses[name] = own, now, divergence(self.head, student, teacher, gradient=False)[0]
        return losses

    def trained(self) -> dict[str, nn.Parameter]:
        """What learns, by name."""
        return {name: p for name, p in self.adapter.named_parameters() if p.requires_grad}

    def settings(self) -> dict[str, Any]:
        """What a state has to agree in, as JSON data."""
        numbers = {
            name: getattr(self, name)
            for name in ("length", "steps", "rank", "lr", "patch_lr", "seed")
        }
        texts = {
            name: sha256(ids.cpu().numpy().tobytes()).hexdigest()
            for name, ids in self.texts.items()
        }
        more: dict[str, Any] = {"prefix": list(self.prefix)} if self.prefix else {}
        more |= {"bf16": True} if self.bf16 else {}
        return (
            numbers
            | more
            | {"texts": texts, "patch": self.model.config.hyperattn, "model": self.origin}
        )

    def write(self, file: Path) -> None:
        """Keep parameters, the optimizer's moments and the losses; a crash leaves the old file or the new one."""
        tensors: dict[str, Tensor] = {}
        for name, p in self.trained().items():
            tensors |= {
                f"{name}/{key}": t
                for key, t in {"value": p.detach(), **self.optimizer.state[p]}.items()
            }
        about = {"settings": json.dumps(self.settings()), "losses": json.dumps(self.losses)}
        write_atomically(file, save(tensors, about))

    def read(self, file: Path) -> None:
        """Take up what `write` kept."""
        with (
            errors_as(f"{file} is damaged, delete it to begin anew"),
            safe_open(file, "pt") as data,
        ):
            about, tensors = (
                data.metadata() or {},
                {name: data.get_tensor(name) for name in data.keys()},
            )
        if about.get("settings") != json.dumps(self.settings()):
            raise ValueError(
                f"{file} is of a run with another model, other settings, texts or patch; allowed: the same"
            )
        self.losses = json.loads(about["losses"])
        for name, p in self.trained().items():
            p.data.copy_(tensors.pop(f"{name}/value"))
            kept = (key for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{key}" in tensors)
            moments = {
                key: tensors[f"{name}/{key}"] for key in kept
            }  # none where no loss has reached the parameter
            self.optimizer.state[p] = {
                k: t if k == "step" else t.to(p.device) for k, t in moments.items()
            }


@contextmanager
def untouched(model: PreTrainedModel, adapter: PeftModel) -> Iterator[None]:
    """As long as the block runs, the model is as it was before patch and adapter: the same weights, without a copy."""
    hosts = [host for _, host in hosts_of_patched(model)]
    with adapter.disable_adapter():
        patches = [host._modules.pop("hyper") for host in hosts]
        try:
            yield
        finally:
            for host, patch in zip(hosts, patches, strict=True):
                host._modules["hyper"] = patch
