"""One module names the private functions of torch, and says in a sentence which one is missing."""

import ast
from pathlib import Path

import pytest
import torch

import hf_hyperattn
from hf_hyperattn.utils import torch_private

ROOT = Path(hf_hyperattn.__file__).parent
#: A class that is public in all but its module.
ALLOWED = {"torch.utils._python_dispatch.TorchDispatchMode"}


def private_names(tree: ast.AST) -> list[str]:
    """The names of torch with a part that begins with an underscore; operators of ATen are none."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
    return [
        name
        for name in names
        if name.startswith("torch.")
        and not name.startswith("torch.ops.")
        and any(part.startswith("_") and part != "__version__" for part in name.split("."))
        and name not in ALLOWED
    ]


def test_no_other_module_names_a_private_function_of_torch():
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        names = private_names(ast.parse(path.read_text()))
        if names and path.name != "torch_private.py":
            found[str(path.relative_to(ROOT))] = names
    assert not found


def test_private_names_are_found():
    text = "import torch\nfrom torch._C import x\ntorch._assert_async(1)\ntorch.ops.aten._cdist_backward()"
    assert private_names(ast.parse(text)) == ["torch._C.x", "torch._assert_async"]


@pytest.mark.parametrize("module", ["torch._C", "torch._no_such_module"])
def test_a_missing_function_is_named(module):
    with pytest.raises(ImportError) as error:
        torch_private.find_private(module, "_no_such_function")
    assert str(error.value) == (
        f"torch {torch.__version__} has no {module}._no_such_function, which hf_hyperattn calls; "
        f"allowed: {torch_private.TESTED}"
    )


def test_the_questions_are_answered():
    assert torch_private.count_dispatch_modes() == 0
    assert torch_private.find_transform() is None
    assert torch_private.find_backward_pass() == -1
    assert torch_private.read_forward_level() < 0
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.read_forward_level() == 0

    def seen(x):
        assert torch_private.find_transform() is not None and torch_private.is_wrapped(x)
        return x

    torch.vmap(seen)(torch.zeros(2, 3))
