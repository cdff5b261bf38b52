"""The ops of ``astrai_triton.ops``, argument for argument, run by the CUDA C++ kernels.

CPU tensors go to the host build, CUDA tensors to the CUDA build; the first call builds. The attention ops
take one argument more, ``variant``. There is no fp8 here. Each raises ``RuntimeError`` with the reason where
its build is not to be had, and on the host ``CheckError``, a ``RuntimeError``, when a kernel breaks a rule of
CUDA.
"""

from __future__ import annotations

from cuda_ref.ops.decode import attn_decode, attn_paged_decode
from cuda_ref.ops.merge import merge_states
from cuda_ref.ops.prefill import attn_paged_prefill, attn_prefill
from cuda_ref.ops.rotary import rotary_append_, rotary_emb, rotary_qk_

__all__ = [
    "attn_decode",
    "attn_paged_decode",
    "attn_paged_prefill",
    "attn_prefill",
    "merge_states",
    "rotary_append_",
    "rotary_emb",
    "rotary_qk_",
]
