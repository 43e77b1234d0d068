"""The CPU fast path: kernels/cpu.cpp compiled once per machine, called through ctypes (which releases the GIL).

Plain C++ behind a C interface compiles in seconds without torch's headers, and its OpenMP runtime is the one that torch
has loaded already.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BlockCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
SOURCES = sorted([*Path(__file__).parent.glob("*.h"), *Path(__file__).parent.glob("*.cpp")])
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
KINDS = {"minmax": 0, "1bit": 1, "2bit": 2}

_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float}
_SIGNATURES: dict[str, tuple[Any, str]] = {  # result, and the kinds of the arguments: pointer, number, float
    "oasis_select": (ctypes.c_int64, "pnpnppppn"),
    "oasis_attend": (None, "pnpnpppn"),
    "oasis_copy_blocks": (None, "ppppnnn"),
    "oasis_linear": (None, "ppppnn"),
    "oasis_rope": (None, "pppppfpppnnnn"),
}


class SketchLayer(ctypes.Structure):
    """One layer of a sketch's tensors; addresses, 0 where a kind has no such tensor."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("token_scales", ctypes.c_void_p),
        ("means", ctypes.c_void_p),
        ("mean_scales", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("rotation", ctypes.c_void_p),
    ]


class Layer(ctypes.Structure):
    """One layer of the device pool and the residency tables."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_heads", "group", "head_dim", "block_size")),
        ("pool", ctypes.c_void_p),
        ("wide_tables", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("block_in_slot", "slot_of_block", "last_selected", "fetched")),
        *((name, ctypes.c_int64) for name in ("max_slots", "max_blocks", "in_flight")),
    ]


class Row(ctypes.Structure):
    """One decoded row; a negative budget attends everything."""

    _fields_ = [
        ("sketches", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("host_blocks", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("table_row", "position", "first", "last", "budget", "num_slots"),
                *("resident", "use_tail", "recall", "tick"),
                *("probe", "reach", "fetch_limit"),
            )
        ),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "norm_weight")),
        ("norm_eps", ctypes.c_float),
        ("gated", ctypes.c_int32),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]


class _Work(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("max_blocks", "max_chosen", "max_candidates")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("num_blocks", "pages", "num_chosen", "chosen", "estimate", "coarse", "loads"),
                *("missed_mass", "missed_blocks"),
            )
        ),
        ("max_fetches", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("fetches", "num_fetches", "prefetched", "must_wait")),
    ]


class Step:
    """One step's rows and the buffers its layers share. `rows` is kept alive with what it points to by the caller.

    `missed_mass` [row, head] float64, `missed_blocks` [row, head] int64 and `prefetched` [row, head, 3] int64 (blocks
    ordered in the background, selected after they landed, selected before) add up over the layers. `estimate`
    [row, head, group * most candidates] holds, as [group, candidates], the last layer's block scores.
    """

    def __init__(self, rows: list[Row], num_heads: int, group: int, block_size: int) -> None:
        self.rows = (Row * len(rows))(*rows)
        self.tick = rows[0].tick
        max_blocks = max(row.position // block_size + 1 for row in rows)
        max_chosen = max(1, *(row.budget for row in rows))
        max_candidates = max(1, *(row.last - row.first for row in rows))
        pairs = len(rows) * num_heads
        self.missed_mass = torch.zeros(len(rows), num_heads, dtype=torch.float64)
        self.missed_blocks = torch.zeros(len(rows), num_heads, dtype=torch.int64)
        self.loads = torch.empty(3, pairs * max_blocks, dtype=torch.int64)
        self.estimate = torch.empty(len(rows), num_heads, group * max_candidates)
        max_fetches = max(row.fetch_limit for row in rows)
        self.prefetched = torch.zeros(len(rows), num_heads, 3, dtype=torch.int64)
        self.fetches = torch.empty(3, len(rows), num_heads, max_fetches, dtype=torch.int64)
        self.num_fetches = torch.empty(len(rows), num_heads, dtype=torch.int64)
        self.must_wait = torch.zeros(1, dtype=torch.int64)
        self._buffers = (
            torch.empty(pairs, dtype=torch.int64),
            torch.empty(pairs, max_blocks, dtype=torch.int64),
            torch.empty(pairs, dtype=torch.int64),
            torch.empty(pairs, max_chosen, dtype=torch.int64),
            self.estimate,
            torch.empty(pairs, group * max_candidates),
        )
        addresses = [x.data_ptr() for x in (*self._buffers, self.loads, self.missed_mass, self.missed_blocks)]
        ahead = (self.fetches, self.num_fetches, self.prefetched, self.must_wait)
        self.work = _Work(
            max_blocks, max_chosen, max_candidates, *addresses, max_fetches, *(x.data_ptr() for x in ahead)
        )

    def ahead(self) -> list[tuple[int, torch.Tensor]]:
        """What the layer's rows want in the background: table row and [3, n] int64 heads, host blocks and pages."""
        wanted = []
        for index, row in enumerate(self.rows):
            counts = self.num_fetches[index].tolist() if row.fetch_limit else []
            parts = [self.fetches[:, index, head, :count] for head, count in enumerate(counts) if count]
            if parts:
                wanted.append((row.table_row, torch.cat(parts, dim=1)))
        return wanted


