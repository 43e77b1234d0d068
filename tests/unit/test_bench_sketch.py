"""The sketch benchmark's arithmetic against a plain one, and its report on a tiny random model."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from oasis_tp.bench import sketch as bench
from oasis_tp.config import SketchKind, SparsityConfig
from oasis_tp.kernels import reference
from oasis_tp.sparse.sketch import Sketch
from tests.tiny import make_tiny

H, G, D = 2, 3, 64
SPARSITY = SparsityConfig(recent_tokens=32, sink_blocks=1)
CHOICES = [("oracle", False), ("minmax", False), ("1bit", False), ("1bit", True), ("2bit", False), ("2bit", True)]


def make_row(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[SketchKind, Sketch]]:
    """q [H, G, D], k and v [H, T, D] of one row, with attention that is neither flat nor one-hot, and its sketches."""
    generator = torch.Generator().manual_seed(num_tokens)
    q = 2 * torch.randn(H, G, D, generator=generator)
    k = torch.randn(H, num_tokens, D, generator=generator)
    v = torch.randn(H, num_tokens, D, generator=generator) + torch.randn(H, 1, D, generator=generator)
    num_blocks = num_tokens // 16
    sketches: dict[SketchKind, Sketch] = {}
    for kind in bench.SKETCHES:
        sketches[kind] = Sketch(
            kind,
            num_layers=1,
            num_blocks=num_blocks,
            num_kv_heads=H,
            head_dim=D,
            block_size=16,
            device=torch.device("cpu"),
        )
        blocks = [x[:, : num_blocks * 16].reshape(H, num_blocks, 16, D).transpose(0, 1) for x in (k, v)]
        sketches[kind].seal(0, torch.arange(num_blocks), *blocks)
    return q, k, v, sketches


@pytest.mark.parametrize("num_tokens", [16 * 20, 16 * 20 + 1, 16 * 21 - 1])
@pytest.mark.parametrize(("name", "with_tail"), CHOICES)
def test_measured_row_is_what_masked_attention_gives(num_tokens: int, name: str, with_tail: bool) -> None:
    q, k, v, sketches = make_row(num_tokens)
    mass, error = bench.measure_row(q, k, v, sketches, SPARSITY, [64])[name, with_tail, 64]
    own_block = (num_tokens - 1) // 16
    candidates = list(range(1, own_block - 2))
    for h in range(H):
        logits = (k[h] @ q[h].T / D**0.5).T  # [G, T]
        if name == "oracle":
            scores = torch.stack([logits[:, 16 * b : 16 * b + 16].logsumexp(-1) for b in candidates], -1)[None]
        else:
            scores = sketches[name].score(0, torch.tensor(candidates), q)[h : h + 1]
        chosen = {candidates[i] for i in reference.top_blocks(reference.group_scores(scores), 4)[0].tolist()}
        tokens = [t for t in range(num_tokens) if t // 16 not in candidates or t // 16 in chosen]
        assert len(tokens) == num_tokens - 16 * (len(candidates) - 4)
        for g in range(G):
            shares = logits[g].softmax(-1)
            dense = shares @ v[h]
            weights, values = logits[g, tokens], v[h, tokens]
            if with_tail:
                rest = torch.tensor([b for b in candidates if b not in chosen])
                tail_logits, tail_values = sketches[name].tail(0, rest, q)
                weights, values = torch.cat((weights, tail_logits[h, g])), torch.cat((values, tail_values[h]))
            output = weights.softmax(-1) @ values
            torch.testing.assert_close(mass[h, g], shares[tokens].sum(), atol=1e-5, rtol=0)
            torch.testing.assert_close(error[h, g], (output - dense).norm() / dense.norm(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [10, 33, 300])
def test_a_budget_for_everything_is_dense(num_tokens: int) -> None:
    for mass, error in bench.measure_row(*make_row(num_tokens), SPARSITY, [512]).values():
        torch.testing.assert_close(mass, torch.ones(H, G), atol=1e-5, rtol=0)
        assert error.max() < 1e-5


def test_bytes_are_those_of_what_the_choice_needs() -> None:
    assert bench.bytes_per_block("2bit", True, 128) == 6 * 128 + 36
    assert bench.bytes_per_block("2bit", False, 128) == 5 * 128 + 34
    assert bench.bytes_per_block("1bit", False, 64) == 3 * 64 + 34
    assert bench.bytes_per_block("minmax", False, 64) == 4 * 64
    assert bench.bytes_per_block("oracle", False, 64) == 0


def test_probe_gives_the_model_dense_attention_and_measures_every_row() -> None:
    q, k, v = torch.randn(200, H * G, D), torch.randn(200, H, D), torch.randn(200, H, D)
    probe = bench.Probe(positions=[150, 199], budgets=[32, 64], sparsity=SPARSITY)
    out = probe.attend(0, q, k, v)
    for head in (0, G, H * G - 1):
        logits = q[:, head] @ k[:, head // G].T / D**0.5
        want = logits.masked_fill(torch.ones(200, 200).triu(1) > 0, -torch.inf).softmax(-1) @ v[:, head // G]
        torch.testing.assert_close(out[:, head], want, atol=1e-4, rtol=1e-4)
    assert len(probe.masses) == 2 * len(CHOICES)
    assert all(len(torch.cat(masses)) == 2 * H * G for masses in probe.masses.values())
    assert probe.masses["oracle", False, 64][1].mean() > probe.masses["oracle", False, 32][1].mean()


def test_every_broken_promise_is_named() -> None:
    good = {("oracle", False): 0.08, ("minmax", False): 0.11, ("1bit", False): 0.1, ("1bit", True): 0.09}
    good |= {("2bit", False): 0.085, ("2bit", True): 0.07}

    def broken(prompt: str, **changed: float) -> list[str]:
        rows = [
            {"prompt": prompt, "budget": 256, "sketch": name, "tail": tail, "err_mean": error}
            for (name, tail), error in good.items()
        ]
        for row in rows:
            row["err_mean"] = changed.get(f"{row['sketch']}_{row['tail']}", row["err_mean"])
        return bench.broken_promises(rows)

    assert broken("prose") == broken("needle") == []
    assert len(broken("prose", minmax_False=0.092)) == 1
    assert broken("needle", minmax_False=0.092) == []
    assert len(broken("needle", minmax_False=0.065)) == 2
    assert len(broken("prose", oracle_False=0.069)) == 2
    assert "2bit 0.09 > 1.12 x oracle 0.08" in broken("needle", **{"2bit_False": 0.09})[0]
    assert "prose at 256" in broken("prose", **{"1bit_True": 0.12})[0]
    assert len(broken("prose", **{"2bit_True": float("nan")})) == 2


class Words:
    """A tokenizer of words: enough to cut prompts."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [hash(word) % 1000 for word in text.split()]


