"""A real model, SmolLM2-135M-Instruct: MINICB_REAL_MODEL names its folder, `tests/fetch_real_model.py` makes it."""

import os

import pytest
import torch
from conftest import greedy
from transformers import AutoModelForCausalLM

from minicb import LLM

FOLDER = os.environ.get("MINICB_REAL_MODEL")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDER, reason="MINICB_REAL_MODEL is not set; tests/fetch_real_model.py fetches the model"),
]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a land far away, there lived",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at",
    "Q: What is the largest planet?\nA:",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(FOLDER, device="cpu", dtype="float32", max_num_seqs=4, max_model_len=512)


def test_greedy_tokens_are_those_of_transformers(llm):
    """More prompts than slots, compiled, float32, wherever the two best logits differ by more than rounding."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    outputs = llm.generate(PROMPTS, greedy(24), use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids + tokens])).logits[0]
        start = len(output.prompt_token_ids) - 1
        for index, token in enumerate(tokens):
            best = logits[start + index].topk(2)
            assert token == best.indices[0] or best.values[0] - best.values[1] < 1e-3
        assert len(tokens) == 24 or output.outputs[0].finish_reason == "stop"


def test_it_answers_and_stops(llm):
    """The chat template, the chat model's EOS, text without special tokens."""
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    [output] = llm.chat(question, greedy(40), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


def test_one_prompt_among_many_reads_the_same(llm):
    [alone] = llm.generate(PROMPTS[2], greedy(16), use_tqdm=False)
    crowd = llm.generate(PROMPTS, greedy(16), use_tqdm=False)
    assert crowd[2].outputs[0].text == alone.outputs[0].text
