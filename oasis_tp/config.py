"""Configuration: one frozen section per subject; flags, YAML and `--help` are generated from it.

A field's docstring (the string under it) is its help text. Sections hold what the user asked for; what follows
from it (capacities, shards, layouts) is derived elsewhere, once, at start.
"""

from dataclasses import dataclass, field
from typing import Literal

AttentionMode = Literal["dense", "resolve", "paper"]
SketchKind = Literal["2bit", "1bit", "minmax"]
HotFactor = float | Literal["auto"]
NUM_PROBES = 1
"""Drafts after the last verified one that look ahead in rows of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model is loaded, and how."""

    model: str = "smollm2"
    """A directory with safetensors, a .gguf file, a Hugging Face id, or the alias `smollm2`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV. `auto`: the checkpoint's own on CUDA, float32 on the CPU."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`auto`: safetensors. `dummy`: random weights by --seed, the same on any number of ranks, for timing without a
    checkpoint: of the model's directory only config.json is read, and the tokenizer where there is one."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens (suffixes k, K, m, M allowed). Default: the model's own window."""
    served_model_name: tuple[str, ...] = ()
    """Names the API answers to. Default: the value of --model."""
    chat_template: str | None = None
    """A Jinja file used in place of the model's own chat template."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    seed: int = 0
    """Base seed for requests that bring none."""
    attention_backend: Literal["auto", "triton", "cpp", "torch"] = "auto"
    """What chooses and attends decoded tokens' blocks. `triton`: GPU kernels. `cpp`: compiled on first use, for
    float32 on a CPU. `torch`: anywhere, slowly. `auto`: the first of these that device, dtype and head_dim allow."""
    enforce_eager: bool = False
    """Launch the kernels of every step one by one: no CUDA graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How ranks share the work."""

    tensor_parallel_size: int | None = None
    """Number of ranks that share the model. Default: the world size; any other value is refused."""
    distributed_timeout_seconds: int = 600
    """How long a rank waits for the others in a collective before the job fails."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. `auto`: CUDA when there is a GPU."""
    comm: Literal["auto", "nccl", "shm", "gloo"] = "auto"
    """All-reduce: NCCL on CUDA; on the CPU DeepSpeed's shared memory where ranks fit the cores, else gloo. `gloo` on
    CUDA goes through the host, slowly, and lets ranks share a GPU, for checks."""
    numa_bind: bool = True
    """Keep each rank on the cores of its GPU's NUMA node; on CPUs, ranks share the nodes evenly."""
    check_ranks: bool = False
    """Debugging: compare a hash of every step's plan over the ranks and stop on the first difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """How much memory each KV tier gets. Sizes are per rank, except where the help says otherwise."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be planned when --device-kv-gb is not given (CUDA only)."""
    device_kv_gb: float | None = None
    """GiB per rank for device KV pages. Default on the CPU: a quarter of the available memory over the local ranks."""
    host_kv_gb: float | None = None
    """GiB per rank for the host tier. 0: no host tier, everything resident. Default: half the available memory
    over the local ranks."""
    kv_offloading_size: float | None = None
    """GiB of host tier over all ranks together; --host-kv-gb says the same per rank."""
    kv_cache_dtype: Literal["auto"] = "auto"
    """Type of cached keys and values: that of --dtype, so far."""
    block_size: Literal[16, 32, 64] = 16
    """Tokens per KV block."""

    def host_gib(self, tp_size: int) -> float | None:
        """GiB of host tier per rank, by either name; None: nobody has said."""
        return self.host_kv_gb if self.kv_offloading_size is None else self.kv_offloading_size / tp_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsityConfig:
    """What a decoded token attends. A request may bring its own."""

    attention: AttentionMode = "resolve"
    """`dense`: every token, everything resident. `resolve`: the budget's best blocks, fetched exactly when needed.
    `paper`: as the OasisKV paper has it, for comparison: those of them that were brought in beforehand; it sets
    --sketch minmax, --sink-blocks 0, --no-tail-estimate and --prefetch on, and drafts only look ahead."""
    budget_tokens: int = 1024
    """Tokens selected per row, layer and KV head, besides sink and recent ones."""
    recent_tokens: int = 128
    """Tokens before the current block that are always attended."""
    sink_blocks: int = 1
    """First blocks of the context that are always attended."""
    hot_factor: HotFactor = "auto"
    """Budgets' worth of blocks that stay on the device per request. `auto`: what the pages allow."""
    sketch: SketchKind = "2bit"
    """Stand-in for a block's keys that the selection scores."""
    tail_estimate: bool = True
    """Let blocks that were not selected contribute their mean value at their mean key's weight
    (sketches 2bit and 1bit)."""
    prefetch: Literal["auto", "on", "off"] = "auto"
    """Bring in during a step what the next one may select; where tokens are drafted, one more looks ahead for it.
    Changes speed, never answers. `auto`: on CUDA."""
    fetch_ratio: float = 0.5
    """Share of the budget that one step may bring in ahead, per request, layer and KV head."""

    def __post_init__(self) -> None:
        if self.attention == "paper":
            for name, value in {"sketch": "minmax", "sink_blocks": 0, "tail_estimate": False, "prefetch": "on"}.items():
                object.__setattr__(self, name, value)

    def looks_ahead(self, on_cuda: bool) -> bool:
        """Whether steps bring in blocks for the next one."""
        return self.attention != "dense" and (self.prefetch == "on" or (self.prefetch == "auto" and on_cuda))


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """Tokens drafted ahead and verified together. They never change an answer."""

    spec_method: Literal["none", "ngram", "draft_model", "eagle3"] = "none"
    """Who drafts. `ngram`: what followed the same words earlier in the prompt or the answer (prompt lookup).
    `draft_model`: a smaller model of the same vocabulary. `eagle3`: an EAGLE-3 head trained for the model."""
    spec_model: str = ""
    """draft_model and eagle3: the model that drafts, named as --model names one. Each rank holds all of it.
    Default: none."""
    spec_tokens: int = 4
    """Most tokens drafted per step; fewer while they are not accepted. A request that is longer than its hot set
    verifies at most hot_factor - 1."""
    prompt_lookup_max: int = 4
    """ngram: longest run of last tokens that is looked up first."""
    prompt_lookup_min: int = 2
    """ngram: shortest run of last tokens that counts as a match."""

    @property
    def num_drafts(self) -> int:
        """Rows a step may add to a request's committed one."""
        return 0 if self.spec_method == "none" else self.spec_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingConfig:
    """How many requests and tokens share a step."""

    max_num_seqs: int = 16
    """Requests that may run at once."""
    max_num_batched_tokens: int = 1024
    """Most tokens one forward pass takes: decoded tokens first, prompt chunks in what is left."""
    max_num_queued_reqs: int = 1024
    """Requests that may wait; further ones are refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 picks a free one and prints it."""
    uds: str | None = None
    """Unix socket to listen on, in place of host and port."""
    api_key: tuple[str, ...] = ()
    """Keys of which clients must send one (Authorization: Bearer KEY). Default: none is asked for."""
    api_key_file: str | None = None
    """File with further keys, one a line; unlike --api-key, nobody sees it in the list of processes."""
    shutdown_timeout: float = 20.0
    """Seconds that running requests get to finish after SIGTERM; torchrun kills its ranks after 30."""
    watchdog_timeout: float = 300.0
    """Seconds without a step after which a rank prints all stacks and ends, and /health is 503."""
    sse_keep_alive_interval: float = 15.0
    """Seconds of silence in a stream after which a comment line is sent; 0: never."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything one engine is started with."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
