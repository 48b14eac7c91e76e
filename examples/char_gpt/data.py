"""Text that every machine has: the sources of Python's own standard library.

Some files are held out of training. The loss on them shows whether the model has learned to predict
Python code, or has only memorized the training files.
"""

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# A fixed alphabet instead of the characters found, so that the model has the same shape on every
# machine and Python version.
ALPHABET = "\n\t" + "".join(chr(code) for code in range(ord(" "), ord("~") + 1))

INDENT = " " * 4  # becomes one tab, since the context is short

# Installed packages and tests are not part of the library. The last two folders hold tables and
# prose.
SKIPPED_DIRECTORIES = {
    "__pycache__", "dist-packages", "site-packages", "idle_test", "test", "tests",
    "encodings", "pydoc_data",
}  # fmt: skip

MAX_CHARACTERS = 4_000_000  # more than a short run reads
MIN_CHARACTERS = 100_000  # the model would memorize a shorter text
HELD_OUT_EVERY = 10  # one file in ten is held out


class CorpusError(Exception):
    """The machine does not have the training text."""


class Corpus(NamedTuple):
    """Character ids, int64 and one-dimensional, of the two disjoint sets of files."""

    training: Tensor
    held_out: Tensor


def encode(text: str) -> Tensor:
    """Text -> ids (n,), int64, with n characters after each INDENT has become a tab.

    Characters outside ALPHABET become "?".
    """
    id_of_code = torch.full((256,), ALPHABET.index("?"))
    id_of_code[list(ALPHABET.encode("ascii"))] = torch.arange(len(ALPHABET))
    text = text.expandtabs(len(INDENT)).replace(INDENT, "\t")
    codes = torch.frombuffer(bytearray(text, "ascii", errors="replace"), dtype=torch.uint8)
    return id_of_code[codes.long()]


def decode(ids: Tensor) -> str:
    """Ids (n,) -> text, with INDENT for each tab."""
    return "".join(ALPHABET[i] for i in ids.tolist()).replace("\t", INDENT)


def source_files(root: Path) -> list[Path]:
    """All Python files of the library in `root`, in a shuffled order that is always the same."""
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = set(subdirectories) - SKIPPED_DIRECTORIES  # os.walk skips them
        files += [Path(directory, name) for name in names if name.endswith(".py")]

    def path_hash(file: Path) -> str:
        path = file.relative_to(root).as_posix()
        return hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()

    # Sorting by a hash mixes the packages, so that each part of the list is a fair sample.
    return sorted(files, key=path_hash)


def load_corpus(context: int) -> Corpus:
    """Read the library of the running Python, in the same way on every rank.

    Both sets of files must hold at least one window of `context` + 1 characters.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    training: list[str] = []
    held_out: list[str] = []
    size = 0
    for number, file in enumerate(source_files(root)):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # unreadable files are skipped
        (held_out if number % HELD_OUT_EVERY == 0 else training).append(text)
        size += len(text)
        if size >= MAX_CHARACTERS:
            break
    if size < MIN_CHARACTERS:
        raise CorpusError(
            f"found only {size:,} characters of Python source in {root}, need {MIN_CHARACTERS:,}; "
            "is this Python's standard library installed as .py files?"
        )
    corpus = Corpus(encode("".join(training)), encode("".join(held_out)))
    shorter = min(len(corpus.training), len(corpus.held_out))
    if shorter <= context:
        raise CorpusError(
            f"a context of {context:,} characters is too long for {shorter:,} characters of text"
        )
    return corpus


def windows_at(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    """Cut windows of context + 1 characters: tokens (n,), starts (B,) -> (B, context + 1).

    The extra character is the target of the last position.
    """
    return tokens[starts.unsqueeze(1) + torch.arange(context + 1)]


def random_starts(tokens: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Draw the start positions of `count` training windows -> (count,), int64."""
    return torch.randint(len(tokens) - context, (count,), generator=generator)


def even_starts(tokens: Tensor, count: int, context: int) -> Tensor:
    """Spread `count` evaluation windows evenly over the text -> (count,), int64."""
    return torch.linspace(0, len(tokens) - context - 1, count, dtype=torch.float64).long()
