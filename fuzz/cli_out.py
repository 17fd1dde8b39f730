"""Where a command will write its file, looked at before its work begins: what takes an hour does not end in a typo."""

from pathlib import Path
from typing import Any

import click


class OutFile(click.Path):
    """The path of a file that can be put where it says: in a folder that is there, and not in a folder's own place."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        given: Any = super().convert(value, param, ctx)
        path = Path(given)
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {path.parent}", param, ctx)
        return path


OUT_FILE = OutFile()
