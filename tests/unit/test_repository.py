"""The repository's own promises: versions, layout, tools, and nothing of one machine in it."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import oasis_tp

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = {"help", "venv", "demo", "serve", "test", "lint", "clean"}
TARGETS |= {"bench", "bench-peers", "bench-retrieval", "measure-retrieval", "gpu-check"}


def make(*arguments: str) -> str:
    """What `make` prints; as from a shell, also where the tests themselves were started by make."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def pins() -> dict[str, str]:
    """Distribution -> exact version, from constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines if line)}


def installed_by_make() -> list[Requirement]:
    match = re.search(r'-e "\.\[([a-z,]+)\]"', MAKEFILE)
    assert match
    wanted = list(PROJECT["dependencies"])
    for extra in match[1].split(","):
        wanted += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in wanted]


def text_files() -> list[Path]:
    """Every file of the repository that people write."""
    folders = ["oasis_tp", "kernels", "launcher", "configs", "tests", ".ci"]
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in folders:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return found


def test_make_installs_what_the_ranges_allow() -> None:
    exact = pins() | {"triton": re.findall(r"triton==([\d.]+)", MAKEFILE)[0]}
    for requirement in installed_by_make():
        version = exact.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} has no exact version in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


@pytest.mark.parametrize(
    ("name", "wanted", "refused"), [("torch", ("2.11.0", "2.14.1"), "2.10.0"), ("triton", ("3.6.0", "3.9.0"), "3.5.1")]
)
def test_the_ranges_are_those_promised(name: str, wanted: tuple[str, ...], refused: str) -> None:
    (requirement,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
    assert all(requirement.specifier.contains(version) for version in wanted)
    assert not requirement.specifier.contains(refused)
    assert PROJECT["requires-python"] == ">=3.11"


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", oasis_tp.__version__)


def test_the_package_offers_its_public_names_and_no_others() -> None:
    assert oasis_tp.SamplingParams.__name__ == "SamplingParams"
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = oasis_tp.nothing_such


def test_kernels_are_reached_through_one_link() -> None:
    link = ROOT / "oasis_tp" / "kernels"
    assert link.is_symlink() and os.readlink(link) == os.path.join("..", "kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow the distribution named kernels"


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_every_make_target_sets_up_the_environment_first() -> None:
    """`make -n -B` shows what would run on a machine where nothing has been made yet."""
    for target in sorted(TARGETS - {"help", "clean"}):
        plan = make("-n", "-B", target)
        assert plan.index("-m venv .venv") < plan.index("pip install") < plan.index("touch .venv/.installed"), target
    assert {line.split()[0] for line in make("help").splitlines()} == TARGETS


def test_ci_runs_lint_and_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert text.index("make lint") < text.index("make test")
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme and "make demo" in readme


@pytest.mark.parametrize(
    ("status", "last_line", "expected"),
    [(0, "3 passed, 1 skipped in 0.1s", 0), (0, "3 skipped in 0.1s", 1), (0, "", 1), (1, "1 failed, 3 passed", 1)],
)
def test_ci_fails_on_a_failure_and_where_nothing_ran(
    tmp_path: Path, status: int, last_line: str, expected: int
) -> None:
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    script.write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "Makefile").write_text(f"lint:\n\t@true\ntest:\n\t@echo '{last_line}'; exit {status}\n")
    result = subprocess.run(["bash", script], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (result.returncode != 0) == (expected != 0), result.stdout + result.stderr


def test_nothing_in_it_belongs_to_one_machine() -> None:
    home = re.compile(r"""["' =(`](/root|/work|/home/\w+|/opt)/""")
    registry = re.compile(r"--(extra-)?index-url|--find-links|pypi\.org|pythonhosted", re.IGNORECASE)
    checked = 0
    for path in text_files():
        if path == Path(__file__):
            continue
        text = path.read_text()
        checked += 1
        assert not (found := home.search(text)), f"{path}: {found}"
        assert not (found := registry.search(text)), f"{path}: {found}"
    assert checked > 20
