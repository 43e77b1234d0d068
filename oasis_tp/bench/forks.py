"""Batches that decode from one held prompt: how the engine is timed at a context and batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from oasis_tp.bench.ceiling import timed
from oasis_tp.bench.step_parts import PartTimer
from oasis_tp.config import SparsityConfig
from oasis_tp.engine.engine import Engine
from oasis_tp.kv.layout import ceil_div
from oasis_tp.request import KvStats, RequestSpec, SamplingParams, TokenOutput

WARM_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """What a batch's timed steps took, and its tiers over all of its steps."""

    step_s: list[float]
    hot_kv_bytes: int
    """Device pages of the batch."""
    hit_rate: float | None = None
    """None where nothing is selected."""
    loaded_bytes: int = 0
    """Host to device, per step, on this rank."""


class Forks:
    """Starts batches on one engine and times their steps. Every rank makes the same calls.

    Forks share the prompt's host KV and sketches, own their pages, and sample each its own way on.
    """

    def __init__(self, engine: Engine, text: list[int], temperature: float = 1.0) -> None:
        """`text`: the token ids that prompts are cut from, repeated where they are too few."""
        self.engine = engine
        self.text = text
        self.temperature = temperature
        self._ids = count()

    def hold(self, num_tokens: int) -> RequestSpec:
        """Prefill a prompt of that many tokens and keep it."""
        ids = tuple((self.text * ceil_div(num_tokens, len(self.text)))[:num_tokens])
        spec = RequestSpec(request_id=next(self._ids), prompt_ids=ids, sampling=SamplingParams(), hold=True)
        self.engine.submit(spec)
        self._step_until_idle()
        return spec

    def release(self, held: RequestSpec) -> None:
        self.engine.abort(held.request_id)
        self._step_until_idle()

    def decode(
        self,
        held: Sequence[RequestSpec],
        sparsity: SparsityConfig,
        batch: int,
        num_steps: int,
        timer: PartTimer | None = None,
    ) -> Decoded:
        """Decode `num_steps` steps of `batch` forks of the held prompts in turn, after WARM_STEPS more; with a `timer`
        it takes their parts, of kernels launched one by one.

        Raises:
            ValueError: the batch does not fit the device.
            RuntimeError: the model's output was not finite.
        """
        ended: list[KvStats] = []

        def receive(outputs: list[TokenOutput]) -> None:
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.kv is not None:
                    ended.append(output.kv)

        engine = self.engine
        engine.on_output = receive
        for index in range(batch):
            # The first token comes from the prefill; a seed of its own leads each fork another way.
            sampling = SamplingParams(
                max_tokens=1 + WARM_STEPS + num_steps, seed=index, ignore_eos=True, temperature=self.temperature
            )
            parent = held[index % len(held)]
            engine.submit(
                RequestSpec(
                    request_id=next(self._ids),
                    prompt_ids=parent.prompt_ids,
                    sampling=sampling,
                    sparsity=sparsity,
                    fork_of=parent.request_id,
                )
            )
        engine.step()
        num_running = engine.stats().num_running
        if num_running < batch:
            raise ValueError(
                f"--batches {batch} in mode {sparsity.attention}: {num_running} requests of {len(held[0].prompt_ids)} "
                "prompt tokens fit the device at once; lower --batches or --contexts"
            )
        loaded = engine.stats().host_to_device_bytes  # what kernels load is counted when a request ends
        graphs = engine.runner.graphs
        engine.runner.graphs = graphs if timer is None else None
        for _ in range(WARM_STEPS):
            engine.step()
        step = engine.step if timer is None else lambda: timer.run(engine.step)
        step_s = [timed(step, engine.tp.device) for _ in range(num_steps)]
        engine.runner.graphs = graphs
        loaded = engine.stats().host_to_device_bytes - loaded
        assert len(ended) == batch, (len(ended), batch)
        self._step_until_idle()
        selected, missed = (sum(getattr(kv, f"{name}_blocks") for kv in ended) for name in ("selected", "missed"))
        return Decoded(
            step_s=step_s,
            hot_kv_bytes=sum(kv.hot_kv_bytes for kv in ended),
            hit_rate=1 - missed / selected if selected else None,
            loaded_bytes=loaded // (WARM_STEPS + num_steps),
        )

    def _step_until_idle(self) -> None:
        self.engine.step()
        while self.engine.has_work:
            self.engine.step()
