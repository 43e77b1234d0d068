"""A rank that plans something else is found out at once where --check-ranks asks for it, before any collective hangs."""

from pathlib import Path

from oasis_tp.llm import LLM
from oasis_tp.request import SamplingParams
from tests.dist.ranks import run_on_ranks
from tests.tiny import make_tiny


def diverge(rank: int, model: str, out: Path) -> None:
    llm = LLM(model, comm="gloo", check_ranks=True, max_num_seqs=2)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    assert len(llm.generate([5, 6, 7], sampling)[0].outputs[0].token_ids) == 4
    if rank == 1:
        llm.engine.scheduler.runs.take(1)  # a fault of ours: this rank hands out other host blocks than the others
    try:
        llm.generate([5, 6, 7], sampling)
    except RuntimeError as error:
        (out / str(rank)).write_text(str(error))


def test_ranks_that_disagree_stop(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "model"))
    run_on_ranks(2, tmp_path / "store", diverge, model, tmp_path)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text().startswith("ranks disagree on the plan of step")
