"""KvCache beside a cache that keeps everything: same attention, same bits however the blocks move, true bytes."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from oasis_tp.config import SketchKind, SparsityConfig
from oasis_tp.engine.decode_batch import DecodeBatch, RowState
from oasis_tp.engine.kv_cache import CacheShape, KvCache
from oasis_tp.kernels import reference
from oasis_tp.kv.blocks import runs_for
from oasis_tp.kv.layout import RUN_BLOCKS, Capacity, KvLayout, SelectionLayout
from oasis_tp.nn.attention import causal_mask
from oasis_tp.request import Request, RequestSpec, SamplingParams
from oasis_tp.sparse.cpu_decode import load_library
from oasis_tp.sparse.sketch import Sketch

CPU = torch.device("cpu")
LAYERS, HEADS, GROUP, DIM, BLOCK = 2, 2, 3, 16, 16
TOLERANCE = 2e-5  # fp32 sums over at most some 300 tokens of unit variance against float64
LAYOUT = KvLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=BLOCK, dtype_bytes=4)


@dataclass(kw_only=True)
class Truth:
    """The queries, keys and values of one sequence, and what attending them must give."""

    num_prompt: int
    num_decode: int
    sparsity: SparsityConfig
    seed: int = 0
    selection: SelectionLayout = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        num_tokens, heads = self.num_prompt + self.num_decode, HEADS * GROUP
        self.q = 2 * torch.randn(LAYERS, num_tokens, heads, DIM, generator=generator)
        self.k = torch.randn(LAYERS, num_tokens, HEADS, DIM, generator=generator)
        self.v = torch.randn(LAYERS, num_tokens, HEADS, DIM, generator=generator)
        self.selection = SelectionLayout.from_config(self.sparsity, BLOCK, 1.0)
        num_blocks = LAYOUT.num_blocks(num_tokens)
        self.sketch = Sketch(
            self.sparsity.sketch,
            num_layers=LAYERS,
            num_blocks=num_blocks,
            num_kv_heads=HEADS,
            head_dim=DIM,
            block_size=BLOCK,
            device=CPU,
        )
        for layer in range(LAYERS):
            for block in range(num_tokens // BLOCK):
                k, v = (x[layer, block * BLOCK : (block + 1) * BLOCK].transpose(0, 1)[None] for x in (self.k, self.v))
                self.sketch.seal(layer, torch.tensor([block]), k, v)

    def attended(self, layer: int, position: int) -> torch.Tensor:
        """Blocks [head, n] of a decoded row, ascending."""
        first, last = self.selection.candidates(position)
        everything = torch.arange(position // BLOCK + 1)
        if self.selection.budget is None or last - first <= self.selection.budget:
            return everything.expand(HEADS, -1)
        scores = self.sketch.score(layer, torch.arange(first, last), self.query(layer, position))
        chosen = reference.top_blocks(reference.group_scores(scores), self.selection.budget) + first
        pinned = everything[(everything < first) | (everything >= last)].expand(HEADS, -1)
        return torch.cat([pinned, chosen], 1).sort(1).values

    def query(self, layer: int, position: int) -> torch.Tensor:
        return self.q[layer, position].view(HEADS, GROUP, DIM)

    def output(self, layer: int, position: int, blocks: torch.Tensor, tail: bool) -> torch.Tensor:
        """Attention of a row over `blocks` [head, n], and over its other candidates at their estimate."""
        q, outputs = self.query(layer, position), []
        first, last = self.selection.candidates(position)
        for head in range(HEADS):
            tokens = [t for b in blocks[head].tolist() for t in range(b * BLOCK, (b + 1) * BLOCK) if t <= position]
            logits = values = None
            if tail and self.selection.budget is not None and last - first > self.selection.budget:
                logits, values = self.sketch.tail(layer, torch.arange(first, last), q)
                logits[:, :, [b - first for b in blocks[head].tolist() if first <= b < last]] = -torch.inf
                logits, values = logits[head, None], values[head, None]
            k, v = (x[layer, tokens, head][None] for x in (self.k, self.v))
            outputs.append(reference.attend(q[head, None], k, v, logits, values, use_tail=tail)[0])
        return torch.cat(outputs).reshape(HEADS * GROUP, DIM)


class Rig:
    """A KvCache and the requests on it; pages and host runs are dealt out of order."""

    def __init__(
        self,
        library: ctypes.CDLL | None,
        *,
        num_runs: int = 3,
        host_tier: bool = True,
        kinds: tuple[SketchKind, ...] = ("2bit",),
    ) -> None:
        num_pages = 30
        shape = CacheShape(
            layout=LAYOUT,
            capacity=Capacity(num_pages=num_pages, num_host_blocks=num_runs * RUN_BLOCKS, hot_factor=1.0),
            host_tier=host_tier,
            max_model_len=400,
            max_num_seqs=3,
            max_slots=num_pages,
            sketches=kinds,
            group=GROUP,
        )
        self.cache = KvCache(shape, torch.float32, CPU, library)
        self.cache.pool.kv.fill_(torch.nan)
        if self.cache.transfers is not None:
            self.cache.transfers.host.kv.fill_(torch.nan)
        self.host_tier = host_tier
        self.pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.runs = torch.randperm(num_runs, generator=torch.Generator().manual_seed(2)).tolist()
        self.rows = [2, 0, 1]

    def admit(
        self, truth: Truth, hot_factor: float, shared: list[int] | None = None, num_drafts: int = 0
    ) -> tuple[Request, RowState]:
        selection = SelectionLayout.from_config(truth.sparsity, BLOCK, hot_factor, num_drafts)
        total = truth.num_prompt + truth.num_decode
        num_pages = selection.num_pages(LAYOUT.num_blocks(total), host_tier=self.host_tier)
        shared = shared or []
        runs = [self.runs.pop() for _ in range(runs_for(LAYOUT.num_blocks(total) - len(shared)))]
        request = Request(
            spec=RequestSpec(request_id=0, prompt_ids=(1,) * truth.num_prompt, sampling=SamplingParams()),
            max_total_tokens=total,
            sparsity=truth.sparsity,
            row=self.rows.pop(),
            pages=[self.pages.pop() for _ in range(num_pages)],
            host_blocks=shared + [run * RUN_BLOCKS + i for run in runs for i in range(RUN_BLOCKS)],
        )
        return request, self.cache.admit(request, selection, truth.sparsity.looks_ahead(on_cuda=False))

    def prefill(self, truth: Truth, state: RowState, chunk: int) -> list[torch.Tensor]:
        """Outputs [T, head, D] per layer; the hot set is brought in afterwards."""
        outputs: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
        for start in range(0, truth.num_prompt, chunk):
            rows = slice(start, min(start + chunk, truth.num_prompt))
            mask = causal_mask(start, rows.stop, torch.float32, CPU)
            for layer in range(LAYERS):
                q, k, v = truth.q[layer, rows], truth.k[layer, rows], truth.v[layer, rows]
                outputs[layer].append(self.cache.prefill(layer, state, start, q, k, v, mask))
        self.begin(truth, state)
        return [torch.cat(parts) for parts in outputs]

    def begin(self, truth: Truth, state: RowState, partial_source: int = -1) -> None:
        self.cache.begin_decode(state, truth.num_prompt, truth.q[:, truth.num_prompt - 1], partial_source)

    def decode(
        self, truths: list[Truth], states: list[RowState], index: int, probe: bool = False
    ) -> list[torch.Tensor]:
        """Token `index` after the prompts of several rows: outputs [row, head, D] per layer.

        With `probe` the token after it stands beside it and looks ahead; its output is left out.
        """
        count = len(truths)
        positions = [truth.num_prompt + index for truth in truths]
        if probe:
            assert count == 1
            truths, states, positions = truths * 2, states * 2, [positions[0], positions[0] + 1]
        batch = self.cache.prepare(states, positions, [False] * count + [True] * (len(truths) - count))
        outputs = []
        for layer in range(LAYERS):
            q, k, v = (
                torch.stack([x(truth)[layer, position] for truth, position in zip(truths, positions, strict=True)])
                for x in (lambda t: t.q, lambda t: t.k, lambda t: t.v)
            )
            outputs.append(self.cache.decode(layer, batch, q, k, v)[:count])
        for state, position in zip(states[:count], positions[:count], strict=True):
            if position % BLOCK == BLOCK - 1:
                self.cache.seal(state, position // BLOCK)
        return outputs

    def check_row(self, truth: Truth, state: RowState, position: int) -> None:
        """What the tables say is on the device, is; what a row attended or pins is there; sealed blocks are at home."""
        cache = self.cache
        if cache.transfers is not None:
            cache.transfers.settle_stores()
            for layer in range(LAYERS):
                cache.transfers.settle(layer)
        if not state.resident:
            cache.residency.check_row(state.row)
        written = position + 1
        for layer in range(LAYERS):
            wanted = truth.attended(layer, position)
            for head in range(HEADS):
                held = torch.arange(state.num_slots)
                if not state.resident:
                    held = cache.residency.block_in_slot[layer, state.row, head, : state.num_slots].long()
                    assert (cache.residency.block_in_slot[layer, state.row, head, state.num_slots :] == -1).all()
                    assert set(wanted[head].tolist()) <= set(held.tolist()), "a block of this step is gone"
                for slot, block in enumerate(held.tolist()):
                    self._check_block(truth, layer, head, block, written, cache.pool.kv[layer, state.pages[slot], head])
                if cache.transfers is not None:
                    for block in range(written // BLOCK):
                        home = cache.transfers.host.kv[layer, head, state.host_blocks[block]]
                        self._check_block(truth, layer, head, block, written, home)

    def _check_block(self, truth: Truth, layer: int, head: int, block: int, written: int, stored: torch.Tensor) -> None:
        start, stop = block * BLOCK, min((block + 1) * BLOCK, written)
        if block >= 0 and stop > start:
            for half, true in enumerate((truth.k, truth.v)):
                assert torch.equal(stored[half, : stop - start], true[layer, start:stop, head]), (layer, head, block)


@pytest.fixture(scope="module", params=["torch", "compiled"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    """Both ways to decode on a CPU: torch operations, and the compiled path where there is a compiler."""
    if request.param == "torch":
        return None
    found = load_library(tmp_path_factory.mktemp("cpu"))
    if found is None:
        pytest.skip("no C++ compiler for the compiled path")
    return found


def run(
    library: ctypes.CDLL | None,
    truth: Truth,
    *,
    hot_factor: float,
    host_tier: bool,
    chunk: int = 400,
    check: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor], RowState]:
    rig = Rig(library, host_tier=host_tier, kinds=(truth.sparsity.sketch,))
    _, state = rig.admit(truth, hot_factor)
    prompt = rig.prefill(truth, state, chunk)
    steps = []
    for index in range(truth.num_decode):
        steps.append(torch.cat(rig.decode([truth], [state], index)))
        if check:
            rig.check_row(truth, state, truth.num_prompt + index)
    return prompt, steps, state


def make_truth(num_prompt: int = 150, num_decode: int = 60, seed: int = 0, **sparsity: object) -> Truth:
    settings = {"budget_tokens": 32, "recent_tokens": 16, "sink_blocks": 1} | sparsity
    return Truth(num_prompt=num_prompt, num_decode=num_decode, seed=seed, sparsity=SparsityConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "truth",
    [
        make_truth(),
        make_truth(160, 20, sketch="1bit", sink_blocks=0, recent_tokens=40),
        make_truth(130, 40, sketch="minmax", sink_blocks=2),
        make_truth(150, 20, tail_estimate=False),
        make_truth(5, 180, sink_blocks=4),
    ],
    ids=["2bit", "1bit", "minmax", "no-tail", "sink-longer-than-prompt"],
)
@torch.inference_mode()
def test_decoding_attends_what_the_slow_truth_selects(library: ctypes.CDLL | None, truth: Truth) -> None:
    """At the tightest hot set: every step's selection just fits."""
    _, steps, state = run(library, truth, hot_factor=1.0, host_tier=True, check=True)
    tail = truth.sparsity.tail_estimate and truth.sparsity.sketch != "minmax"
    for index in range(0, truth.num_decode, 3):
        position = truth.num_prompt + index
        want = [truth.output(layer, position, truth.attended(layer, position), tail) for layer in range(LAYERS)]
        torch.testing.assert_close(steps[index].flatten(0, 1).double(), torch.cat(want), atol=TOLERANCE, rtol=0)
    assert state.stats.missed_blocks > 0, "nothing was evicted: the test shows too little"


