"""The command that draws a trace: the cache before and after each operation, on one HTML page."""

from pathlib import Path

import click

from kvlockstep.fuzz.commands.chosen import Chosen, choose
from kvlockstep.fuzz.commands.out_file import OUT_FILE, keep_apart
from kvlockstep.fuzz.exits import USAGE, Stop, make_console, usable, writing
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.trace import Trace
from kvlockstep.fuzz.trace_bounds import LANES

EXIT_CODES = (
    "Exit codes: 0 the page was written, whatever it shows; 2 wrong usage or unreadable input; "
    "12 the page could not be written; 130 interrupted."
)


@click.command(epilog=EXIT_CODES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    default=None,
    metavar="FILE.html",
    type=OUT_FILE,
    help="Default: FILE with .html for its suffix.",
)
@click.option("--target", default=None, help="Instead of the one the trace was found on.")
@click.option("--lane", default=None, type=click.Choice(LANES), help="Instead of the one the trace was found on.")
@click.option("--fault", default=None, help="Instead of the one in the trace; 'none' plants nothing.")
def show(file: Path, out: Path | None, target: str | None, lane: str | None, fault: str | None) -> None:
    """Draw the trace in FILE on one HTML page: pages, rows, radix tree, model, and what went wrong.

    The page needs no network and no other file. Arrow keys go from operation to operation, Home and End to the first
    and the last one, w to the one that is wrong. The same trace gives the same page.

    A trace that is stored as Died, Hung or OutOfMemory is drawn up to the operation that ended the process.
    """
    chosen = choose(file, target, lane, fault)
    page = out if out is not None else page_path(file)
    keep_apart([file], {"--out": page})
    text, sentence = _drawn(chosen)
    with writing(f"--out {page}"):
        replace_file(page, text)
    console = make_console()
    console.print(str(page), soft_wrap=True)
    console.print(sentence, soft_wrap=True)


def page_path(file: Path) -> Path:
    """Return where the page of a trace goes: beside it.

    >>> str(page_path(Path("a/trace.jsonl"))), str(page_path(Path("b.jsonl.gz")))
    ('a/trace.html', 'b.html')
    """
    return file.with_name(file.name.removesuffix(".gz").removesuffix(".jsonl") + ".html")


def check_page(file: Path, trace: Trace) -> None:
    """Refuse a trace that no page can hold, before it is run. Raises Stop."""
    from kvlockstep.fuzz.show.page import TooLarge, check_size

    try:
        check_size(trace.header.config, len(trace.ops))
    except TooLarge as error:
        raise Stop(f"{file}: {error}", USAGE) from error


def _drawn(chosen: Chosen) -> tuple[str, str]:
    """Run the trace, and return its page and what went wrong in one sentence."""
    from kvlockstep.fuzz.describe import printable
    from kvlockstep.fuzz.show.page import ended_in, page_of, verdict_of
    from kvlockstep.fuzz.story import tell
    from kvlockstep.fuzz.ward import KINDS, is_of_ward

    header, ops = chosen.trace.header, chosen.trace.ops
    check_page(chosen.file, chosen.trace)
    ends = is_of_ward(header.signature) and bool(ops)
    factory = chosen.factory()
    with usable():
        story = tell(header.config, ops[:-1] if ends else ops, factory)
    if ends and story.violation is None:
        signature = str(header.signature)
        kind = next(kind for kind in KINDS if kind.__name__ == signature.partition(".")[0])
        story = ended_in(story, ops[-1], kind(header.why or "the process ended"), signature)
    verdict = verdict_of(story)
    sentence = "no violation" if verdict is None else f"{verdict.name}: {verdict.sentence}"
    return page_of(story, lane=chosen.lane, fault=chosen.fault, why=header.why), printable(sentence)
