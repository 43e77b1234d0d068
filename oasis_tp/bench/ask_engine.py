"""Samples asked of the engine in this process: one dense prefill each, and every mode on a fork of it."""

from collections.abc import Callable, Iterable, Sequence

import torch

from oasis_tp.bench.answers import Answer, Mode
from oasis_tp.bench.samples import Sample
from oasis_tp.config import HotFactor
from oasis_tp.llm import LLM, Completion
from oasis_tp.models.tokenizer import Tokenizer
from oasis_tp.request import SamplingParams


def too_long(tokenizer: Tokenizer, sample: Sample, window: int) -> str | None:
    """What is wrong with the sample's length in a window of that many tokens, if anything."""
    num_prompt = len(tokenizer.encode(sample.prompt))
    total = num_prompt + sample.tokens_to_generate
    if total <= window:
        return None
    return (
        f"the prompt ({num_prompt} tokens) and its answer ({sample.tokens_to_generate}) are {total} tokens, and the "
        f"model's window is {window}"
    )


def ask_engine(
    llm: LLM,
    samples: Iterable[Sample],
    modes: Sequence[Mode],
    pending: torch.Tensor,
    record: Callable[[Answer], None],
    *,
    hot_factor: HotFactor,
    batch: int,
    stop_when_found: bool,
) -> None:
    """Answer every pending sample and mode greedily; `record` gets each answer at once. Every rank makes the same call.

    Args:
        pending: what is to be asked, [samples, modes] bool; rank 0's counts.
        batch: most modes that answer a sample at the same time.
        stop_when_found: end the answer of a sample with one reference where the reference is complete. Its score is
            the same; what would have followed is not generated.
    """
    llm.engine.tp.broadcast(pending)
    for sample, wanted in zip(samples, pending.tolist(), strict=True):
        chosen = [mode for mode, is_wanted in zip(modes, wanted, strict=True) if is_wanted]
        if not chosen:
            continue
        if error := too_long(llm.tokenizer, sample, llm.engine.max_model_len):
            for mode in chosen:
                record(Answer.failed(sample, mode, error))
            continue
        stop = sample.outputs if stop_when_found and sample.metric != "mrcr" and len(sample.outputs) == 1 else ()
        sampling = SamplingParams(max_tokens=sample.tokens_to_generate, temperature=0.0, stop=stop)
        answered: set[Mode] = set()
        try:
            with llm.hold(sample.prompt) as held:
                for start in range(0, len(chosen), batch):
                    part = chosen[start : start + batch]
                    outputs = llm.generate_from_each(held, sampling, [mode.sparsity(hot_factor) for mode in part])
                    for mode, output in zip(part, outputs, strict=True):
                        answered.add(mode)
                        record(_answer(llm, sample, mode, output.outputs[0], is_cut=bool(stop)))
        except ValueError as error:  # what the engine refuses, alike on every rank
            for mode in chosen:
                if mode not in answered:
                    record(Answer.failed(sample, mode, str(error)))


def _answer(llm: LLM, sample: Sample, mode: Mode, completion: Completion, *, is_cut: bool) -> Answer:
    if completion.error is not None:
        return Answer.failed(sample, mode, completion.error)
    # A stop string is cut from the text, not from the tokens.
    text = llm.tokenizer.decode(completion.token_ids) if is_cut else completion.text
    return Answer.to(sample, mode, text, completion.kv)
