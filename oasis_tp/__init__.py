"""oasis_tp: tensor-parallel long-context decoding over a tiered, sparse KV cache."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oasis_tp.llm import LLM
    from oasis_tp.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing a light module of the package stays light."""
    if name == "LLM":
        from oasis_tp.llm import LLM

        return LLM
    if name == "SamplingParams":
        from oasis_tp.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