def load(cache_dir: Path) -> ctypes.CDLL | None:
    """The compiled library; built into `cache_dir` on first use. None where there is no C++ compiler.

    Raises:
        ValueError: there is a compiler and it fails; its own words are in the message.
    """
    command = shlex.split(os.environ.get("CXX", "c++"))
    compiler = shutil.which(command[0]) if command else None
    if compiler is None:
        return None
    key = hashlib.sha256(
        b"".join(source.read_bytes() for source in SOURCES)
        + " ".join((compiler, *command, *FLAGS, _processor())).encode()
    ).hexdigest()[:16]
    library = cache_dir / f"cpu-{key}.so"
    if not library.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            fresh = Path(scratch) / "cpu.so"
            units = [str(source) for source in SOURCES if source.suffix == ".cpp"]
            run = subprocess.run([*command, *FLAGS, *units, "-o", str(fresh)], capture_output=True, text=True)
            if run.returncode != 0:
                raise ValueError(
                    f"{compiler} cannot build the CPU kernels (CXX names another one): {run.stderr.strip()[-2000:]}"
                )
            fresh.replace(library)  # whole or not at all: another rank may be building it too
    loaded = ctypes.CDLL(str(library))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, [_TYPES[kind] for kind in arguments]
    return loaded


def select(
    library: ctypes.CDLL, layer: Layer, index: int, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Put every row's token into its block's page, choose its blocks in layer `index`, give the missing ones slots.

    Args:
        q: [row, head, group, head_dim] fp32 contiguous, roped.
        k, v: [row, head, head_dim] fp32 contiguous, k roped.

    Returns:
        What must be fetched before `attend`: [3, n] int64: local KV heads, host blocks, pages.
    """
    _check(layer, step, q)
    assert k.is_contiguous() and v.is_contiguous() and k.shape == v.shape == (*q.shape[:2], q.shape[3])
    count = library.oasis_select(
        ctypes.byref(layer), index, step.rows, len(step.rows), q.data_ptr(), k.data_ptr(), v.data_ptr(),
        ctypes.byref(step.work), torch.get_num_threads(),
    )  # fmt: skip
    assert count >= 0, "a row's selection does not fit its slots"
    return step.loads[:, :count]


def attend(library: ctypes.CDLL, layer: Layer, index: int, step: Step, q: torch.Tensor) -> torch.Tensor:
    """Attention over what `select` chose, after its fetches are done. q, and the result, as in `select`."""
    _check(layer, step, q)
    out = torch.empty_like(q)
    library.oasis_attend(
        ctypes.byref(layer), index, step.rows, len(step.rows), q.data_ptr(), ctypes.byref(step.work),
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def block_copier(library: ctypes.CDLL, *, alone: bool) -> BlockCopy:
    """A function (target, targets, source, sources): target[targets] = source[sources], any dtype.

    target and source are [n, width], contiguous; targets and sources [m] int64. `alone`: nothing else computes
    meanwhile, so it takes all of the threads and not only the caller's.
    """

    def copy(target: torch.Tensor, targets: torch.Tensor, source: torch.Tensor, sources: torch.Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous() and target.stride(0) == source.stride(0)
        assert targets.dtype == sources.dtype == torch.int64 and targets.shape == sources.shape
        targets, sources = targets.contiguous(), sources.contiguous()
        library.oasis_copy_blocks(
            *(x.data_ptr() for x in (target, targets, source, sources)),
            targets.numel(),
            target.stride(0) * target.itemsize,
            torch.get_num_threads() if alone else 1,
        )

    return copy


def linear(
    library: ctypes.CDLL,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """f(x) Wᵀ + bias + residual for a few rows, fp32; each row's bits depend on that row alone.

    Args:
        x: [rows, in], or with `gated` [rows, 2 * in]: then f is silu of the first half times the second.
        weight: [out, in].
        norm: weight [in] and epsilon of a root-mean-square norm that is f.
        residual: [rows, out].
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    x = x.contiguous()
    assert x.dtype == weight.dtype == torch.float32 and x.shape[1] == inputs * (1 + gated) and weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == (rows, outputs))
    y = torch.empty(rows, outputs)
    norm_weight, eps = norm or (None, 0.0)
    what = _Linear(weight.data_ptr(), _address(bias), _address(norm_weight), eps, gated, inputs, outputs)
    library.oasis_linear(
        ctypes.byref(what), x.data_ptr(), _address(residual), y.data_ptr(), rows, torch.get_num_threads()
    )
    return y


def rope(
    library: ctypes.CDLL,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim] into q, k, v [rows, heads, head_dim]; q and k turned.

    Args:
        cos, sin: [rows, 1, head_dim / 2].
        q_norm, k_norm: [head_dim], root-mean-square norms that each head of q and k passes first.
    """
    rows, head_dim = qkv.shape[0], 2 * cos.shape[-1]
    assert qkv.dtype == torch.float32 and qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and cos.shape[0] == rows
    q, k, v = (torch.empty(rows, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    library.oasis_rope(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), _address(q_norm), _address(k_norm), norm_eps,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), rows, num_heads, num_kv_heads, head_dim,
    )  # fmt: skip
    return q, k, v


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(layer: Layer, step: Step, q: torch.Tensor) -> None:
    assert q.dtype == torch.float32 and q.is_contiguous()
    assert q.shape == (len(step.rows), layer.num_heads, layer.group, layer.head_dim)


def _processor() -> str:
    """What -march=native depends on: a cache may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
