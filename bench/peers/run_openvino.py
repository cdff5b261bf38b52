"""Measure OpenVINO GenAI: ``python bench/peers/run_openvino.py``.

The model is exported from the Hugging Face directory with optimum-intel: weights of 16 bits as they are, of 8
bits, or of 4 bits. The library itself chooses to multiply in bfloat16 where the CPU has instructions for it,
and to keep the keys and values of a quantised model in 8 bits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import MEDIA, Environment
from frame import Peer, Setup, main

_FORMATS = {
    "bf16": ("fp16",),
    "int8": ("int8",),
    # The default, 128, does not divide this model's rows.
    "int4": ("int4", "--group-size", "64"),
}

_COMPILED = "compiled"


def remove_media(environment: Environment) -> None:
    """Take out what the exporter cannot import."""
    environment.remove(*MEDIA)


def find_model(setup: Setup) -> Path:
    """Directory of the model in OpenVINO's format."""
    return Path(setup.files["cache"]) / setup.variant


def prepare(setup: Setup) -> None:
    """Export the model, and start once, so that the next start finds it compiled.

    Raises:
        RuntimeError: the exporter failed; the text has its last line.
    """
    target = find_model(setup)
    if not (target / "openvino_model.bin").exists() or not (target / "openvino_tokenizer.xml").exists():
        _export(setup.files["hf"], target, _FORMATS[setup.variant])
    if not (target / _COMPILED).exists():
        OpenvinoEngine(setup).generate([[1, 2, 3]], 2)


def _export(source: str, target: Path, weights: tuple[str, ...]) -> None:
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", source]
    options = ["--task", "text-generation-with-past", "--weight-format", *weights]
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
        # One stream of requests with all threads, as for any pipeline that batches.
        options = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "CACHE_DIR": str(find_model(setup) / _COMPILED),
        }
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            find_model(setup), scheduler, "CPU", options
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
    prepare=prepare,
    start=OpenvinoEngine,
    packages=("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers"),
    requirements=(
        "torch==2.13.0",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
    ),
    step=remove_media,
    no_server="its server is a program of its own that PyPI does not have",
)

if __name__ == "__main__":
    main(PEER)
