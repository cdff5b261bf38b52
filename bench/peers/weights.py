"""The same weights in the formats the peers read: ``python bench/peers/weights.py --home DIR``.

The default model is quantised. Its values, rounded to bfloat16, go into a Hugging Face directory and into a
GGUF; a second GGUF has them as Q8_0. The file itself stands beside them as it was fetched. Runs in the
environment of astrai-triton.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import torch
from tokenizer_file import write_json, write_tokenizer

from astrai_triton.checkpoint import export_directory, open_checkpoint, resolve
from astrai_triton.checkpoint.gguf_file import GgufFile

READY = "ready.json"
CHECK_TEXT = "The capital of France is Paris. The capital of Germany is"

TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
_OWN_KEYS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def prepare_weights(model: str, directory: Path) -> Path:
    """Write everything that is not there yet.

    Args:
        model: name or path of a GGUF, as ``resolve`` takes it.
        directory: made if missing.

    Returns:
        The JSON file that names the others, written last.
    """
    ready = directory / READY
    if ready.exists():
        return ready
    directory.mkdir(parents=True, exist_ok=True)
    source = resolve(model)
    checkpoint = open_checkpoint(source)
    exported = export_directory(checkpoint, directory / "hf", dtype=torch.bfloat16)
    write_tokenizer(GgufFile(source).metadata, exported)
    files = {"hf": str(exported), "source": str(source)}
    for name in TYPES:
        files[name] = str(directory / f"model-{name}.gguf")
        write_gguf(source, Path(files[name]), name)
    ids = checkpoint.tokenizer.encode(CHECK_TEXT)
    write_json(ready, {"model": checkpoint.name, "files": files, "check_ids": ids})
    return ready


def write_gguf(source: Path, target: Path, name: str) -> None:
    """Copy a GGUF with all matrices as ``bf16`` or ``q8_0`` and everything else as float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(FILE_TYPES[name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for field in reader.fields.values():
        if not field.name.startswith(_OWN_KEYS):
            kind = field.types[0]
            element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        # Rounded first, so that every format starts from the numbers of the Hugging Face directory.
        rounded = torch.from_numpy(values).bfloat16().float().numpy()
        writer.add_tensor(tensor.name, gguf.quants.quantize(rounded, TYPES[name]), raw_dtype=TYPES[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Prepare the default model's weights under ``--home``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--home", type=Path, default=Path(".nox/peers"), help="where environments and weights are"
    )
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a GGUF, by name or path")
    arguments = parser.parse_args()
    sys.stdout.write(f"{prepare_weights(arguments.model, arguments.home / 'weights')}\n")


if __name__ == "__main__":
    main()
