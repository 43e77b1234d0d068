"""One layer of a decode step through the Triton kernels, over random KV, and the same through the torch path."""

import torch

from oasis_tp.kernels import (
    attention,
    copy_plan,
    gather,
    group_scores,
    merge_states,
    rotate,
    score,
    tail_attention,
    top_blocks,
)
from oasis_tp.kernels.rows import RowFacts, Rows
from oasis_tp.kv.residency import NOTHING, Residency
from oasis_tp.nn.attention import attend_blocks
from oasis_tp.sparse.select import select_blocks
from oasis_tp.sparse.sketch import Sketch
from oasis_tp.sparse.sketch import rotate as rotate_torch

BLOCK = 16
SINK, RECENT = 1, 3
"""Pinned blocks before and after the candidates; the last one is open."""
SEAL_BLOCKS = 1024


class DecodeLayer:
    """Rows of equal context in one layer: host tier, pages at hot factor 2, 2-bit sketch and residency of one rank.

    Two of the same arguments hold the same. `step` and `torch_step` both choose, fetch and attend, and leave the
    residency tables changed. `step` launches without any word from the host and may be captured in a graph: what
    changes between steps (`q`, `tick`, `rows.facts`) is read from tensors.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_rows: int,
        num_heads: int,
        group: int,
        head_dim: int,
        num_candidates: int,
        budget: int,
    ) -> None:
        generator = torch.Generator().manual_seed(num_candidates)
        self.dtype, self.group, self.budget = dtype, group, budget
        self.blocks = SINK + num_candidates + RECENT
        self.last = SINK + num_candidates
        self.position = (self.blocks - 1) * BLOCK + 5
        num_slots, num_homes = min(self.blocks, 2 * budget + SINK + RECENT), num_rows * self.blocks
        self.host = torch.empty(num_heads, num_homes, 2, BLOCK, head_dim, dtype=dtype)
        self.sketch = Sketch(
            "2bit",
            num_layers=1,
            num_blocks=num_homes,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            block_size=BLOCK,
            device=device,
        )
        for start in range(0, num_homes, SEAL_BLOCKS):
            part = self.host[:, start : start + SEAL_BLOCKS]
            part.copy_(torch.randn(part.shape, generator=generator))
            k, v = part.to(device).transpose(0, 1).unbind(2)
            self.sketch.seal(0, torch.arange(start, start + part.shape[1], device=device), k, v)
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        homes = torch.randperm(num_homes, generator=generator).view(num_rows, self.blocks)
        pages = torch.randperm(num_rows * num_slots, generator=generator).view(num_rows, num_slots)
        self.kv = torch.zeros(num_rows * num_slots, num_heads, 2, BLOCK, head_dim, dtype=dtype, device=device)
        self.residency = Residency(
            num_layers=1,
            num_rows=num_rows,
            num_heads=num_heads,
            max_slots=num_slots,
            max_blocks=self.blocks,
            device=device,
        )
        # The first hot set: what is pinned, and the first candidates.
        held = torch.tensor([*range(SINK), *range(self.last, self.blocks), *range(SINK, self.last)][:num_slots])
        for row in range(num_rows):
            self.residency.place(row, held.to(device), torch.arange(num_slots, device=device))
            self.kv[pages[row].to(device)] = self.host[:, homes[row, held]].transpose(0, 1).to(device)
        self.homes, self.pages = homes.to(device), pages.to(device)
        self.host_table, self.block_table = self.homes.int(), self.pages.int()
        # The rotation's signs, read off the rotation itself: a unit vector turns into its sign over sqrt(D).
        self.signs = rotate_torch(torch.eye(head_dim))[:, 0].sign().to(device)
        self.tick = torch.zeros(1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(num_rows, num_heads, 3, dtype=torch.int32, device=device)
        facts = [
            RowFacts(
                table_row=row,
                first=SINK,
                last=self.last,
                budget=budget,
                position=self.position,
                num_slots=num_slots,
                resident=False,
                use_tail=True,
            )
            for row in range(num_rows)
        ]
        self.rows = Rows.of(facts, BLOCK, device)

    def step(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [row, kv_head, group, D] -> output, missed mass [row, kv_head, group], missing blocks [row, head]."""
        rows, tables = self.rows, self.residency
        codes, token_scales, means, mean_scales = (x[0] for x in self.sketch.tensors())
        self.tick += 1
        scores, tail_logits = score.score(
            q, rotate.rotate(q, self.signs), self.host_table, rows, codes, token_scales, means, mean_scales
        )
        chosen = top_blocks.top_blocks(group_scores.group_scores(scores, rows), rows, tail_logits)
        plan = copy_plan.plan_copies(
            chosen,
            rows,
            self.host_table,
            self.block_table,
            copy_plan.Tables(
                tables.block_in_slot[0], tables.slot_of_block[0], tables.last_selected[0], tables.fetched[0]
            ),
            self.tick,
            self.counts,
            BLOCK,
        )
        gather.gather(self.host, self.kv, plan.sources, plan.targets, plan.num_missing)
        splits = attention.num_splits(rows.bounds.max_attended)
        num_states = splits + tail_attention.num_splits(rows.bounds.max_candidates)
        states = torch.empty(*q.shape[:3], num_states, q.shape[3], dtype=torch.float32, device=q.device)
        lse = torch.empty(*q.shape[:3], num_states, dtype=torch.float32, device=q.device)
        attention.sparse_attention(q, self.kv, plan.pages, plan.num_tokens, states, lse)
        tail_attention.tail_attention(
            tail_logits, self.host_table, rows, means, mean_scales, states, lse, splits, q.dtype
        )
        out, _, missed = merge_states.merge_states(states, lse, splits, rows, q.dtype)
        return out, missed, plan.num_missing

    def torch_step(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same in the operations that the engine uses without these kernels, row by row."""
        tables, num_heads = self.residency, q.shape[1]
        tables.tick += 1
        outs, shares = [], []
        counts = torch.zeros(q.shape[:2], dtype=torch.int32)
        sink = torch.arange(SINK, device=q.device).expand(num_heads, -1)
        recent = torch.arange(self.last, self.blocks, device=q.device).expand(num_heads, -1)
        for row in range(q.shape[0]):
            picked = select_blocks(self.sketch, 0, self.homes[row, SINK : self.last], q[row], self.budget)
            blocks = torch.cat((sink, picked.chosen + SINK, recent), 1)
            slots = tables.lookup(0, row, blocks)
            tables.stamp(0, row, torch.where(slots < 0, slots[:, -1:], slots))
            heads, columns = (slots < 0).nonzero(as_tuple=True)
            wanted = blocks[heads, columns]
            num_slots = self.pages.shape[1]
            slots[heads, columns], _ = tables.replace(0, row, num_slots, (SINK, self.last), heads, wanted, NOTHING)
            for head, block, slot in zip(heads, wanted, slots[heads, columns], strict=True):
                self.kv[self.pages[row, slot], head] = self.host[head.cpu(), self.homes[row, block].cpu()].to(q.device)
            counts[row] = torch.bincount(heads.cpu(), minlength=num_heads)
            read = torch.stack([self.kv[self.pages[row, slots[head]], head] for head in range(num_heads)])
            k, v = (read[:, :, i].flatten(1, 2)[:, : blocks.shape[1] * BLOCK - BLOCK + 6] for i in (0, 1))
            out, missed = attend_blocks(
                q[row], k, v, tail_logits=picked.tail_logits, tail_values=picked.tail_values, use_tail=True
            )
            assert missed is not None
            outs.append(out)
            shares.append(missed)
        return torch.stack(outs), torch.stack(shares), counts
