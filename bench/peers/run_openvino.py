"""Measure OpenVINO GenAI: ``python bench/peers/run_openvino.py``.

The model is exported from the Hugging Face directory with optimum-intel: weights of 16 bits as they are, of 8
bits, or of 4 bits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from frame import Peer, Setup, main

_FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}


def find_model(setup: Setup) -> Path:
    """Directory of the model in OpenVINO's format."""
    return Path(setup.files["cache"]) / setup.variant


def export(setup: Setup) -> None:
    """Write the model in OpenVINO's format, if it is not there.

    Raises:
        RuntimeError: the exporter failed; the text has its last line.
    """
    target = find_model(setup)
    if (target / "openvino_model.bin").exists() and (target / "openvino_tokenizer.xml").exists():
        return
    weights = ["--weight-format", _FORMATS[setup.variant]]
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    options = ["--model", setup.files["hf"], "--task", "text-generation-with-past", *weights]
    run = subprocess.run([*command, *options, str(target)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"optimum-cli export openvino: {' '.join(run.stderr.split())[-250:]}")


class OpenvinoEngine:
    """A continuous batching pipeline."""

    def __init__(self, setup: Setup) -> None:
        import openvino
        import openvino_genai

        self._genai: Any = openvino_genai
        self._openvino: Any = openvino
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_seqs = max(setup.sizes.batch, 16)
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            find_model(setup), scheduler, "CPU", {"INFERENCE_NUM_THREADS": setup.threads}
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``workloads.Engine``."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        inputs = [self._openvino.Tensor(_to_array(prompt)) for prompt in prompts]
        answers = self._pipeline.generate(inputs, [config] * len(inputs))
        return [list(answer.m_generation_ids[0]) for answer in answers]


def _to_array(prompt: list[int]) -> Any:
    import numpy as np

    return np.array([prompt], dtype=np.int64)


PEER = Peer(
    name="openvino",
    variants=("bf16", "int8", "int4"),
    prepare=export,
    start=OpenvinoEngine,
    packages=("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers"),
    requirements=(
        "torch==2.13.0",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
    ),
    no_server="its server is a program of its own that PyPI does not have",
)

if __name__ == "__main__":
    main(PEER)
