"""Healing: train a sparse model to give the predictions that it gives with its original attention.

The teacher has the same weights, without the patch and without adapters. The student minimises

    KL(teacher ‖ student) = Σ p (log p - log q),  averaged over the tokens of a window,

where p and q are the two models' probabilities of the next token (Hinton et al., arXiv 1503.02531,
at temperature 1). Only the parameters that the patch added (block biases, gates and others) are
trained, and LoRA matrices if requested.
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
from ..integration import lora_config, parameter_groups
from ..integration.loading.checkpoint_files import errors_as
from ..integration.training.parameters import hosts_of_patched, hyper_parameters
from ..utils.files import write_atomically
from .gradients import (
    checkpoint_layers,
    compute_divergence,
    final_hidden,
    head_of,
    loss_of,
    require_gradient,
)
from .kept import fingerprint

#: For each text: loss of the teacher, loss of the student, and KL, in nats per token.
Losses = dict[str, tuple[float, float, float]]
#: Default learning rate of LoRA matrices.
LR = 3e-4
#: Default learning rate of the parameters that the patch added.
PATCH_LR = 1e-2
#: Tensors that Adam keeps for each parameter.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class Healing:
    """Distil a patched causal model from itself without the patch. Call `run`.

    Args:
        model: A patched model in float32. It is wrapped in `adapter`, a PEFT model.
        texts: For each text name, token ids [N], at least twice `length`. The last `length`
            tokens of each text are held out.
        length: Number of tokens of a window. Each step trains on one window.
        steps: Number of training steps.
        rank: Rank of the LoRA matrices. 0: no LoRA.
        lr: Learning rate of the LoRA matrices. None: 3e-4. All rates rise linearly during the
            first twentieth of the steps and fall linearly to 0 over all steps. With 300 steps they
            reach 95 % of the given value.
        patch_lr: Learning rate of the parameters that the patch added. None: 1e-2.
        seed: Seed of the windows and of the LoRA matrices.
        prefix: Tokens at the start of every window, such as the BOS token of a tokenizer that
            puts one before each text. They count as part of `length`.
        bf16: Multiply matrices in bfloat16 during training steps, by autocast. Logits are then
            rounded too, so `losses` are slightly inexact. Parameters and `held_out` stay in
            float32.

    Attributes:
        losses: KL in nats per token of every finished step.

    Raises:
        ValueError: The model has no patch, nothing in it can be trained, a rate is given for
            parameters that do not exist, or a text is too short.
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
        self.check_settings()
        # The fingerprint of the model before training changes its parameters.
        self.origin = fingerprint(self.model, torch.empty(0), ())
        # Store the default rates too: a state file must say which rates were used.
        self.lr = LR if self.lr is None else self.lr
        self.patch_lr = PATCH_LR if self.patch_lr is None else self.patch_lr
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.adapter = get_peft_model(self.model, lora_config(self.model, self.rank))
        self.head = head_of(self.model, next(iter(self.texts.values())))
        groups = parameter_groups(self.adapter, self.lr, self.patch_lr)
        self.optimizer = torch.optim.AdamW(groups, foreach=False)
        self.rates = [group["lr"] for group in groups]

    def check_settings(self) -> None:
        """Raise ValueError if a text is too short or a setting has nothing to act on."""
        for name, ids in self.texts.items():
            if len(ids) < 2 * self.length:
                raise ValueError(
                    f"the text {name} is short of tokens; allowed: {2 * self.length} or more"
                )
        has_parameters = bool(hyper_parameters(self.model))
        if not has_parameters and not self.rank:
            raise ValueError(
                f"the patch of {type(self.model).__name__} has no parameter that could learn; "
                "allowed: --lora R (rank=R), which also trains LoRA's matrices"
            )
        if self.lr is not None and not self.rank:
            raise ValueError(
                f"lr {self.lr:g} is of LoRA's matrices; allowed: with --lora R (rank=R)"
            )
        if self.patch_lr is not None and not has_parameters:
            raise ValueError(
                f"patch_lr {self.patch_lr:g}: the patch has no parameter that could learn; leave "
                "it out"
            )

    def run(
        self,
        state: Path | None = None,
        save_every: int = 25,
        on_step: Callable[[float], None] | None = None,
    ):
        """Run the remaining training steps.

        Args:
            state: File that stores the progress. If it exists, training resumes from it, with
                bitwise the same result as an uninterrupted run. None: store nothing.
            save_every: Number of steps between two writes of the file.
            on_step: Called with the loss of every step.

        Raises:
            ValueError: The file is damaged, or is of a run with other settings or texts.
        """
        if state is not None and state.exists():
            self.read_state(state)
        device_type = self.model.device.type
        for step in range(len(self.losses), self.steps):
            precision = torch.autocast(device_type, torch.bfloat16) if self.bf16 else nullcontext()
            with precision:
                self.losses.append(self.train_step(self.draw_window(step)))
            if on_step:
                on_step(self.losses[-1])
            if state is not None and (step + 1) % save_every == 0:
                self.write_state(state)

    def draw_window(self, step: int) -> Tensor:
        """Draw the token ids [length] of one step. Held-out tokens are never drawn."""
        # The window depends only on seed and step, so that a resumed run draws the same ones.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)

        def draw_index(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        ids = list(self.texts.values())[draw_index(len(self.texts))]
        start = draw_index(len(ids) - 2 * self.length + 1)
        return self.add_prefix(ids[start : start + self.length - len(self.prefix)])

    def add_prefix(self, ids: Tensor) -> Tensor:
        """Put the prefix before the tokens of a text."""
        return torch.cat([ids.new_tensor(self.prefix), ids])

    def train_step(self, ids: Tensor) -> float:
        """Train on one window and return its loss before the update."""
        done = len(self.losses)
        teacher = self.run_teacher(ids)
        warmup = min(1.0, (done + 1) / max(1, self.steps // 20))
        decay = 1 - done / self.steps
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * (warmup * decay)
        # Reentrant checkpoints give gradients only if an input of the layer requires one.
        hook = self.model.get_input_embeddings().register_forward_hook(require_gradient)
        with hook, checkpoint_layers(self.model), torch.enable_grad():
            hidden = final_hidden(self.model, ids)
            loss, gradient = compute_divergence(self.head, hidden, teacher)
            # `gradient` is the gradient of the sum; training minimises the mean.
            (hidden / len(ids)).backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def run_teacher(self, ids: Tensor) -> Tensor:
        """Return the final hidden states [N, e] of the model with its original attention."""
        with without_patch(self.model, self.adapter), evaluation_mode(self.model):
            return final_hidden(self.model, ids)

    @torch.no_grad()
    def held_out(self) -> Losses:
        """Measure the last `length` tokens of each text.

        Returns:
            For each text name, the loss of the teacher, the loss of the student, and
            KL(teacher ‖ student), in nats per token.
        """
        losses: Losses = {}
        last = self.length - len(self.prefix)
        for name, text in self.texts.items():
            ids = self.add_prefix(text[-last:])
            with evaluation_mode(self.model):
                teacher = self.run_teacher(ids)
                student = final_hidden(self.model, ids)
            losses[name] = (
                loss_of(self.head, teacher, ids, gradient=False)[0],
                loss_of(self.head, student, ids, gradient=False)[0],
                compute_divergence(self.head, student, teacher, gradient=False)[0],
            )
        return losses

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.adapter.named_parameters() if p.requires_grad}

    def collect_settings(self) -> dict[str, Any]:
        """Return the settings that a state file must agree in, as JSON data."""
        names = ("length", "steps", "rank", "lr", "patch_lr", "seed")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        # Only if they are set: files of versions without these settings stay valid.
        if self.prefix:
            settings["prefix"] = list(self.prefix)
        if self.bf16:
            settings["bf16"] = True
        settings["texts"] = {
            name: sha256(ids.cpu().numpy().tobytes()).hexdigest()
            for name, ids in self.texts.items()
        }
        settings["patch"] = self.model.config.hyperattn
        settings["model"] = self.origin
        return settings

    def write_state(self, file: Path) -> None:
        """Write the trained parameters, the optimizer's moments and the losses.

        After a crash, the file is either the old or the new one.
        """
        tensors: dict[str, Tensor] = {}
        for name, p in self.trained().items():
            tensors[f"{name}/value"] = p.detach()
            for key, moment in self.optimizer.state[p].items():
                tensors[f"{name}/{key}"] = moment
        metadata = {"settings": json.dumps(self.collect_settings())}
        metadata["losses"] = json.dumps(self.losses)
        write_atomically(file, save(tensors, metadata))

    def read_state(self, file: Path) -> None:
        """Read the file that `write_state` wrote."""
        with errors_as(f"{file} is damaged, delete it to begin anew"):
            with safe_open(file, "pt") as data:
                metadata = data.metadata() or {}
                tensors = {name: data.get_tensor(name) for name in data.keys()}
        if metadata.get("settings") != json.dumps(self.collect_settings()):
            raise ValueError(
                f"{file} is of a run with another model, other settings, texts or patch; allowed: "
                "the same"
            )
        self.losses = json.loads(metadata["losses"])
        for name, p in self.trained().items():
            p.data.copy_(tensors.pop(f"{name}/value"))
            # A parameter that no loss has reached yet has no moments.
            moments = {
                key: tensors[f"{name}/{key}"] for key in MOMENTS if f"{name}/{key}" in tensors
            }
            # Adam keeps the step counter on the CPU, unlike the moments.
            self.optimizer.state[p] = {
                key: moment if key == "step" else moment.to(p.device)
                for key, moment in moments.items()
            }


@contextmanager
def without_patch(model: PreTrainedModel, adapter: PeftModel) -> Iterator[None]:
    """Remove patch and adapters from the model while the block runs, without copying weights."""
    hosts = [host for _, host in hosts_of_patched(model)]
    with adapter.disable_adapter():
        patches = [host._modules.pop("hyper") for host in hosts]
        try:
            yield
        finally:
            for host, patch in zip(hosts, patches, strict=True):
                host._modules["hyper"] = patch
