"""Finds the safetensors files of models and adapters, and takes digests of some bytes of every tensor in them.

Imports no vLLM, because a machine without it is checked by the same code.

A file begins with the length of its header (8 bytes, little endian) and the header: JSON that says of each tensor its
data type, its shape, and where its bytes lie behind the header.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

#: For how long files are read. A network file system takes a millisecond or so for each tensor.
READ_S = 10.0
_SAMPLE_BYTES = 4096  # of each tensor, from its middle: one page
_THREADS = 32  # which wait for the file system, most of the time
_BATCH = 64  # tensors that a thread reads of a file that it has opened
_MAX_HEADER_BYTES = 100 * 2**20  # as the format has it


class NotSafetensorsError(ValueError):
    """A file is not in the format of safetensors."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    what: str  # name, data type and shape
    start: int  # in the file
    size: int  # bytes


def model_directory(name: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the directory of a model's or adapter's files: a path, or the local cache of what a hub id names.

    ``cache``: where that is, if not where the hub's library has it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only for models from a hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def weight_files(directory: Path, load_format: str = "auto") -> tuple[Path, ...]:
    """Return a directory's safetensors files: those that its index names, or all. Empty if it has none.

    A directory may have a model's tensors twice: in Mistral's own files, which vLLM takes if it may choose, and others.

    ``load_format``: vLLM's name of how it loads them.
    """
    files = sorted(directory.glob("consolidated*.safetensors")) if load_format in ("auto", "mistral") else []
    index = directory / f"{'consolidated' if files else 'model'}.safetensors.index.json"
    files = files or sorted(directory.glob("*.safetensors"))
    if not (files and index.is_file()):
        return tuple(files)
    named = set(json.loads(index.read_bytes()).get("weight_map", {}).values())
    return tuple(file for file in files if file.name in named) or tuple(files)


def tensors_digest(files: Sequence[Path], read_s: float = READ_S, clock: Callable[[], float] = time.monotonic) -> str:
    """Return 16 hexadecimal digits over some bytes of every tensor, however tensors are spread over the files.

    Returns:
        An empty string if there are no files, if one cannot be read, or if it would take longer than ``read_s``; the
        log says so.
    """
    deadline = clock() + read_s
    late = threading.Event()

    def sample(part: tuple[Path, list[_Tensor]]) -> list[bytes]:
        file, tensors = part
        if clock() > deadline:
            late.set()
        if late.is_set():
            return []
        with file.open("rb") as stream:
            return [_sample(stream.fileno(), tensor) for tensor in tensors]

    try:
        with ThreadPoolExecutor(_THREADS, "pd-tensor-files") as pool:
            tensors = pool.map(_tensors, files)
            parts = [
                (file, held[first : first + _BATCH])
                for file, held in zip(files, tensors, strict=True)
                for first in range(0, len(held), _BATCH)
            ]
            digests = sorted(digest for part in pool.map(sample, parts) for digest in part)
    except (OSError, NotSafetensorsError, RuntimeError) as error:  # RuntimeError: the system has no thread left
        logger.warning("PDConnector: the weights are not compared with those of other engines: %s", error)
        return ""
    if late.is_set():
        logger.warning(
            "PDConnector: the weights are not compared with those of other engines: reading some bytes of each tensor "
            "of %d files took longer than %g s. Keep them on a faster file system, or set model_check to config",
            len(files), read_s,
        )  # fmt: skip
        return ""
    return hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest() if digests else ""


def _tensors(file: Path) -> list[_Tensor]:
    """Return the tensors of a file.

    Raises:
        NotSafetensorsError: it is in another format.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        entries = json.loads(header)
        return [
            _Tensor(f"{name}:{entry['dtype']}:{entry['shape']}", 8 + length + begin, end - begin)
            for name, entry in entries.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise NotSafetensorsError(f"{file} has no header of safetensors: {error!r}") from error


def _sample(descriptor: int, tensor: _Tensor) -> bytes:
    size = min(tensor.size, _SAMPLE_BYTES)
    start = tensor.start + (tensor.size - size) // 2
    digest = hashlib.blake2b(tensor.what.encode(), digest_size=16)
    digest.update(os.pread(descriptor, size, start))
    return digest.digest()
