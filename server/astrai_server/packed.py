"""Packed weights that ``astrai warmup`` keeps: taken where they are good, passed over where they are not."""

from __future__ import annotations

import time
from collections.abc import Callable

from astrai_server.capacity import MIB
from astrai_server.config import ServerSettings
from astrai_server.device import Placement
from astrai_triton.checkpoint import Checkpoint
from astrai_triton.cpu import CpuDecoder, PackedFileError, PackedKey, PackedStore, describe, is_built

Say = Callable[[str], None]


def describe_packed(
    server: ServerSettings, files: Checkpoint, placement: Placement, say: Say
) -> PackedKey | None:
    """What the packed weights of a model are recognised by; None where its files cannot be read for that.

    Args:
        server: ``quantize`` counts.
        files: of the model.
        placement: of the model, on the CPU.
        say: is told why not.
    """
    try:
        return describe(files.path, files.config, dtype=placement.dtype, quantize=server.quantize)
    except PackedFileError as error:
        say(f"WARNING  packed weights are not used: {error}")
        return None


def take_packed(key: PackedKey, say: Say) -> CpuDecoder | None:
    """The model with the weights that were kept for ``key``; None where there are none that are good.

    Args:
        key: from ``describe_packed``.
        say: is told what was read, or what is wrong with it.
    """
    if not is_built():
        # Kernels of another build of the machine: their weights would not fit either.
        return None
    started = time.perf_counter()
    try:
        model = PackedStore().load(key)
    except PackedFileError as error:
        say(f"WARNING  packed weights are not used: {error}")
        return None
    if model is not None:
        size = f"{len(model.packed_weights()) / MIB:.0f} MiB"
        say(f"weights  {size}, packed, read in {time.perf_counter() - started:.1f} s")
    return model


def keep_packed(key: PackedKey, model: CpuDecoder, say: Say) -> None:
    """Keep the weights of a model for the next start, where there is room.

    Args:
        key: from ``describe_packed``, asked before the model was loaded.
        model: packed.
        say: is told where they are, or why they are not.
    """
    store = PackedStore()
    try:
        path = store.find(key) or store.save(key, model)
    except PackedFileError as error:
        say(f"WARNING  packed weights are not kept: {error}")
    else:
        say(f"kept     {path}")
