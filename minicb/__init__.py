"""minicb: continuous batching of language models, small enough to read."""

from minicb.engine import Engine
from minicb.llm import LLM
from minicb.outputs import CompletionOutput, RequestOutput
from minicb.params import SamplingParams
from minicb.request import Logprob

__all__ = ["LLM", "CompletionOutput", "Engine", "Logprob", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"
