"""Files that are written as a whole or not at all: a reader sees the old one or the new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, *, synced: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that stands in the place of ``path`` when the block ends; if that raises, what is there is untouched.

    ``synced``, it is on the disk then. What is there and is no plain file, as a pipe or a terminal, is written to as it
    is. Raises OSError.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # a link goes on to lead there
    draft = draft_of(path)
    try:
        with draft.open("wb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if synced:
        _sync_folder(path.parent)


def draft_of(path: Path) -> Path:
    """Return where this process writes what is to stand at ``path``, until that is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def replace_file(path: Path, data: str | bytes, *, synced: bool = False) -> None:
    """Put a file in the place of ``path``, as `replacing` does; text is UTF-8."""
    with replacing(path, synced=synced) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
