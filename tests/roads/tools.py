"""Roads through programs: compilers, exporters, quantisers, trainers."""

from __future__ import annotations

import datasets
import torch
import transformers as hf
from torch import nn

from .cases import Case, inputs_of, logits, tokenizer
from .road import road

GROUP = "Programs"
causal = lambda case: case.causal
REAL = inputs_of()["attention_mask"].bool()


def compiled(case: Case, backend: str):
    torch._dynamo.reset()
    yield logits(torch.compile(case.model(), backend=backend, fullgraph=True)), case.logits


@road("torch.compile, aot_eager", GROUP)
def compile_aot(case, folder):
    yield from compiled(case, "aot_eager")


#: For what takes half a minute a cell: one mechanism with an operator of each kind.
FEW = (
    "cone (patch)",
    "hsa (patch)",
    "talking_heads (patch)",
    "trilinear (patch)",
    "cone (name)",
    "hat (convert)",
)
few = lambda case: case.label in FEW


@road("torch.compile, inductor", GROUP, applies=few)
def compile_inductor(case, folder):
    yield from compiled(case, "inductor")


class Plain(nn.Module):
    """Tensors in, logits out."""

    def __init__(self, model):
        super().__init__()
        model.config.use_cache = False
        self.model = model.eval()

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


@torch.no_grad()
def program(case: Case):
    """The exported program, for any batch and length."""
    batch, length = (
        torch.export.Dim("batch", min=1, max=64),
        torch.export.Dim("length", min=8, max=64),
    )
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    return (
        torch.export.export(  # HAT's number of segments is more than torch can prove the bounds of
            Plain(case.model()),
            tuple(inputs_of().values()),
            dynamic_shapes=shapes,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    )


def longer() -> dict:
    return inputs_of(31, rows=3, seed=4)


@road("torch.export", GROUP)
def export(case, folder):
    found = program(case).module()
    yield found(*inputs_of().values())[REAL], case.logits
    yield (
        found(*longer().values())[longer()["attention_mask"].bool()],
        logits(case.model(), longer()),
    )


@road("torch.export, saved and loaded", GROUP, applies=few)
def export_saved(case, folder):
    torch.export.save(program(case), folder / "program.pt2")
    yield (
        torch.export.load(folder / "program.pt2").module()(*inputs_of().values())[REAL],
        case.logits,
    )


@road("torch.jit.trace", GROUP)
def traced(case, folder):
    with torch.no_grad():
        found = torch.jit.trace(Plain(case.model()), tuple(inputs_of().values()), check_trace=False)
        yield found(*inputs_of().values())[REAL], case.logits
        yield (
            found(*longer().values())[longer()["attention_mask"].bool()],
            logits(case.model(), longer()),
        )


@road("ONNX", GROUP, needs=("onnx", "onnxscript", "onnxruntime"))
def onnx(case, folder):
    import onnxruntime

    file = str(folder / "model.onnx")
    torch.onnx.export(program(case), f=file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file)
    for inputs in (inputs_of(), longer()):
        found = session.run(None, {n: t.numpy() for n, t in inputs.items()})[0]
        yield torch.from_numpy(found)[inputs["attention_mask"].bool()], logits(case.model(), inputs)


def with_weights(case: Case, quantised: nn.Module, plain) -> nn.Module:
    """The case's model with the weights that a quantised one has: `plain(module)` gives a weight in float, or None.

    Each gets a weight of its own: a head that is quantised shares none with the embeddings any more.
    """
    model = case.model()
    modules = dict(quantised.named_modules())
    weights = {
        n: plain(modules[n])
        for n, m in model.named_modules()
        if n in modules and "weight" in m._parameters
    }
    weights = {n: w for n, w in weights.items() if w is not None}
    assert weights, f"nothing of {type(model).__name__} is quantised"
    for name, weight in weights.items():
        module = model.get_submodule(name)  # GPT-2 keeps its weights transposed
        module.weight = nn.Parameter(
            weight.T if isinstance(module, hf.pytorch_utils.Conv1D) else weight
        )
    return model


def torchao_weight(module):
    weight = getattr(module, "weight", None)
    return (
        weight.dequantize()
        if hasattr(weight, "dequantize") and type(weight) is not nn.Parameter
        else None
    )


def torchao_model(case: Case, folder):
    from torchao.quantization import Int8WeightOnlyConfig

    return case.auto.from_pretrained(
        folder, quantization_config=hf.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    )


@road("int8 weights (torchao)", GROUP, needs=("torchao",))
def int8(case, folder):
    model = torchao_model(case, case.folder())
    expected = with_weights(case, model, torchao_weight)
    yield (logits(expected) - case.logits).abs().max().item() > 1e-4, True
    yield logits(model), logits(expected)


@road("int8 weights (torchao), saved and loaded", GROUP, needs=("torchao",))
def int8_saved(case, folder):
    model = torchao_model(case, case.folder())
    model.save_pretrained(folder)
    yield logits(case.auto.from_pretrained(folder)), logits(model)


@road("int8 weights (torchao quantize_)", GROUP, needs=("torchao",))
def int8_in_place(case, folder):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = case.model()
    quantize_(model, Int8WeightOnlyConfig(version=2))
    yield logits(model), logits(with_weights(case, model, torchao_weight))


def nf4_weight(module):
    import bitsandbytes as bnb

    if not isinstance(module, bnb.nn.Linear4bit):
        return None
    return bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()


@road("nf4 weights (bitsandbytes)", GROUP, needs=("bitsandbytes",))
def nf4(case, folder):
    config = hf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = case.auto.from_pretrained(case.folder(), quantization_config=config, device_map="cpu")
    expected = with_weights(case, model, nf4_weight)
    with_gradients = (
        logits.__wrapped__
    )  # without them a call packs the weights anew, and computes in bfloat16
    yield with_gradients(model), logits(expected)


def texts(rows: int = 8) -> datasets.Dataset:
    ids = inputs_of(12, rows, seed=3)["input_ids"]
    return datasets.Dataset.from_dict(
        {"input_ids": ids.tolist(), "attention_mask": [[1] * 12] * rows, "labels": ids.tolist()}
    )


ARGUMENTS = dict(
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    logging_strategy="no",
    seed=0,
    bf16=False,
)


def trainer(case: Case, model, folder, **options):
    arguments = hf.TrainingArguments(str(folder), **ARGUMENTS | options)
    return hf.Trainer(
        model, arguments, train_dataset=texts(), data_collator=hf.default_data_collator
    )


def moved(case: Case, model) -> bool:
    """Whether training reached what was added: all that a fresh model's added parameters are has changed somewhere."""
    before, after = case.added(case.fresh()), case.added(model)
    return not case.parametric or any(
        not torch.equal(p, after[n]) for n, p in before.items() if n in after
    )


@road("Trainer: train, save, load", GROUP)
def trained(case, folder):
    model = case.fresh()
    start = logits(model)
    run = trainer(case, model, folder, max_steps=3, save_strategy="no")
    run.train()
    run.save_model(str(folder / "model"))
    yield moved(case, model), True
    yield (logits(model) - start).abs().max().item() > 1e-3, True
    yield logits(case.auto.from_pretrained(folder / "model")), logits(model)


@road("Trainer: resume", GROUP)
def resumed(case, folder):
    plain = case.fresh()
    trainer(case, plain, folder / "a", max_steps=4, save_strategy="no").train()
    options = dict(max_steps=4, save_strategy="steps", save_steps=2)
    trainer(case, case.fresh(), folder / "b", **options).train()
    model = case.fresh()
    trainer(case, model, folder / "b", **options).train(str(folder / "b" / "checkpoint-2"))
    yield logits(model), logits(plain)


@road("Trainer: best model at the end", GROUP)
def best(case, folder):
    model = case.fresh()
    options = dict(
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    arguments = hf.TrainingArguments(str(folder), **ARGUMENTS | options)
    run = hf.Trainer(
        model,
        arguments,
        train_dataset=texts(),
        eval_dataset=texts(),
        data_collator=hf.default_data_collator,
    )
    run.train()
    yield logits(case.auto.from_pretrained(run.state.best_model_checkpoint)), logits(run.model)


@road("Trainer: weight decay", GROUP, applies=lambda case: case.how == "patch", control=False)
def decay(case, folder):
    model = case.fresh()
    names = set(trainer(case, model, folder).get_decay_parameter_names(model))
    yield not names & set(case.added(model)), True


def sft(case: Case, model, folder, **options):
    import trl

    arguments = trl.SFTConfig(
        str(folder), max_steps=2, save_strategy="no", max_length=None, **ARGUMENTS
    )
    data = texts().remove_columns(["labels", "attention_mask"])
    return trl.SFTTrainer(
        model, arguments, train_dataset=data, processing_class=tokenizer(), **options
    )


@road("TRL: SFTTrainer", GROUP, needs=("trl",), applies=causal)
def supervised(case, folder):
    model = case.fresh()
    run = sft(case, model, folder)
    run.train()
    run.save_model(str(folder / "model"))
    yield moved(case, model), True
    yield logits(case.auto.from_pretrained(folder / "model")), logits(model)


@road("TRL: SFTTrainer with a path", GROUP, needs=("trl",), applies=causal)
def supervised_path(case, folder):
    run = sft(case, str(case.folder()), folder)
    yield logits(run.model), case.logits


@road("TRL: SFTTrainer with LoRA", GROUP, needs=("trl",), applies=causal)
def supervised_lora(case, folder):
    from peft import AutoPeftModelForCausalLM, LoraConfig

    base = case.auto.from_pretrained(case.folder())
    run = sft(
        case,
        base,
        folder,
        peft_config=LoraConfig(target_modules=["c_proj", "q_proj"], task_type="CAUSAL_LM"),
    )
    run.train()
    run.save_model(str(folder / "adapter"))
    yield logits(AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")), logits(run.model)


@road(
    "TRL: SFTTrainer with LoRA, fresh patch",
    GROUP,
    needs=("trl",),
    applies=lambda c: c.causal and c.parametric,
    control=False,
)
def supervised_gates(case, folder):
    from peft import LoraConfig

    run = sft(
        case,
        case.fresh(),
        folder,
        peft_config=LoraConfig(target_modules=["c_proj", "q_proj"], task_type="CAUSAL_LM"),
    )
    run.train()
    yield moved_under_adapter(case, run.model), True


def moved_under_adapter(case: Case, model) -> bool:
    """Whether an added parameter, or a copy of it that an adapter trains, has left where it started."""
    before = {n.rpartition(".")[2]: [] for n in case.added(case.fresh())}
    for name, parameter in case.added(case.fresh()).items():
        before[name.rpartition(".")[2]].append(parameter)
    trained = {
        n: p
        for n, p in model.named_parameters()
        if p.requires_grad and ".hyper." in n or ".hyper_" in n
    }
    return any(
        all(
            p.shape != q.shape or not torch.equal(p, q)
            for q in before.get(n.rpartition(".")[2], [])
        )
        for n, p in trained.items()
    )


@road("TRL: DPOTrainer's reference model", GROUP, needs=("trl",), applies=causal)
def reference(case, folder):
    import trl

    rows = [{"prompt": "w7 w8", "chosen": " w9 w10", "rejected": " w11 w12"}] * 4
    arguments = trl.DPOConfig(str(folder), max_steps=1, save_strategy="no", **ARGUMENTS)
    run = trl.DPOTrainer(  # which loads it again from where it came from
        case.auto.from_pretrained(case.folder()),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    yield logits(run.model), case.logits
    if run.ref_model is not None:
        yield logits(run.ref_model), case.logits
