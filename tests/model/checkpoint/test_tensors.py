"""Weights are read from their file a tensor at a time, and no copy of the model is ever whole in memory."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword.config import ModelConfig
from foreword.errors import ModelLoadError
from foreword.model.checkpoint.stored import check_shapes, read_stored
from foreword.model.checkpoint.tensors import Place, StoredTensors, UnreadableError, safetensors_places
from foreword.model.decoder.decoder import Decoder
from foreword.model.decoder.families import find_spec
from foreword.model.loader import load_model
from tiny_models import Recipe, TinyModels, save_model


def write(folder: Path, name: str, tensors: dict[str, Tensor], fmt: str = "pt") -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name, metadata={"format": fmt})


def test_tensors_are_those_of_the_files_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    kinds = torch.float32, torch.bfloat16, torch.float16
    first, second = ({f"{n}.{kind}": torch.randn(n + 1, 3).to(kind) for kind in kinds} for n in (1, 2))
    write(tmp_path, "a.safetensors", {**first, "empty": torch.empty(0, 4), "x.rotary_emb.inv_freq": torch.ones(2)})
    write(tmp_path, "b.safetensors", {**second, "one": torch.tensor(3.0)})
    names = {**dict.fromkeys((*first, "empty"), "a.safetensors"), **dict.fromkeys((*second, "one"), "b.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    stored = StoredTensors(str(tmp_path), safetensors_places(tmp_path), torch.bfloat16)
    expected = {**load_file(tmp_path / "a.safetensors"), **load_file(tmp_path / "b.safetensors")}
    assert set(stored) == set(expected) - {"x.rotary_emb.inv_freq"}
    for name in list(stored):
        assert stored.shape(name) == tuple(expected[name].shape)
        assert torch.equal(stored.pop(name), expected[name].to(torch.bfloat16))
        assert name not in stored


@pytest.mark.parametrize("fault", ["no file", "truncated", "garbage", "of another library", "integers"])
def test_files_that_are_out_of_the_ordinary_are_left_to_transformers(tmp_path: Path, fault: str) -> None:
    if fault != "no file":
        kept = {"a": torch.ones(64, 64, dtype=torch.int8 if fault == "integers" else torch.float32)}
        write(tmp_path, "model.safetensors", kept, "tf" if fault == "of another library" else "pt")
    path = tmp_path / "model.safetensors"
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    if fault == "garbage":
        path.write_bytes(b"\xff" * 100)
    with pytest.raises(UnreadableError):
        StoredTensors(str(tmp_path), safetensors_places(tmp_path), torch.float32)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_of_the_users(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", {"a": torch.ones(64, 64)})
    stored = StoredTensors(str(tmp_path), safetensors_places(tmp_path), torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"cannot be read: model\.safetensors ended early; start again"):
        stored["a"]


class Watched(StoredTensors):
    """Counts the bytes of handed-out tensors that somebody still holds."""

    def __init__(self, model: str, places: Mapping[str, Place], dtype: torch.dtype) -> None:
        super().__init__(model, places, dtype)
        self._given: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        found = super().__getitem__(name)
        self._given[name] = weakref.ref(found.untyped_storage())
        alive = [storage for ref in self._given.values() if (storage := ref()) is not None]
        self.most = max(self.most, sum(one.nbytes() for one in alive))
        return found


def test_a_wrong_shape_is_left_to_transformers_which_names_it(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", Recipe("llama"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] = torch.ones(64, 95)
    write(folder, "model.safetensors", weights)
    stored = read_stored(ModelConfig(str(folder)))
    with pytest.raises(UnreadableError, match=r"down_proj.weight of shape \(64, 95\), where \(64, 96\) is expected"):
        check_shapes(find_spec(stored.values, stored.weights), stored.weights)
    with pytest.raises(ModelLoadError):
        load_model(ModelConfig(str(folder)))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_no_copy_of_the_model_is_whole_in_memory(tiny_models: TinyModels, tmp_path: Path, family: str) -> None:
    from foreword.model.decoder.linear import can_pack

    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this torch packs no weights, so they are kept as they are read")
    recipe = Recipe(
        family, {"num_hidden_layers": 12, "layer_types": None} if family == "gemma3_text" else {"num_hidden_layers": 12}
    )
    stored = read_stored(ModelConfig(str(save_model(tmp_path / family, recipe))))
    weights = Watched(str(tmp_path / family), safetensors_places(tmp_path / family), torch.float32)
    layer = sum(4 * torch.Size(weights.shape(name)).numel() for name in weights if ".layers.0." in name)
    table = 4 * torch.Size(weights.shape("model.embed_tokens.weight")).numel()
    total = sum(4 * torch.Size(weights.shape(name)).numel() for name in weights)
    decoder = Decoder(find_spec(stored.values, weights), weights)
    norms = 12 * 4096
    assert weights.most <= 2 * table + 2 * layer + norms < total
    assert decoder.parts()["plain"] == 0


def test_a_tied_head_that_differs_in_the_file_is_a_head_of_its_own(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", Recipe("llama", {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    for head, tied in ((table.clone(), True), (table + 1, False)):
        write(folder, "model.safetensors", {**weights, "lm_head.weight": head})
        assert load_model(ModelConfig(str(folder))).decoder.spec.tied is tied


def test_what_is_made_of_a_stored_tensor_may_take_its_place(tmp_path: Path) -> None:
    """As the experts of a layer, which some files join."""
    write(tmp_path / "model", "model.safetensors", {"a": torch.ones(2), "b": torch.zeros(3)})
    weights = StoredTensors(str(tmp_path / "model"), safetensors_places(tmp_path / "model"), torch.float32)
    joined = weights.pop("a")
    assert isinstance(joined, Tensor)
    weights["a.0"] = joined[:1]
    assert (set(weights), len(weights), "a" in weights) == ({"a.0", "b"}, 2, False)
    assert torch.equal(weights["a.0"], torch.ones(1))  # type: ignore[arg-type]
    del weights["a.0"]
    assert list(weights) == ["b"]
