"""Who may import whom: read from the sources, and from what the modules really load."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHARED = {"__version__", "config", "request", "sharding"}
"""Leaves of pure Python that anyone may use."""
MAY_IMPORT = {
    "server": {"server", "validation", "models.tokenizer", "models.hub"} | SHARED,
    "server.bridge": {"server", "validation", "engine"} | SHARED,
    "engine": {"engine", "models", "sparse", "draft", "kv", "nn", "comm", "numa", "validation"} | SHARED,
    # comm: models name the group's type and pass it on to nn.
    "models": {"models", "nn", "comm"} | SHARED,
    "nn": {"nn", "comm", "kernels", "sparse"} | SHARED,
    "draft": {"draft", "models", "nn"} | SHARED,
    "sparse": {"sparse", "kv", "kernels"} | SHARED,
    "kv": {"kv", "kernels"} | SHARED,
    "kernels": {"kernels"},
    "comm": {"ranks", "numa"} | SHARED,
    "config": SHARED,
    "numa": set(),
    "ranks": SHARED,
    "lifetime": set(),
    "request": SHARED,
    "sharding": SHARED,
    "validation": SHARED,
}
"""What each part of oasis_tp may import of oasis_tp; the longest name that fits decides."""
ENTRIES = {"", "serve", "generate", "batch", "slurm", "cli", "collect_env", "llm", "bench"}
"""They compose the others, so they may import anything."""

NO_TORCH = {
    "ranks",
    "scheduler",
    "plan",
    "blocks",
    "layout",
    "request",
    "config",
    "sharding",
    "sketch_size",
    "registry",
}
STREAMS = {"Stream", "Event", "ExternalStream"}
NOT_CORE = ("server", "bench", "models.hub", "models.gguf_convert", *(ENTRIES - {""}))
BLOCKED = [
    *("fastapi", "uvicorn", "pydantic", "jinja2", "prometheus_client"),
    *("transformers", "gguf", "huggingface_hub", "yaml"),
    *("deepspeed", "mpi4py", "psutil", "rich", "tqdm"),
]
"""A bare GPU node has none of these."""


class Uses(ast.NodeVisitor):
    """What one module imports and calls, as dotted names. Imports under TYPE_CHECKING do not count."""

    def __init__(self, module: str, source: str, is_package: bool = False) -> None:
        self.package = module if is_package else module.rpartition(".")[0]
        self.imported: set[str] = set()
        self.named: set[str] = set()
        self.called: set[str] = set()
        self._aliases: dict[str, str] = {}
        tree = ast.parse(source)
        # Imports first: a function may use a name that is imported further down.
        self._resolve = False
        self.visit(tree)
        self._resolve = True
        self.visit(tree)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported.add(alias.name)
            target = alias.name if alias.asname else alias.name.split(".")[0]
            self._aliases[alias.asname or target] = target

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self.package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        origin = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            self.imported.add(f"{origin}.{alias.name}")
            self._aliases[alias.asname or alias.name] = f"{origin}.{alias.name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._resolve and (name := self._dotted(node)):
            self.named.add(name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._resolve and (name := self._dotted(node.func)):
            self.called.add(name)
        self.generic_visit(node)

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return self._aliases.get(node.id) if isinstance(node, ast.Name) else None


def part_of(module: str, parts: set[str]) -> str | None:
    """The longest of `parts` that is `module` or a package around it."""
    fitting = [part for part in parts if module == part or (part and module.startswith(part + "."))]
    return max(fitting, key=len, default=None)


def is_under(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def complaints(module: str, source: str, is_package: bool = False) -> list[str]:
    """Every rule that `source`, as module `oasis_tp.<module>`, breaks."""
    uses = Uses(f"oasis_tp.{module}".rstrip("."), source, is_package)
    found = []
    part = part_of(module, set(MAY_IMPORT) | ENTRIES)
    if part is None:
        found.append(f"{module}: no rule says what it may import")
    elif part not in ENTRIES:
        ours = {name.removeprefix("oasis_tp.") for name in uses.imported if name.startswith("oasis_tp.")}
        bad = sorted(name for name in ours if part_of(name, MAY_IMPORT[part]) is None)
        found += [f"{module} imports oasis_tp.{name}: {part} may import {sorted(MAY_IMPORT[part])}" for name in bad]
    if "oasis_tp" in uses.imported and part not in ENTRIES:
        found.append(f"{module} imports the whole package")
    names = uses.imported | uses.named
    if module != "comm":
        speaks = {name for name in names if is_under(name, {"torch.distributed", "deepspeed"})}
        found += [f"{module} uses {name}: only comm speaks to other ranks" for name in sorted(speaks)]
    if module != "kv.transfers":
        made = {name for name in uses.called if name.startswith("torch.") and name.rpartition(".")[2] in STREAMS}
        found += [f"{module} makes {name}: only kv.transfers does" for name in sorted(made)]
    if module.rpartition(".")[2] in NO_TORCH:
        found += [f"{module} imports {name}" for name in sorted(uses.imported) if is_under(name, {"torch"})]
    return found


def sources() -> dict[str, Path]:
    """Module name without `oasis_tp.` -> file; the kernels come through the symlink."""
    package = ROOT / "oasis_tp"
    found = {}
    for folder in [package, *(path for path in sorted(package.iterdir()) if path.is_dir())]:
        for path in sorted(folder.glob("*.py") if folder == package else folder.rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_every_module_keeps_the_import_rules() -> None:
    found = sources()
    assert {"config", "request", "bench.haystack", "kernels.reference"} <= set(found)
    problems = [
        problem
        for module, path in found.items()
        for problem in complaints(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("server.app", "from oasis_tp.engine.engine import Engine", "server.app imports oasis_tp.engine.engine.Engine"),
        ("server.app", "def f():\n    from ..engine import engine", "server.app imports oasis_tp.engine.engine"),
        ("server.app", "import oasis_tp.engine as e", "server.app imports oasis_tp.engine"),
        ("kv.layout", "from oasis_tp.sparse import sketch", "kv.layout imports oasis_tp.sparse.sketch"),
        ("models.llama", "import oasis_tp.engine.plan", "models.llama imports oasis_tp.engine.plan"),
        ("kernels.gather", "from oasis_tp import config", "kernels.gather imports oasis_tp.config"),
        ("kernels.gather", "import oasis_tp", "kernels.gather imports the whole package"),
        ("nn.linear", "import torch\ntorch.distributed.all_reduce(x)", "nn.linear uses torch.distributed.all_reduce"),
        ("nn.linear", "from torch import distributed as dist", "nn.linear uses torch.distributed"),
        ("serve", "import torch.distributed as dist", "serve uses torch.distributed"),
        ("nn.linear", "def f():\n    import deepspeed.comm", "nn.linear uses deepspeed.comm"),
        ("kv.blocks", "import torch", "kv.blocks imports torch"),
        ("engine.plan", "from torch import Tensor", "engine.plan imports torch.Tensor"),
        ("kv.residency", "import torch\ns = torch.cuda.Stream()", "kv.residency makes torch.cuda.Stream"),
        ("engine.x", "def f():\n    E()\nfrom torch.cuda import Event as E", "engine.x makes torch.cuda.Event"),
        ("mystery", "", "mystery: no rule"),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in complaints(module, source)), complaints(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("server.bridge", "from oasis_tp.engine.engine import Engine"),
        ("comm", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("kv.transfers", "import torch\ntorch.cuda.Stream()"),
        ("models.llama", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from oasis_tp.comm import TpGroup"),
        ("server.metrics", "import threading\nthreading.Event()"),
        ("nn.attention", "import torch\ndef wait(stream: torch.cuda.Stream) -> None: ..."),
        ("bench.decode", "from oasis_tp.engine.engine import Engine"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert complaints(module, source) == []


def test_the_pure_modules_load_no_torch() -> None:
    found = sources()
    pure = {name: module for module in found if (name := module.rpartition(".")[2]) in NO_TORCH}
    assert set(pure) == NO_TORCH, f"renamed or missing: {sorted(NO_TORCH - set(pure))}"
    for module in pure.values():
        code = f"import sys, oasis_tp.{module}\nassert 'torch' not in sys.modules, 'oasis_tp.{module} loads torch'"
        run_python(code)


def test_the_core_imports_where_only_its_own_dependencies_are_installed() -> None:
    core = [f"oasis_tp.{module}" for module in sources() if part_of(module, set(NOT_CORE)) is None and module]
    assert "oasis_tp.comm" in core and "oasis_tp.server" not in core
    code = f"""
import importlib, importlib.abc, json, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is not on a bare node", name=name)
sys.meta_path.insert(0, Block())
try:
    import fastapi
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the blocker does not block")
for module in {core!r}:
    importlib.import_module(module)
print(json.dumps([name for name in sys.modules if name.split(".")[0] == "kernels"]))
"""
    assert json.loads(run_python(code)) == [], "the kernels are loaded under a second name"
