"""Parameters are counted in the weights that a load reads, not in what else lies in the directory."""

import pytest
import torch
from safetensors.torch import save_file

from hub_cards.weights import count_parameters

MODEL = {
    "layers.0.attn.q.weight": torch.zeros(4, 5),
    "layers.0.attn.hyper.cone.gate": torch.zeros(3),
}


def test_a_variant_and_an_adapter_beside_the_model_are_not_counted(tmp_path):
    assert count_parameters(tmp_path) == (0, 0)
    save_file(MODEL, tmp_path / "model.fp16.safetensors")
    assert count_parameters(tmp_path) == (3, 23)
    for number, (name, tensor) in enumerate(MODEL.items(), 1):
        save_file({name: tensor}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    assert count_parameters(tmp_path) == (3, 23)
    save_file(MODEL, tmp_path / "model.safetensors")
    save_file({"a.hyper.gate": torch.zeros(7)}, tmp_path / "adapter_model.safetensors")
    assert count_parameters(tmp_path) == (3, 23)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert count_parameters(tmp_path) == (7, 7)


@pytest.mark.parametrize(
    "content", [b"", b"mine", b"\xff" * 20, (9).to_bytes(8, "little") + b"not JSON!"]
)
def test_what_is_no_safetensors_file_is_named_in_one_line(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file") as caught:
        count_parameters(tmp_path)
    assert "\n" not in str(caught.value)
