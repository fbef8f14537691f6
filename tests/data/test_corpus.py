"""Corpora: the same files in the same split on every machine, and a clear refusal of what is not text."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from minidist.data import corpus, documents
from minidist.data.documents import Document
from minidist.errors import UserError

SYNTHETIC = "ff567d49d822e5997027721bb47e8d575182fc561ea338f5fbbce73f235345b6"


@pytest.fixture
def tree(tmp_path):
    """200 small files, so that the split is by file, and things that are not part of a corpus."""
    root = tmp_path / "tree"
    for index in range(200):
        path = root / f"part{index % 3}" / f"file{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {index}\n" * (10 + index % 7))
    for folder in ("site-packages", "dist-packages", "__pycache__"):
        (root / folder).mkdir()
        (root / folder / "installed.py").write_text("raise SystemExit\n")
    (root / "part0" / "notes.txt").write_text("not a source\n")
    (root / "part0" / "loop").symlink_to(root, target_is_directory=True)
    (root / "part0" / "broken.py").symlink_to(root / "nowhere.py")
    return root


@pytest.fixture(scope="module")
def stdlib():
    return corpus.load_stdlib_corpus()


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """A named pipe: reading it would wait for a writer for ever, so the test forbids it."""
    open_file = Path.open

    def open_no_pipe(path, mode="r", *rest):
        assert not path.is_fifo(), "a pipe was read"
        return open_file(path, mode, *rest)

    monkeypatch.setattr(Path, "open", open_no_pipe)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_the_standard_library_is_a_corpus_of_its_python_files(stdlib):
    assert stdlib.train.dtype == stdlib.held_out.dtype == np.uint8
    assert stdlib.vocab_size == 256
    assert 0.04 < stdlib.held_out.size / (stdlib.train.size + stdlib.held_out.size) < 0.10
    everything = np.concatenate([stdlib.train, [0], stdlib.held_out]).astype(np.uint8).tobytes()
    assert Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes() in everything
    assert b"raise SystemExit" in everything


def test_the_standard_library_is_the_same_twice(stdlib):
    assert corpus.load_stdlib_corpus().fingerprint == stdlib.fingerprint


def test_only_python_sources_count_without_installed_packages_caches_and_link_loops(tree):
    found = documents.read_python_sources(tree)
    assert len(found) == 200
    assert [d.name for d in found] == sorted(d.name for d in found)
    assert found[0].name == "part0/file0.py"


def test_documents_are_whole_and_separated_by_one_zero_byte(tree):
    loaded = corpus.load_stdlib_corpus(tree)
    train, held_out = (split.tobytes().split(b"\0") for split in (loaded.train, loaded.held_out))
    assert sorted(train + held_out) == sorted(path.read_bytes() for path in tree.glob("part*/*.py") if path.is_file())
    assert held_out and not set(train) & set(held_out)


def test_the_split_by_file_depends_on_names_only(tree):
    train, held_out = documents.split_documents(documents.read_python_sources(tree))
    assert 0.05 <= sum(len(d.content) for d in held_out) / sum(len(d.content) for d in train + held_out) <= 0.06
    same_size = [Document(d.name, bytes(reversed(d.content))) for d in documents.read_python_sources(tree)]
    assert [d.name for d in documents.split_documents(same_size)[1]] == [d.name for d in held_out]


def test_a_giant_file_is_never_held_out():
    small = [Document(f"{index:03}", b"x" * 100) for index in range(200)]
    for index in range(30):
        giant = Document(f"giant{index}", b"y" * 1000)
        assert giant in documents.split_documents([*small, giant])[0]


def test_one_file_is_split_by_position(tmp_path):
    content = bytes(range(32, 127)) * 10
    loaded = corpus.load_text_corpus(write(tmp_path / "one.txt", content))
    assert loaded.train.tobytes() == content[:855] and loaded.held_out.tobytes() == content[855:]
    assert loaded.name == "one.txt"


def test_a_few_files_are_each_split_by_position(tmp_path):
    write(tmp_path / "a.txt", b"a" * 100)
    write(tmp_path / "b.txt", b"b" * 1000)
    loaded = corpus.load_text_corpus(tmp_path)
    assert loaded.train.tobytes() == b"a" * 90 + b"\0" + b"b" * 900
    assert loaded.held_out.tobytes() == b"a" * 10 + b"\0" + b"b" * 100


def test_a_folder_gives_every_text_file_and_nothing_else(tmp_path, pipe):
    write(tmp_path / "plain", "Grüße, 世界. ".encode() * 9)
    write(tmp_path / "binary.bin", b"abc\0def" * 9)
    write(tmp_path / "latin1.txt", "Grüße".encode("latin-1") * 9)
    write(tmp_path / "empty.txt", b"")
    (tmp_path / ".git").mkdir()
    write(tmp_path / ".git" / "config", b"[core]" * 9)
    read, left_out = documents.read_text_files(tmp_path)
    assert [d.name for d in read] == ["plain"]
    assert left_out == (
        f"--data.path {tmp_path}: 2 of 4 files are left out: 2 not UTF-8 text, first binary.bin (byte 3 is 0, as in a "
        "binary file)"
    )
    assert corpus.load_text_corpus(tmp_path).left_out == left_out


def test_a_moved_folder_keeps_its_fingerprint(tree, tmp_path):
    before = corpus.load_text_corpus(tree).fingerprint
    assert corpus.load_text_corpus(tree.rename(tmp_path / "moved")).fingerprint == before


def test_the_fingerprint_sees_content_names_split_and_dtype(tmp_path):
    train, held_out = np.arange(90, dtype=np.uint8), np.arange(10, dtype=np.uint8)
    prints = [
        corpus.fingerprint(["a"], train, ["b"], held_out),
        corpus.fingerprint(["a"], train[::-1], ["b"], held_out),
        corpus.fingerprint(["c"], train, ["b"], held_out),
        corpus.fingerprint(["a"], train, ["c"], held_out),
        corpus.fingerprint(["b"], held_out, ["a"], train),
        corpus.fingerprint(["a"], train.astype(np.uint16), ["b"], held_out),
        corpus.fingerprint(["a"], np.append(train, held_out[:1]), ["b"], held_out[1:]),
    ]
    assert len(set(prints)) == len(prints)
    assert all(len(p) == 64 for p in prints)


def test_the_fingerprint_does_not_depend_on_byte_order_or_memory_layout(tmp_path):
    tokens = np.arange(90, dtype="<u2")
    stored = np.memmap(write(tmp_path / "tokens.bin", tokens.tobytes()), dtype="<u2", mode="r")
    expected = corpus.fingerprint([], tokens, [], tokens[:9])
    for same in (tokens.astype(">u2"), np.repeat(tokens, 2)[::2], stored):
        assert corpus.fingerprint([], same, [], tokens[:9]) == expected


def test_the_synthetic_corpus_is_pinned():
    loaded = corpus.open_corpus("synthetic")
    assert loaded.fingerprint == SYNTHETIC
    assert (loaded.train.size, loaded.held_out.size) == (1_000_000, 100_000)
    assert loaded.train[:50].tobytes() != loaded.held_out[:50].tobytes()


def test_describe_names_sizes_vocabulary_and_fingerprint(tree):
    loaded = corpus.load_text_corpus(tree)
    line = loaded.describe()
    for fact in ("204 files", f"{loaded.train.size:,}", f"{loaded.held_out.size:,}", "256", loaded.fingerprint[:12]):
        assert fact in line
    assert "\n" not in line


def test_a_path_wins_over_the_source(tree):
    assert corpus.open_corpus("stdlib", tree).name == "tree"


def refused(*words: str):
    """The message of a UserError holds all `words`."""
    return pytest.raises(UserError, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


def test_a_missing_path_is_refused(tmp_path):
    with refused("--data.path", "nowhere.txt", "does not exist"):
        corpus.load_text_corpus(tmp_path / "nowhere.txt")
    with refused("does not exist"):
        corpus.load_text_corpus(tmp_path / ("long" * 1000))  # the system's own error is another one here
    with refused("~nobody-of-that-name", "does not exist"):
        corpus.load_text_corpus("~nobody-of-that-name/text")
    with refused("--data.path is given but empty"):
        corpus.open_corpus("stdlib", "")


def test_an_empty_file_and_an_empty_folder_are_refused(tmp_path):
    with refused("0 bytes"):
        corpus.load_text_corpus(write(tmp_path / "empty.txt", b""))
    with refused("no text", "of 1 file", "1 empty"):
        corpus.load_text_corpus(tmp_path)


def test_a_binary_file_is_refused_with_the_place(tmp_path):
    with refused("9 bytes", "not UTF-8", "byte 5 is 0xff"):
        corpus.load_text_corpus(write(tmp_path / "binary", b"abcde\xff123"))
    with refused("byte 3 is 0"):
        corpus.load_text_corpus(write(tmp_path / "binary", b"abc\x00def"))


def test_a_file_of_terabytes_is_refused_before_it_is_read(tmp_path):
    for name, begin in (("zeros", b""), ("latin1", b"caf\xe9"), ("long.txt", "über ".encode() * 2**18)):
        with write(tmp_path / name, begin).open("r+b") as file:
            file.truncate(2**42)  # sparse: it has no blocks on disk
    with refused(f"{2**42} bytes. is not UTF-8", "byte 0 is 0"):
        corpus.load_text_corpus(tmp_path / "zeros")
    with refused(f"{2**42} bytes. is not UTF-8", "byte 4 is 0"):
        corpus.load_text_corpus(tmp_path / "latin1")
    with refused("long.txt, the text has at least 4,398,046,511,104 bytes", "a quarter of this machine's memory"):
        corpus.load_text_corpus(tmp_path / "long.txt")
    (tmp_path / "long.txt").unlink()
    with refused("of 2 files", "2 not UTF-8 text"):  # in a folder, each is skipped after its first block
        corpus.load_text_corpus(tmp_path)


def test_a_character_across_the_first_block_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 3)
    content = "xüüüüü".encode() * 40  # the third byte begins nothing
    found = corpus.load_text_corpus(write(tmp_path / "text", content))
    assert found.train.tobytes() + found.held_out.tobytes() == content
    with refused(f"{len(content) + 1} bytes", f"byte {len(content)} is 0xc3"):
        corpus.load_text_corpus(write(tmp_path / "text", content + b"\xc3"))


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    def forbidden(path, *mode):
        raise PermissionError(13, "Permission denied")

    write(tmp_path / "secret.txt", b"text")
    monkeypatch.setattr(Path, "open", forbidden)  # root may read anything, so no mode bits here
    with refused("secret.txt", "Permission denied"):
        corpus.load_text_corpus(tmp_path / "secret.txt")
    with refused("1 unreadable"):
        corpus.load_text_corpus(tmp_path)


def test_unreadable_files_of_a_folder_are_left_out_with_a_word(tmp_path, monkeypatch):
    real = Path.open

    def forbidden(path, *mode):
        if "secret" in path.name:
            raise PermissionError(13, "Permission denied")
        return real(path, *mode)

    for name in ("secret-b", "secret-a", "text"):
        write(tmp_path / name, b"text" * 9)
    monkeypatch.setattr(Path, "open", forbidden)
    left_out = corpus.load_text_corpus(tmp_path).left_out
    assert left_out.endswith(": 2 of 3 files are left out: 2 unreadable, first secret-a (Permission denied)")


def test_a_pipe_is_refused(pipe):
    with refused("neither a file nor a folder"):
        corpus.load_text_corpus(pipe)


def test_a_short_text_is_refused_with_all_numbers_and_the_option_to_change(tmp_path):
    path = write(tmp_path / "short.txt", b"x" * 500)
    with refused("500 bytes", "450 to train", "50 held out", "--data.seq-len 128", "129 bytes", "1290", "at most 49"):
        corpus.open_corpus(path=path, seq_len=128)
    assert corpus.open_corpus(path=path, seq_len=49).held_out.size == 50
    with refused("19 bytes", "1 held out", "2 bytes"):
        corpus.load_text_corpus(write(path, b"x" * 19))


def test_a_source_that_is_too_short_or_unknown_is_refused(tmp_path):
    with refused("--data.source synthetic", "100000 held out", "at most 99999"):
        corpus.open_corpus("synthetic", seq_len=100_000)
    with refused("wikipedia", "stdlib", "synthetic", "--data.path"):
        corpus.open_corpus("wikipedia")
    with refused("no Python source", "--data.path"):
        corpus.load_stdlib_corpus(tmp_path)
