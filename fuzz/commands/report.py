"""The command that makes one HTML page of what a campaign left on disk, and says what to do about it first."""

from pathlib import Path

import click

from kvlockstep.fuzz.commands.out_file import OUT_FILE
from kvlockstep.fuzz.exits import USAGE, Stop, make_console, writing
from kvlockstep.fuzz.files import replace_file

EXIT_CODES = (
    "Exit codes: 0 the page was written, whatever it says; 2 wrong usage, or the folder is no campaign; "
    "12 the page could not be written; 130 interrupted."
)


@click.command(epilog=EXIT_CODES)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--out",
    default=None,
    metavar="FILE.html",
    type=OUT_FILE,
    help="Default: report.html in DIR.",
)
def report(folder: Path, out: Path | None) -> None:
    """Write one HTML page on the campaign in DIR, and print what is to be done about it first.

    The campaign may still be at work. The page holds all that it needs, but for the files of failures, to which it
    links; the same folder gives the same page.
    """
    from kvlockstep.fuzz.campaign.folder import FolderUnusable
    from kvlockstep.fuzz.campaign.page import page_of, parties_line
    from kvlockstep.fuzz.campaign.record import read_record

    page = out if out is not None else folder / "report.html"
    try:
        record = read_record(folder)
    except FolderUnusable as error:
        raise Stop(str(error), USAGE) from error
    except OSError as error:
        raise Stop(f"{error.filename or folder}: {error.strerror or error}", USAGE) from error
    text, advice = page_of(record, page)
    with writing(f"--out {page}"):
        replace_file(page, text)
    console = make_console()
    for line in (str(page), parties_line(record.parties), advice.verdict, f"to do first: {advice.sentence}"):
        console.print(line, soft_wrap=True)
    if advice.line is not None:
        console.print(f"  {advice.line}", soft_wrap=True)
