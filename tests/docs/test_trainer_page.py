"""The control run of docs/tutorials/trainer.md differs from the training run in the gates only."""

import ast
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "trainer.md").read_text(encoding="utf-8")
#: The calls that must be equal in both runs: model and dtype, layers, learning rates.
CALLS = (
    "AutoModelForCausalLM.from_pretrained",
    "ha.patch_model",
    "ha.parameter_groups",
    "tokenizer",
)
ARGUMENTS = ("max_steps", "per_device_train_batch_size")


def find_calls(block: str) -> set[str]:
    """Return the source of the calls of `block` that decide what is trained, and how."""
    found = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                found.add(ast.unparse(node))
            if name == "TrainingArguments":
                found |= {ast.unparse(k) for k in node.keywords if k.arg in ARGUMENTS}
    return found


def test_control_run_equals_training_run():
    training, _, control = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(find_calls(training)) == len(CALLS) + len(ARGUMENTS)
    assert find_calls(control) == find_calls(training)
