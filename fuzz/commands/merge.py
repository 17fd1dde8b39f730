"""The command that makes one campaign folder of the shards that met in a store."""

from pathlib import Path

import click

from kvlockstep.fuzz.exits import USAGE, Stop, complain, make_console, writing

EXIT_CODES = (
    "Exit codes: 0 the campaign was made, whatever was found in it; 2 wrong usage, or there is no store, or nothing in "
    "it; 12 it could not be written; 130 interrupted."
)


@click.command(epilog=EXIT_CODES)
@click.argument("url", metavar="STORE")
@click.option("--out", required=True, metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def merge(url: str, out: Path) -> None:
    """Make one campaign in DIR of all shards that were run with --store STORE, a folder or a URL.

    The shards may still be at work. The same store gives the same DIR; an earlier merge in DIR is replaced.
    """
    from kvlockstep.fuzz.campaign.folder import FolderUnusable
    from kvlockstep.fuzz.campaign.merging import check_out
    from kvlockstep.fuzz.campaign.merging import merge as merge_shards
    from kvlockstep.fuzz.campaign.store import Store, StoreUnusable

    with writing(f"--out {out}"):
        try:
            check_out(out)
            store = Store(url)
            store.check(write=False)
            merged = merge_shards(store, out)
        except (FolderUnusable, StoreUnusable) as error:
            raise Stop(str(error), USAGE) from error
    console = make_console()
    for what in merged.skipped:
        complain(f"left out: {what}", USAGE)
    console.print(
        f"shards: {merged.shards}, causes of failure: {len(merged.progress.causes)}, "
        f"traces of the corpus: {merged.traces}; kvlockstep report {out} shows what was tried",
        soft_wrap=True,
    )
