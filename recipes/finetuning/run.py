"""A recipe from beginning to end: measure, patch, train or go on training, save, load again, measure, report."""

from __future__ import annotations

import json
import time
from pathlib import Path

import datasets
import transformers
from accelerate import PartialState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import set_seed

from hf_hyperattn.analysis import PeakMemory, max_logit_difference

from . import checkpoints, models, publish, report, tasks, training
from .settings import Settings
from .tasks import Examples
from .texts import Text


class Clock:
    """Seconds of each stage of a run."""

    def __init__(self):
        self.begun = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self.last = round(now - self.last, 2), now
        self.seconds["total"] = round(now - self.begun, 2)


def run(settings: Settings, command: str, fresh: bool = False) -> dict:
    """Do what a recipe says, or what is left of it; every process of a launch calls this.

    A run that was killed goes on from its last whole checkpoint; one that is finished is not done again.

    Args:
        command: how it was started, for the results.
        fresh: delete what an earlier run left in the output folder.

    Returns:
        The results, as `results.json` in the output folder has them.

    Raises:
        ValueError: the model or the text cannot be read, or the folder holds another recipe's run.
    """
    arguments = training.arguments(settings.trainer)  # meets the other processes, on the CPU too
    process, folder = PartialState(), Path(settings.trainer.output)
    quiet(process.is_main_process)
    recipe = settings.to_dict() | {"launch": {"processes": process.num_processes}}
    if fresh and process.is_main_process:
        checkpoints.clear(folder)
    process.wait_for_everyone()
    checkpoints.check_same_recipe(folder, recipe)
    if (folder / checkpoints.RESULTS).is_file():
        process.print(f"Finished already: {folder / checkpoints.RESULTS} (--fresh runs it again)")
        results = json.loads((folder / checkpoints.RESULTS).read_text(encoding="utf-8"))
        if process.is_main_process and settings.hub.push:
            publish.publish(settings, saved_in(settings), results)
        return results
    process.wait_for_everyone()
    clock, circumstances = Clock(), report.circumstances()
    with process.main_process_first():
        data = tasks.prepare(settings, tokens_read(settings, process))
    model = models.load_base(settings, data.classes)
    models.check_length(model, settings.data.length)
    if process.is_main_process:
        publish.reserve(settings)
        checkpoints.begin(folder, recipe)
    process.wait_for_everyone()
    clock.lap("load")
    results = train(model, data, settings, arguments, clock)
    if process.is_main_process:
        results = {"command": command, **circumstances, "recipe": recipe, **results}
        report.write(folder / checkpoints.RESULTS, results)
        print(
            report.summary(results),
            f"results              {folder / checkpoints.RESULTS}",
            sep="\n",
        )
        publish.publish(settings, saved_in(settings), results)
    process.wait_for_everyone()
    return results


def train(model, data: Examples | Text, settings: Settings, arguments, clock: Clock) -> dict:
    """Train the loaded model; the results of the main process."""
    process, folder = PartialState(), Path(settings.trainer.output)
    before, reference = {}, None
    with models.gathered(model):
        if process.is_main_process:
            model.to(process.device)
            before, reference = data.measure(model), data.compared(model)
    clock.lap("before")
    set_seed(settings.trainer.seed)
    model = models.make_trainable(model, settings)
    with models.gathered(model):
        apart = None if reference is None else max_logit_difference(data.compared(model), reference)
        parameters = models.count(model)
    trainer = training.Trainer(
        model,
        arguments,
        train_dataset=data.rows,
        eval_dataset=data.held_out_rows() if settings.trainer.held_out_every else None,
        data_collator=data.collate,
        added_learning_rate=settings.trainer.added_learning_rate,
    )
    at = checkpoints.last_whole(folder)
    with PeakMemory(process.device, interval=0.1) as memory:
        trainer.train(resume_from_checkpoint=None if at is None else str(at))
    clock.lap("train")
    save(trainer, data.processor, settings)
    after = {}
    # One process loads the model by itself, so it must not share the weights out again.
    unset_hf_deepspeed_config()
    if process.is_main_process:
        del model
        after = look_again(data, settings, process)
    clock.lap("after")
    history = trainer.state.log_history
    return {
        "before": before,
        "after": after,
        "difference_at_start": apart,
        "parameters": parameters,
        "gates": after.pop("gates", {}),
        "loss_curve": training.curve(history, "loss"),
        "held_out_curve": training.curve(history, "eval_loss"),
        "seconds": clock.seconds,
        "peak_memory_mib": round(memory.peak / 2**20),
        "resumed_from_step": None if at is None else int(at.name.rpartition("-")[2]),
        "distributed": trainer.accelerator.distributed_type.value,
        "data": data.facts,
    }


def look_again(data: Examples | Text, settings: Settings, process: PartialState) -> dict:
    """What is made of the held-out data by what was saved, loaded afresh; where the merged model is wanted, it is made
    of that.
    """
    model = models.load_again(settings, saved_in(settings), data.classes).to(process.device)
    found = data.measure(model)
    found["gates"] = models.gates(model)
    if settings.trainer.merged and settings.peft.method == "lora":
        folder = Path(settings.trainer.output)
        merged = model.merge_and_unload()
        merged.save_pretrained(folder / "model.unfinished")
        if data.processor is not None:
            data.processor.save_pretrained(folder / "model.unfinished")
        models.finish(folder / "model.unfinished", folder / "model", None)
    return found


def save(trainer, processor, settings: Settings) -> None:
    """Save what was trained, whole or not at all; every process calls this."""
    target = saved_in(settings)
    draft = target.with_name(f"{target.name}.unfinished")
    base = models.base_of(trainer.accelerator.unwrap_model(trainer.model))
    if hasattr(base.config, "use_cache"):
        base.config.use_cache = True  # the Trainer turns it off, also in what is saved
    training.save(trainer, draft)
    if trainer.is_world_process_zero():
        if processor is not None:
            processor.save_pretrained(draft)
        models.finish(draft, target, models.id_on_hub(settings))
    trainer.accelerator.wait_for_everyone()


def saved_in(settings: Settings) -> Path:
    """The folder of what was trained: an adapter, or a whole model."""
    return Path(settings.trainer.output) / (
        "adapter" if settings.peft.method == "lora" else "model"
    )


def tokens_read(settings: Settings, process: PartialState) -> int:
    """Tokens that all steps of all processes read."""
    t = settings.trainer
    return t.steps * t.batch_size * t.accumulate * process.num_processes * settings.data.length


def quiet(main: bool) -> None:
    """Progress bars of the training alone."""
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if not main:
        transformers.logging.set_verbosity_error()
