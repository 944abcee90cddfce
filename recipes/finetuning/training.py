"""The Trainer of the recipes: Transformers' own, with gates and geometry in an optimizer group of their own."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf

import hf_hyperattn as ha

from .checkpoints import MarkWhole
from .groups import Trainer as TrainerSettings


class Trainer(hf.Trainer):
    """Takes `added_learning_rate` beside what Transformers' Trainer takes."""

    def __init__(self, *args, added_learning_rate: float, **kwargs):
        self.added_learning_rate = added_learning_rate
        super().__init__(*args, **kwargs)
        self.add_callback(MarkWhole(self.accelerator))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """AdamW over the groups of `hf_hyperattn.parameter_groups`."""
        if self.optimizer is None:
            groups = ha.parameter_groups(
                self.model if model is None else model,
                self.args.learning_rate,
                self.added_learning_rate,
                self.args.weight_decay,
            )
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=self.args.adam_epsilon)
        return self.optimizer


def arguments(trainer: TrainerSettings) -> hf.TrainingArguments:
    """Our settings as Transformers has them."""
    every = trainer.held_out_every
    return hf.TrainingArguments(
        trainer.output,
        max_steps=trainer.steps,
        per_device_train_batch_size=trainer.batch_size,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=trainer.accumulate,
        learning_rate=trainer.learning_rate,
        weight_decay=trainer.weight_decay,
        warmup_steps=trainer.warmup_steps,
        lr_scheduler_type=trainer.schedule,
        max_grad_norm=trainer.max_grad_norm,
        bf16=trainer.precision == "bf16",
        fp16=trainer.precision == "fp16",
        save_strategy="steps",
        save_steps=trainer.save_every,
        save_total_limit=2,  # the mark of a whole checkpoint comes after the older one is gone: keep one more
        eval_strategy="steps" if every else "no",
        eval_steps=every or None,
        prediction_loss_only=True,
        logging_strategy="steps",
        logging_steps=trainer.log_every,
        logging_first_step=True,
        report_to="none",
        seed=trainer.seed,
        data_seed=trainer.seed,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        **({"gradient_checkpointing": True} if trainer.checkpointing else {}),
    )


def save(trainer: Trainer, draft: Path) -> None:
    """Save what was trained into `draft`, from one process or many; every process must call this."""
    trainer.save_model(str(draft))
    trainer.accelerator.wait_for_everyone()


def curve(history: list[dict], key: str) -> list[list[float]]:
    """[step, value] of one number in the Trainer's log, each step once."""
    return [
        [step, value] for step, value in {h["step"]: h[key] for h in history if key in h}.items()
    ]
