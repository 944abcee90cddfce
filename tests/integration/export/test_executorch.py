"""Programs lowered for ExecuTorch: they run in its runtime, for any batch and length, or are refused."""

import pytest

from tests.integration.export.test_portable import assert_same, make, program

pytestmark = [
    pytest.mark.tools,
    pytest.mark.timeout(1500),
]  # lowering takes a minute, and longer on shared cores
CASES = [
    *(
        ("llama", name)
        for name in ("cone", "cone_penumbral", "hyperbolic", "hype", "hsa", "head_fusion", "mkl")
    ),
    *(("llama", name) for name in ("trilinear", "cone, hype, head_fusion", "cone by name")),
    *(("bert", name) for name in ("hsa", "collaborative")),
]


def lowered(family: str, mechanism: str):
    """The model, and the bytes of its program."""
    exir = pytest.importorskip("executorch.exir")
    model = make(family, mechanism)
    return model, exir.to_edge(program(model)).to_executorch().buffer


@pytest.mark.parametrize("family, mechanism", CASES)
def test_a_program_runs_in_executorchs_runtime(family, mechanism):
    runtime = pytest.importorskip("executorch.runtime")
    model, buffer = lowered(family, mechanism)
    method = runtime.Runtime.get().load_program(buffer).load_method("forward")
    assert_same(lambda *tensors: method.execute(tensors)[0], model, 1e-4)


def test_talking_heads_are_refused():
    """Their product over heads has the square of a length as a size, for which ExecuTorch plans no memory."""
    with pytest.raises(Exception) as raised:
        lowered("llama", "talking_heads")
    assert not isinstance(raised.value, (AssertionError, ImportError))
