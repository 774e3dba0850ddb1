"""minicb: continuous batching of language models, small enough to read."""

from minicb.engine import Engine
from minicb.llm import LLM
from minicb.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "Engine", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"
