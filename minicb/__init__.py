"""minicb: continuous batching of language models, small enough to read."""

import logging

from minicb.engine import Engine
from minicb.llm import LLM
from minicb.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "Engine", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"

# Say how the cache was sized and how long warming up took, unless the application has its own logging.
_logger = logging.getLogger("minicb")
if not _logger.handlers and not logging.getLogger().handlers:
    _logger.addHandler(logging.StreamHandler())
    _logger.setLevel(logging.INFO)