@pytest.mark.parametrize(
    "truth", [make_truth(), make_truth(5, 180, sink_blocks=3), make_truth(144, 40)], ids=["long", "short", "aligned"]
)
@torch.inference_mode()
def test_bit_equal_at_any_hot_factor_without_a_host_tier_and_at_any_chunk_size(
    library: ctypes.CDLL | None, truth: Truth
) -> None:
    _, expected, tight = run(library, truth, hot_factor=1.0, host_tier=True)
    misses = [tight.stats.missed_blocks]
    for hot_factor, host_tier in ((1.5, True), (2.0, True), (4.0, True), (1.0, False)):
        _, steps, state = run(library, truth, hot_factor=hot_factor, host_tier=host_tier, chunk=48)
        assert all(torch.equal(a, b) for a, b in zip(steps, expected, strict=True)), (hot_factor, host_tier)
        assert state.stats.selected_blocks == tight.stats.selected_blocks
        misses.append(state.stats.missed_blocks)
    assert misses == sorted(misses, reverse=True) and misses[0] > misses[-1] == 0


@pytest.mark.parametrize("host_tier", [True, False])
@pytest.mark.parametrize("chunk", [16, 48, 400])
@torch.inference_mode()
def test_a_prompt_is_attended_densely_in_any_chunks(host_tier: bool, chunk: int) -> None:
    truth = make_truth(70, 1)
    prompt, _, _ = run(None, truth, hot_factor=1.0, host_tier=host_tier, chunk=chunk)
    for layer in range(LAYERS):
        k, v = (x[layer, : truth.num_prompt].transpose(0, 1) for x in (truth.k, truth.v))
        want = reference.attend_chunk(truth.q[layer, : truth.num_prompt], k, v, 0)
        torch.testing.assert_close(prompt[layer].double(), want, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_rows_in_one_batch_keep_to_themselves(library: ctypes.CDLL | None) -> None:
    """A long request, a short one that is wholly resident, and a fork that shares the long one's prompt."""
    long, short = make_truth(150, 40), make_truth(20, 40, seed=1)
    alone = {id(truth): run(library, truth, hot_factor=1.5, host_tier=True)[1] for truth in (long, short)}
    rig = Rig(library, num_runs=4)
    parent, first = rig.admit(long, 1.5)
    rig.prefill(long, first, 64)
    _, second = rig.admit(short, 1.5)
    rig.prefill(short, second, 64)
    full = long.num_prompt // BLOCK
    for index in range(5):  # the parent is on its way: its partial block holds tokens of its own
        rig.decode([long, short], [first, second], index)
    _, fork = rig.admit(long, 2.0, parent.host_blocks[:full])
    rig.begin(long, fork, parent.host_blocks[full])
    assert second.resident and not first.resident
    for index in range(35):
        forked = torch.cat(rig.decode([long], [fork], index))
        assert torch.equal(forked, alone[id(long)][index])
        outputs = rig.decode([long, short], [first, second], index + 5)
        for row, (truth, state) in enumerate(((long, first), (short, second))):
            assert torch.equal(torch.stack([o[row] for o in outputs]), alone[id(truth)][index + 5])
            rig.check_row(truth, state, truth.num_prompt + index + 5)
        rig.check_row(long, fork, long.num_prompt + index)


@torch.inference_mode()
def test_the_first_hot_set_is_what_is_pinned_and_what_the_prompts_last_row_scores_best(
    library: ctypes.CDLL | None,
) -> None:
    truth = make_truth(166, 60)
    rig = Rig(library)
    _, state = rig.admit(truth, 2.0)
    rig.prefill(truth, state, 400)
    first, last = truth.selection.candidates(166)
    for layer in range(LAYERS):
        scores = truth.sketch.score(layer, torch.arange(first, last), truth.query(layer, 165))
        best = reference.top_blocks(reference.group_scores(scores), state.num_slots - 3) + first
        for head in range(HEADS):
            held = rig.cache.residency.block_in_slot[layer, state.row, head, : state.num_slots].tolist()
            assert sorted(held) == [0, *best[head].tolist(), 9, 10]


@pytest.mark.parametrize("recall", [True, False])
@torch.inference_mode()
def test_a_cold_device_changes_nothing_but_with_recall_off_only_pinned_blocks_are_seen(
    library: ctypes.CDLL | None, recall: bool
) -> None:
    truth = make_truth(150, 4, tail_estimate=False)
    rig = Rig(library)
    _, state = rig.admit(truth, 1.5)
    rig.prefill(truth, state, 400)
    rig.cache.drop_candidates(state, 150)
    rig.cache.residency.check_row(state.row)
    held = rig.cache.residency.block_in_slot[:, state.row]
    assert set(held.flatten().tolist()) == {-1, 0, 8, 9}
    rig.cache.recall = recall
    output = torch.cat(rig.decode([truth], [state], 0))
    pinned = torch.tensor([0, 8, 9]).expand(HEADS, -1)
    blocks = [truth.attended(layer, 150) if recall else pinned for layer in range(LAYERS)]
    want = torch.cat([truth.output(layer, 150, blocks[layer], tail=False) for layer in range(LAYERS)])
    torch.testing.assert_close(output.flatten(0, 1).double(), want, atol=TOLERANCE, rtol=0)
    assert state.stats.missed_blocks == LAYERS * HEADS * 2


@pytest.mark.parametrize("hot_factor", [1.0, 2.0])
@torch.inference_mode()
def test_probe_rows_change_no_bit_and_bring_in_what_the_next_row_selects(
    library: ctypes.CDLL | None, hot_factor: float
) -> None:
    truth = make_truth(150, 60, recent_tokens=32, prefetch="on", fetch_ratio=1.0)
    plain = make_truth(150, 60, recent_tokens=32)
    _, expected, without = run(library, plain, hot_factor=hot_factor, host_tier=True)
    rig = Rig(library)
    _, state = rig.admit(truth, hot_factor, num_drafts=1)
    rig.prefill(truth, state, 400)
    for index in range(truth.num_decode - 1):
        output = torch.cat(rig.decode([truth], [state], index, probe=True))
        assert torch.equal(output, expected[index]), index
        rig.check_row(truth, state, truth.num_prompt + index)
    ordered, used, late = state.stats.prefetched.tolist()
    assert 0 < used + late <= ordered
    assert state.stats.selected_blocks < without.stats.selected_blocks, "probes were counted as rows"
    assert state.stats.missed_blocks < without.stats.missed_blocks / (1.2 if hot_factor == 1 else 3)


@pytest.mark.parametrize("probe", [False, True])
@torch.inference_mode()
def test_in_paper_mode_a_row_attends_what_was_brought_before_it(library: ctypes.CDLL | None, probe: bool) -> None:
    truth = make_truth(150, 40, attention="paper", fetch_ratio=0.5, recent_tokens=32)
    assert truth.sparsity.sketch == "minmax" and truth.selection.sink == 0
    rig = Rig(library, kinds=("minmax",))
    _, state = rig.admit(truth, 1.5, num_drafts=1)
    rig.prefill(truth, state, 400)
    missed, prepare = 0, rig.cache.prepare
    here = torch.empty(0)

    def watch(*how: Any) -> DecodeBatch:
        nonlocal here
        batch = prepare(*how)
        here = rig.cache.residency.block_in_slot[:, state.row].clone()
        return batch

    rig.cache.prepare = watch  # type: ignore[method-assign]
    for index in range(truth.num_decode - 1):
        position = truth.num_prompt + index
        output = torch.cat(rig.decode([truth], [state], index, probe=probe)).view(LAYERS, HEADS, GROUP, DIM)
        for layer in range(LAYERS):
            for head in range(HEADS):
                wanted = truth.attended(layer, position)[head]
                there = wanted[torch.isin(wanted, here[layer, head].long())]
                missed += len(wanted) - len(there)
                want = truth.output(layer, position, there.expand(HEADS, -1), tail=False).view(HEADS, GROUP, DIM)
                torch.testing.assert_close(output[layer, head].double(), want[head], atol=TOLERANCE, rtol=0)
    assert state.stats.missed_blocks == missed > 0
    assert state.stats.prefetched[1] > 0 == state.stats.prefetched[2], "a row of this mode waits for what was ordered"


@torch.inference_mode()
def test_where_the_budget_covers_the_context_no_sketch_is_read(library: ctypes.CDLL | None) -> None:
    """A step then does what a dense one does, to the bit, whatever the sketches hold."""
    outputs = []
    for how in ({"attention": "dense"}, {"budget_tokens": 400}):
        truth = make_truth(150, 20, prefetch="on", **how)
        rig = Rig(library)
        _, state = rig.admit(truth, 1.0)
        rig.prefill(truth, state, 400)
        for tensor in rig.cache.sketches["2bit"].tensors():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        outputs.append([torch.cat(rig.decode([truth], [state], index)) for index in range(20)])
        assert state.stats.selected_blocks == int(state.stats.prefetched.sum()) == 0
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
