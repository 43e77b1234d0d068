"""The kernels folder stands beside the package and is part of it: in a wheel, an sdist, editable and as checked out."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOW = "import oasis_tp.kernels.reference as r, sys; print(r.__file__); assert 'kernels' not in sys.modules"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the repository holds, so that building leaves nothing behind in it."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("oasis_tp", "kernels", "configs", "launcher", "tests"):
        if (ROOT / name).exists():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    return copy


def run(cwd: Path, *arguments: str | Path, python: Path | str = sys.executable, python_path: Path | str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(python_path), "PIP_NO_INDEX": "1"}
    command = [python, *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout.strip()


def build(kind: str, tree: Path, target: Path) -> Path:
    """`kind` by the build backend's own hook (PEP 517): wheel or sdist."""
    target.mkdir()
    run(tree, "-c", f"from setuptools.build_meta import build_{kind} as build; build({str(target)!r})")
    (built,) = target.iterdir()
    return built


def check_wheel(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(target)
    assert names.count("oasis_tp/kernels/reference.py") == 1
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"oasis_tp"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "oasis_tp").rglob("*.py")}
    modules |= {f"oasis_tp/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    elsewhere = target.parent / "elsewhere"
    elsewhere.mkdir()
    assert Path(run(elsewhere, "-c", SHOW, python_path=target)) == target / "oasis_tp" / "kernels" / "reference.py"


def test_a_wheel_has_the_kernels_once_and_imports(tree: Path, tmp_path: Path) -> None:
    run(tree, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheels", ".")
    (wheel,) = (tmp_path / "wheels").iterdir()
    check_wheel(wheel, tmp_path / "installed")


def test_an_sdist_builds_the_same_wheel(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    check_wheel(build("wheel", unpacked, tmp_path / "wheels"), tmp_path / "installed")


def test_an_editable_install_imports_from_the_tree(tree: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(tmp_path, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", python=python))
    # Borrows the installed dependencies, but not what an editable install in this environment may have hooked in.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    run(tmp_path, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation", "-e", tree)
    found = Path(run(tmp_path, "-c", SHOW, python=python))
    assert found.resolve() == tree.resolve() / "kernels" / "reference.py"


def test_a_plain_checkout_imports_also_under_the_launcher(tree: Path) -> None:
    assert Path(run(tree, "-c", SHOW)) == tree / "oasis_tp" / "kernels" / "reference.py"
    run(tree, "-m", "torch.distributed.run", "--standalone", "-m", "oasis_tp.kernels.reference")
