"""The demo's text: which files, in which order, and Megatron's .bin/.idx of their bytes.

The vocabulary is the 256 bytes. Text is UTF-8, in which the byte 0xFF cannot occur, so that one
ends documents.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "END_OF_DOCUMENT",
    "VOCABULARY",
    "Corpus",
    "python_files",
    "read_corpus",
    "write_dataset",
]

VOCABULARY = 256
END_OF_DOCUMENT = 255

# The order of the files belongs to the text, not to a run: every seed trains on the same split.
_ORDER_SEED = 0
_SUFFIXES = (".py", ".txt", ".rst", ".md")
# Installed packages are not Python's own text; tests are many and odd; encodings are tables.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
_VALIDATION_SHARE = 0.05
# Megatron splits by document, so one long file must not be a single document.
_LONGEST_DOCUMENT = 32 * 1024
_FEWEST_DOCUMENTS = 40


@dataclass(frozen=True)
class Corpus:
    """Documents in the order in which they are written: those for training, then those held out."""

    documents: tuple[bytes, ...]
    training_documents: int
    files: int
    source: str

    @property
    def training_bytes(self) -> int:
        """Tokens to train on, ends of documents included."""
        return sum(len(text) + 1 for text in self.documents[: self.training_documents])

    @property
    def validation_bytes(self) -> int:
        """Tokens held out, ends of documents included."""
        return sum(len(text) + 1 for text in self.documents[self.training_documents :])

    @property
    def split(self) -> str:
        """Megatron's ``--split``: shares of the number of documents, so counts are exact."""
        return f"{self.training_documents},{len(self.documents) - self.training_documents},0"

    def describe(self) -> dict[str, object]:
        """What it is, as JSON can hold it."""
        return {
            "source": self.source,
            "files": self.files,
            "documents": len(self.documents),
            "training_bytes": self.training_bytes,
            "validation_bytes": self.validation_bytes,
            "split": self.split,
            "sha256": self.digest,
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens."""
        digest = hashlib.sha256()
        for text in self.documents:
            digest.update(text + bytes([END_OF_DOCUMENT]))
        return digest.hexdigest()


def python_files() -> list[Path]:
    """Sources and documentation of the Python that runs this, sorted by path.

    The docstrings of the standard library are its documentation; some installations carry the
    manual as well, in a folder ``Doc``.
    """
    roots = [Path(sysconfig.get_path("stdlib")), Path(sys.base_prefix) / "Doc"]
    return [path for root in roots for path in _text_files(root)]


def _text_files(root: Path) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [
            name for name in names if name not in _SKIPPED_FOLDERS and not name.startswith(("config-", "."))
        ]
        found += [Path(folder, name) for name in files if name.endswith(_SUFFIXES)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_corpus(files: Sequence[Path] | None, *, limit: int, seq_length: int) -> Corpus:
    """Read the text and divide it; writes nothing.

    Args:
        files: The user's files; None for :func:`python_files`.
        limit: Bytes to read at most.
        seq_length: Both parts must hold at least a few sequences of this length.

    Raises:
        ScaleVecError: A file cannot be read, or there is too little text.
    """
    if files is None:
        source = "documentation and sources of Python " + ".".join(map(str, sys.version_info[:3]))
        paths, required = python_files(), False
    else:
        source = ", ".join(str(path) for path in files)
        paths, required = list(dict.fromkeys(files)), True
    random.Random(_ORDER_SEED).shuffle(paths)
    texts = _read(paths, limit, required)
    size = sum(map(len, texts))
    needed = 200 * (seq_length + 1)
    if size < needed:
        raise ScaleVecError(_too_little(files, size, needed, seq_length, limit))
    longest = min(_LONGEST_DOCUMENT, size // _FEWEST_DOCUMENTS)
    pieces = [(index, piece) for index, text in enumerate(texts) for piece in _cut(text, longest)]
    first = _first_held_out(pieces, int(size * _VALIDATION_SHARE))
    return Corpus(tuple(piece for _, piece in pieces), first, len(texts), source)


def _too_little(files: Sequence[Path] | None, size: int, needed: int, seq: int, limit: int) -> str:
    need = f"training on sequences of {seq} bytes needs at least {needed:,}"
    if limit < needed:
        return f"--text-bytes {limit:,} is too little: {need}; raise it or lower --seq-length."
    if files is None:
        return (
            f"this Python installation holds only {size:,} bytes of readable text, and {need}: "
            "name text of your own with --text FILE."
        )
    what = "is empty" if size == 0 else f"holds {size:,} bytes"
    return f"--text {what}: {need}; give more text" + (" or lower --seq-length." if size else ".")


def _read(paths: Iterable[Path], limit: int, required: bool) -> list[bytes]:
    texts, left = [], limit
    for path in paths:
        if left <= 0:
            break
        try:
            with open(path, "rb") as file:
                raw = file.read(left)
        except OSError as error:
            if required:
                raise ScaleVecError(
                    f"--text {path} cannot be read: {error.strerror or error}; give files of text."
                ) from None
            continue
        # Whatever is not UTF-8 becomes "?", so that no byte of the text means end of document.
        text = raw.decode("utf-8", errors="replace").replace("\ufffd", "?").encode()
        if text.strip():
            texts.append(text)
            left -= len(text)
    return texts


def _cut(text: bytes, longest: int) -> list[bytes]:
    """Cut at ends of lines where there are any."""
    pieces = []
    while len(text) > longest:
        end = text.rfind(b"\n", longest // 2, longest) + 1 or longest
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text] if text else pieces


def _first_held_out(pieces: Sequence[tuple[int, bytes]], wanted: int) -> int:
    """Where the held-out part begins: at the start of a file, unless that file is very long."""
    first, held = len(pieces), 0
    while first > 1 and held < wanted:
        first -= 1
        held += len(pieces[first][1])
    least, start = first, first
    while start > 1 and pieces[start - 1][0] == pieces[start][0] and held < 2 * wanted:
        start -= 1
        held += len(pieces[start][1])
    return start if pieces[start - 1][0] != pieces[start][0] else least


def write_dataset(corpus: Corpus, prefix: Path) -> None:
    """Write ``prefix.bin`` and ``prefix.idx`` with Megatron's own builder.

    One byte per token: ``.bin`` is the text itself with 0xFF after each document.
    """
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import (
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint8)
    for text in corpus.documents:
        tokens = torch.frombuffer(bytearray(text) + bytes([END_OF_DOCUMENT]), dtype=torch.uint8)
        builder.add_item(tokens)
        builder.end_document()
    builder.finalize(get_idx_path(str(prefix)))