def test_prompts_are_two_of_prose_and_needles_asked_at_the_end() -> None:
    prompts = bench.make_prompts(Words())  # type: ignore[arg-type]
    assert [kind for kind, _, _ in prompts] == ["prose", "prose", "needle", "needle", "needle"]
    text = Words().encode(bench.prose())
    assert prompts[0][1] == text[5_000:8_000]
    assert prompts[1][1] == text[25_000:28_000]
    for kind, ids, positions in prompts:
        assert 2_950 < len(ids) <= 3_000
        assert len(set(positions)) == bench.NUM_ROWS
        assert max(positions) == len(ids) - 1
        assert min(positions) == (2_000 if kind == "prose" else len(ids) - bench.NUM_ROWS)


def test_report_ends_with_one_json_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.randint(300, (400,)).tolist()
    monkeypatch.setattr(bench, "make_prompts", lambda _: [("prose", ids, [380, 399]), ("needle", ids[:390], [389])])
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    model = str(make_tiny("llama", tmp_path))
    args = parser.parse_args(["--model", model, "--budgets", "32", "64", "--check"])
    monkeypatch.setattr(bench, "broken_promises", lambda _: [])
    assert bench.main(args) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {(row["prompt"], row["budget"], row["sketch"], row["tail"]) for row in rows} == {
        (prompt, budget, *choice) for prompt in ("prose", "needle") for budget in (32, 64) for choice in CHOICES
    }
    for row in rows:
        assert 0 < row["mass_p5"] <= row["mass_mean"] <= 1
        assert 0 < row["err_mean"] <= row["err_p95"]
    monkeypatch.setattr(bench, "broken_promises", lambda _: ["the sky is red"])
    assert bench.main(args) == 1
    assert "not held: the sky is red" in capsys.readouterr().out
    args.check = False
    assert bench.main(args) == 0


def test_a_budget_below_one_block_is_refused() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert parser.parse_args([]).budgets == [256, 512]
    with pytest.raises(ValueError, match="--budgets 8: a budget is at least one block, 16 tokens"):
        bench.main(parser.parse_args(["--budgets", "8"]))
