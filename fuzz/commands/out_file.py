"""Where a command will write its file, looked at before its work begins: what takes an hour does not end in a typo."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from kvlockstep.fuzz.exits import USAGE, Stop
from kvlockstep.fuzz.files import draft_of


class OutFile(click.Path):
    """The path of a file that can be put where it says: in a folder that is there, and not in a folder's own place."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("", b""):
            self.fail("an empty name", param, ctx)
        given: Any = super().convert(value, param, ctx)
        path = Path(given)
        try:
            folder = path.resolve().parent if path.is_symlink() else path.parent
            if not folder.is_dir():
                self.fail(f"{path}: there is no folder {folder}: make it first", param, ctx)
            draft_of(path).exists()  # as long as any name that will be written
        except (OSError, RuntimeError) as error:  # the latter for links that lead in a circle
            self.fail(f"{path}: {getattr(error, 'strerror', None) or error}: name another file", param, ctx)
        return path


OUT_FILE = OutFile()


def keep_apart(inputs: Iterable[Path], outputs: Mapping[str, Path | None]) -> None:
    """Refuse an output that is an input or another output. Raises Stop."""
    taken = {path.resolve(): "is what is read" for path in inputs}
    for option, path in outputs.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        where = next((one for one in taken if one.exists() and path.exists() and one.samefile(path)), path.resolve())
        if where in taken:
            raise Stop(f"{option} {path}: {taken[where]}, name another file", USAGE)
        taken[where] = f"is what {option} writes"
