"""Ranges of configuration values: what a user may ask for, refused early and by the option's name."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

from oasis_tp.config import NUM_PROBES, Config, SparsityConfig

MOST_HOT = 2**20
"""More budgets than any context holds."""


def validate_sparsity(sparsity: SparsityConfig, block_size: int, option: Callable[[str], str]) -> None:
    """Check one sparsity section, from the command line or from a request.

    Args:
        block_size: tokens per KV block.
        option: how the user calls a field (`--budget-tokens`, or `sparsity.budget_tokens` in a request).

    Raises:
        ValueError: a value outside its range; names the option, the value and what is allowed.
    """
    _check_literals(sparsity, option)
    _check(option("budget_tokens"), sparsity.budget_tokens, sparsity.budget_tokens >= 1, "a whole number from 1")
    recent = sparsity.recent_tokens
    _check(option("recent_tokens"), recent, recent >= block_size, f"at least one block ({block_size} tokens)")
    _check(option("sink_blocks"), sparsity.sink_blocks, sparsity.sink_blocks >= 0, "a whole number from 0")
    hot = sparsity.hot_factor
    _check(option("hot_factor"), hot, hot == "auto" or 1 <= hot <= MOST_HOT, f"auto, or a number from 1 to {MOST_HOT}")
    _check(option("fetch_ratio"), sparsity.fetch_ratio, 0 < sparsity.fetch_ratio <= 1, "above 0, up to 1")


def validate(config: Config) -> None:
    """Check every value that can be judged without the model or the machine.

    Raises:
        ValueError: a value outside its range; names the option, the value and what is allowed.
    """
    for section in fields(config):
        _check_literals(getattr(config, section.name), lambda name: "--" + name.replace("_", "-"))
    model, parallel, memory, batching = config.model, config.parallel, config.memory, config.batching
    _check("--model", model.model, bool(model.model), "a path, a Hugging Face id or smollm2")
    length = model.max_model_len
    _check("--max-model-len", length, length is None or length >= 2, "at least 2 tokens (one in, one out)")
    _check("--seed", model.seed, -(2**63) <= model.seed < 2**63, "a 64-bit whole number")
    tp_size = parallel.tensor_parallel_size
    _check("--tensor-parallel-size", tp_size, tp_size is None or tp_size >= 1, "a whole number from 1")
    timeout = parallel.distributed_timeout_seconds
    _check("--distributed-timeout-seconds", timeout, timeout >= 1, "a whole number from 1")
    share = memory.gpu_memory_utilization
    _check("--gpu-memory-utilization", share, 0 < share <= 1, "above 0, up to 1")
    device_gib, host_gib = memory.device_kv_gb, memory.host_kv_gb
    _check("--device-kv-gb", device_gib, device_gib is None or 0 < device_gib < math.inf, "a number above 0")
    in_all = memory.kv_offloading_size
    for option, gib in (("--host-kv-gb", host_gib), ("--kv-offloading-size", in_all)):
        _check(option, gib, gib is None or 0 <= gib < math.inf, "a number from 0 (0: no host tier)")
    if in_all is not None and host_gib is not None:
        raise ValueError(f"--host-kv-gb {host_gib:g} (per rank) and --kv-offloading-size {in_all:g} (in all): give one")
    speculation = config.speculation
    _check("--spec-tokens", speculation.spec_tokens, 1 <= speculation.spec_tokens <= 16, "1 to 16")
    needs_model = speculation.spec_method in ("draft_model", "eagle3")
    if needs_model != bool(speculation.spec_model):
        allowed = "a model, with --spec-method draft_model or eagle3, and with those only"
        _check("--spec-model", speculation.spec_model, False, f"{allowed} (it is {speculation.spec_method})")
    smallest, largest = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    _check("--prompt-lookup-min", smallest, 1 <= smallest <= largest, f"1 to --prompt-lookup-max ({largest})")
    validate_sparsity(config.sparsity, memory.block_size, lambda name: "--" + name.replace("_", "-"))
    if speculation.num_drafts:
        probes = 0 if config.sparsity.prefetch == "off" else NUM_PROBES
        least, recent = speculation.num_drafts + probes + memory.block_size, config.sparsity.recent_tokens
        what = "a block, --spec-tokens" + (" and one that looks ahead (--prefetch)" if probes else "")
        _check("--recent-tokens", recent, recent >= least, f"with drafts at least {least}: {what}")
    _check("--max-num-seqs", batching.max_num_seqs, batching.max_num_seqs >= 1, "a whole number from 1")
    smallest = max(memory.block_size, batching.max_num_seqs)
    _check(
        "--max-num-batched-tokens",
        batching.max_num_batched_tokens,
        batching.max_num_batched_tokens >= smallest,
        f"at least {smallest} (a whole block, and a token for each of --max-num-seqs)",
    )
    queued = batching.max_num_queued_reqs
    _check("--max-num-queued-reqs", queued, queued >= 1, "a whole number from 1")
    server = config.server
    _check("--api-key", server.api_key, all(server.api_key), "keys that are not empty")
    limits = {
        "--shutdown-timeout": (server.shutdown_timeout, 0.0),
        "--watchdog-timeout": (server.watchdog_timeout, 1.0),
        "--sse-keep-alive-interval": (server.sse_keep_alive_interval, 0.0),
    }
    for option, (seconds, shortest) in limits.items():
        _check(option, seconds, shortest <= seconds < 1e9, f"seconds from {shortest:.0f}")
    _check("--port", server.port, 0 <= server.port <= 65535, "0 (any free port) to 65535")


def _check_literals(section: object, option: Callable[[str], str]) -> None:
    """Values that are one of a few: Python callers reach a section without the command line's own check."""
    for name, hint in get_type_hints(type(section)).items():
        if get_origin(hint) is Literal:
            value, allowed = getattr(section, name), get_args(hint)
            _check(option(name), value, value in allowed, ", ".join(map(str, allowed)))


def _check(option: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{option} is {value!r}; allowed: {allowed}")
