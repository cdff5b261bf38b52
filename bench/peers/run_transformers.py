"""Measure Hugging Face transformers: ``python bench/peers/run_transformers.py``."""

from __future__ import annotations

from typing import Any

from frame import Peer, Setup, main
from workloads import Engine

_PAGE = 32


class StaticEngine:
    """``generate``: a batch begins and ends together."""

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup.threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            setup.files["hf"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        # Without an end every answer has all its tokens.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``workloads.Engine``; prompts must be equally long."""
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            answer = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
        return [row.tolist() for row in answer[:, ids.shape[1] :]]


class ContinuousEngine:
    """A continuous batching manager that stays: requests join and leave a running batch."""

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(setup.threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            setup.files["hf"], dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        sizes = setup.sizes
        # Else it sizes its cache by the memory of a GPU.
        num_blocks = max(sizes.batch, 4) * (sizes.context // _PAGE + 2)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE, num_blocks=num_blocks, max_batch_tokens=512, use_cuda_graph=False
            ),
        )
        self._manager.start()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """See ``workloads.Engine``."""
        names = self._manager.add_requests(inputs=prompts, max_new_tokens=max_tokens)
        answers: dict[str, Any] = {}
        while len(answers) < len(names):
            answer = self._manager.get_result(timeout=1)
            if answer is not None and answer.is_finished():
                answers[answer.request_id] = answer
            elif answer is None and not self._manager.is_running():
                raise RuntimeError("continuous batching ended; its log says why")
        for answer in answers.values():
            if answer.error:
                raise RuntimeError(answer.error)
        return [list(answers[name].generated_tokens) for name in names]


def start(setup: Setup) -> Engine:
    """The engine of a variant."""
    return ContinuousEngine(setup) if setup.variant == "bf16-continuous" else StaticEngine(setup)


PEER = Peer(
    name="transformers",
    variants=("bf16", "bf16-continuous"),
    start=start,
    packages=("transformers", "torch"),
    requirements=("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "psutil==7.2.2"),
    no_server="its server has no ignore_eos, so answers would differ in length",
)

if __name__ == "__main__":
    main(PEER)
