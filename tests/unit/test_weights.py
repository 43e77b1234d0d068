"""Loading weights: what is read, and every way a checkpoint can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from oasis_tp.comm import RankInfo, TpGroup
from oasis_tp.models.llama import LlamaModel
from oasis_tp.models.registry import load_arch
from oasis_tp.models.weights import WeightSlot, fill_weights, load_weights, weight_bytes, weight_table
from oasis_tp.nn.ops import Place
from tests.tiny import make_tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("qwen2"))


def empty_model(model_dir: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> LlamaModel:
    """A model whose weights are NaN; at size > 1 it can be loaded but not run."""
    tp = TpGroup(RankInfo(rank=rank, size=size), torch.device("cpu"), "none")
    model = LlamaModel(load_arch(model_dir), tp, Place(dtype, torch.device("cpu")), max_model_len=8)
    for slot in weight_table(model):
        slot.target.fill_(torch.nan)
    return model


def rewrite(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the checkpoint after `change` to its tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ranks_shares_add_up_to_the_checkpoint(checkpoint: Path, size: int) -> None:
    expected = load_file(checkpoint / "model.safetensors")
    covered = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for rank in range(size):
        model = empty_model(checkpoint, rank, size)
        load_weights(model, checkpoint)
        for slot in weight_table(model):
            assert not slot.target.isnan().any(), slot.name
            part = covered[slot.name].narrow(slot.dim, slot.start, slot.target.shape[slot.dim])
            part.copy_(slot.target)
    for name, tensor in expected.items():
        assert torch.equal(covered[name], tensor), name


def test_random_weights_are_the_seed_s_on_any_number_of_ranks(checkpoint: Path) -> None:
    def filled(rank: int, size: int, seed: int) -> dict[str, tuple[WeightSlot, torch.Tensor]]:
        model = empty_model(checkpoint, rank, size)
        fill_weights(model, seed)
        return {slot.name: (slot, slot.target) for slot in weight_table(model)}

    whole, again, other = (filled(0, 1, seed) for seed in (3, 3, 4))
    for rank in range(3):
        for name, (slot, part) in filled(rank, 3, 3).items():
            assert torch.equal(part, whole[name][1].narrow(slot.dim, slot.start, part.shape[slot.dim])), name
    for name, (slot, tensor) in whole.items():
        assert torch.equal(tensor, again[name][1])
        if len(slot.shape) == 1:
            assert (tensor == float(name.endswith("weight"))).all(), name
        else:
            assert not torch.equal(tensor, other[name][1])
            assert float(tensor.std()) == pytest.approx(slot.shape[1] ** -0.5, rel=0.05)


def test_each_rank_reads_only_its_share(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class CountingSlice:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def get_shape(self) -> list[int]:
            return self.inner.get_shape()  # type: ignore[attr-defined]

        def __getitem__(self, index: object) -> torch.Tensor:
            part = self.inner[index]  # type: ignore[index]
            read.append(part.nbytes)
            return part

    class CountingFile:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> "CountingFile":
            return self

        def __exit__(self, *_: object) -> None: ...

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> CountingSlice:
            return CountingSlice(self.file.get_slice(name))

    monkeypatch.setattr("oasis_tp.models.weights.safe_open", CountingFile)
    model = empty_model(checkpoint, rank=1, size=3)
    load_weights(model, checkpoint)
    assert sum(read) == weight_bytes(model)


def test_sharded_files_and_other_types_are_cast(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for index in range(2):
        part = {name: tensors[name].to(torch.bfloat16) for name in names[index::2]}
        save_file(part, tmp_path / f"part-{index}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file({"not.named": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    model = empty_model(tmp_path)
    load_weights(model, tmp_path, progress=True)
    slot = weight_table(model)[0]
    assert torch.equal(slot.target, tensors[slot.name].to(torch.bfloat16).float())
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part-1\.safetensors is missing"):
        load_weights(empty_model(tmp_path), tmp_path)


NORM = "model.layers.1.input_layernorm.weight"
WRONG: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(NORM), f"1 tensors are missing: {NORM}"),
    "left over": (lambda t: t.update(extra=torch.zeros(1)), r"extra \(in model.safetensors\)"),
    "wrong shape": (lambda t: t.update({NORM: torch.zeros(7)}), rf"{NORM} has shape \[7\].*asks for \[144\]"),
    "wrong rank": (lambda t: t.update({NORM: torch.zeros(144, 1)}), rf"{NORM} has shape \[144, 1\]"),
    "too few layers in config": (lambda t: t.update({"model.layers.3.x": torch.zeros(1)}), r"model\.layers\.3\.x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_checkpoint_is_refused_by_tensor(checkpoint: Path, tmp_path: Path, name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        load_weights(empty_model(checkpoint), rewrite(checkpoint, tmp_path, change))


def test_known_extras_are_ignored(checkpoint: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    load_weights(empty_model(checkpoint), rewrite(checkpoint, tmp_path, lambda t: t.update(extra)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    load_weights(empty_model(tmp_path), tmp_path)  # with an lm_head.weight beside tied embeddings


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(checkpoint: Path, tmp_path: Path, keep: float) -> None:
    rewrite(checkpoint, tmp_path, lambda t: None)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read, it may be truncated"):
        load_weights(empty_model(checkpoint), tmp_path)


def test_no_weights_at_all(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        load_weights(empty_model(checkpoint), tmp_path)
