"""Corpora: token arrays for training and evaluation, and a fingerprint that identifies them."""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist.data.documents import Document, read_python_sources, read_text_files, split_documents
from minidist.data.synthetic import generate_text
from minidist.errors import UserError


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of a text, split into training and held-out tokens.

    origin: where the text came from, for a person. train, held_out: (tokens,), of one integer dtype, ids below
    `vocab_size`; may be memory-mapped. fingerprint: a hash of both (see `fingerprint`); a run resumes only on a corpus
    with the same one. left_out: a sentence about the files that were not used, "" if there are none.
    """

    name: str
    origin: str
    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    fingerprint: str
    left_out: str = ""

    def describe(self) -> str:
        """Return one line for the log: origin, sizes in tokens, vocabulary, fingerprint."""
        share = self.held_out.size / max(1, self.train.size + self.held_out.size)
        return (
            f"{self.name}: {self.origin}; {self.train.size:,} tokens to train on, {self.held_out.size:,} held out "
            f"({share:.1%}), vocabulary {self.vocab_size}, fingerprint {self.fingerprint[:12]}"
        )


def open_corpus(source: str = "stdlib", path: str | Path | None = None, seq_len: int = 1) -> Corpus:
    """Return the corpus for the options --data.source and --data.path; the path takes precedence.

    Raises UserError for an unknown source, and for a text that is missing, unreadable, not UTF-8, or too short for
    windows of `seq_len` tokens.
    """
    if path is not None:
        return load_text_corpus(path, seq_len)
    if source not in ("stdlib", "synthetic"):
        raise UserError(
            f"--data.source {source} is unknown: it can be stdlib or synthetic. Other text: --data.path PATH."
        )
    return _require_length(
        load_stdlib_corpus() if source == "stdlib" else make_synthetic_corpus(), f"--data.source {source}", seq_len
    )


def load_stdlib_corpus(root: str | Path | None = None) -> Corpus:
    """Return the .py files of this Python's standard library as a corpus, one token per byte (see `split_documents`).

    root: the folder to read instead of the standard library. Python versions and distributions differ in these files,
    and so in the fingerprint.
    """
    documents = read_python_sources(root or sysconfig.get_path("stdlib"))
    where = root or f"Python {platform.python_version()}'s standard library"
    origin = f"{len(documents):,} source files of {where}"
    return _make_corpus("stdlib", origin, documents)


def load_text_corpus(path: str | Path, seq_len: int = 1) -> Corpus:
    """Return a UTF-8 text file, or a folder of them, as a corpus with one token per byte (see `split_documents`).

    Raises UserError if the path is missing, unreadable, empty, not UTF-8, or too short for windows of `seq_len` tokens.
    """
    documents, left_out = read_text_files(path)
    files = "one file" if len(documents) == 1 else f"{len(documents):,} files"
    corpus = _make_corpus(Path(os.path.expanduser(path)).resolve().name, f"{files} from {path}", documents, left_out)
    return _require_length(corpus, f"--data.path {path}", seq_len)


def make_synthetic_corpus(train: int = 1_000_000, held_out: int = 100_000, seed: int = 0) -> Corpus:
    """Return the synthetic corpus: the same bytes on every machine, with a known entropy rate (see `synthetic.py`).

    train, held_out: the numbers of training and held-out tokens. seed: determines the source's probabilities and the
    text.
    """
    splits = generate_text(train, seed, stream=0), generate_text(held_out, seed, stream=1)
    names = [f"synthetic/{seed}"]
    origin = f"an order-2 Markov source over 32 symbols, seed {seed}"
    return Corpus("synthetic", origin, *splits, 256, fingerprint(names, splits[0], names, splits[1]))


def fingerprint(train_names: Sequence[str], train: np.ndarray, held_names: Sequence[str], held_out: np.ndarray) -> str:
    """Return the SHA-256 (hex) of both splits: their tokens, dtypes and document names.

    train, held_out: the tokens of each split. train_names, held_names: the names of the documents in it.
    """
    digest = hashlib.sha256()
    for label, names, tokens in (("train", train_names, train), ("held_out", held_names, held_out)):
        little_endian = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
        header = json.dumps([label, little_endian.dtype.str, tokens.size, list(names)]).encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        digest.update(np.ascontiguousarray(little_endian))
    return digest.hexdigest()


def _make_corpus(name: str, origin: str, documents: list[Document], left_out: str = "") -> Corpus:
    """Return documents as a corpus of bytes, joined by a zero byte, which no text contains.

    name, origin, left_out: as in `Corpus`.
    """
    parts = split_documents(documents)
    train, held_out = (np.frombuffer(b"\0".join(d.content for d in part), np.uint8) for part in parts)
    train_names, held_names = ([d.name for d in part] for part in parts)
    hashed = fingerprint(train_names, train, held_names, held_out)
    return Corpus(name, origin, train, held_out, 256, hashed, left_out)


def _require_length(corpus: Corpus, option: str, seq_len: int) -> Corpus:
    """Return the corpus; raise UserError, naming `option`, if a split has fewer than `seq_len + 1` tokens."""
    shorter = min(corpus.train.size, corpus.held_out.size)
    needed = seq_len + 1
    if shorter >= needed:
        return corpus
    lower = f", or set --data.seq-len to at most {shorter - 1}" if shorter >= 2 else ""
    raise UserError(
        f"{option} is too short: {corpus.train.size + corpus.held_out.size} bytes, {corpus.train.size} to train on and "
        f"{corpus.held_out.size} held out. With --data.seq-len {seq_len} each split needs {needed} bytes (a window and "
        f"the label after it), so about {10 * needed} in all. Give more text with --data.path{lower}."
    )
