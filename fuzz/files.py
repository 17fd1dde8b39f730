"""Files that are written as a whole or not at all: a reader sees the old one or the new one."""

import os
from pathlib import Path


def replace_file(path: Path, data: str | bytes, *, synced: bool = False) -> None:
    """Put a file in the place of ``path``; text is UTF-8. ``synced``, it is on the disk when this returns.

    Raises OSError, and what is there is then untouched.
    """
    draft = path.with_name(f".{path.name}.new")
    try:
        with draft.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
