"""The command that finds the point of no return of a failing trace, by going on from each of its operations."""

import json
from pathlib import Path

import click

from kvlockstep.fuzz.commands.blame import open_trace, trace_options
from kvlockstep.fuzz.commands.out_file import OUT_FILE, keep_apart
from kvlockstep.fuzz.commands.show import check_page
from kvlockstep.fuzz.exits import USAGE, Seconds, Stop, make_console, usable, writing
from kvlockstep.fuzz.files import replace_file

EXIT_CODES = (
    "Exit codes: 0 it was told; 2 wrong usage, unreadable input, or a trace that does not fail; "
    "12 the harness failed or could not write; 130 interrupted."
)


@click.command(epilog=EXIT_CODES)
@trace_options
@click.option("--continuations", default=20, show_default=True, type=click.IntRange(1, 10_000), help="From each point.")
@click.option("--seconds", default=30.0, show_default=True, type=Seconds(), help="At most; then fewer continuations.")
@click.option("--html", default=None, type=OUT_FILE, help="Write it on the page of show.")
@click.option("--json", "out", default=None, type=OUT_FILE, help="Write it as data.")
def why(
    file: Path,
    target: str | None,
    lane: str | None,
    fault: str | None,
    without: frozenset[int],
    continuations: int,
    seconds: float,
    html: Path | None,
    out: Path | None,
) -> None:
    """Tell from which operation of a failing trace on its failure was bound to come.

    After each operation the cache goes on in ways that the fuzzer draws, and the chart shows how many of these
    continuations break the same law. The same trace gives the same chart, unless time runs out, which is said.

    --html writes the page that kvlockstep show makes, with the chart above its slider.
    """
    keep_apart([file], {"--html": html, "--json": out})
    chosen, factory = open_trace(file, target, lane, fault)
    trace = chosen.trace
    from kvlockstep.fuzz.lenient import tell_without
    from kvlockstep.fuzz.why import chances

    config = trace.header.config
    if html is not None:
        check_page(file, trace)
    with usable():
        story = tell_without(config, trace.ops, factory, without)
        if story.violation is None:
            raise Stop(f"{file}: does not fail on {chosen.target}, so there is nothing to explain", USAGE)
        found = chances(
            config,
            trace.ops[: len(story.steps)],
            factory,
            type(story.violation).__name__,
            continuations=continuations,
            seconds=seconds,
            without=without,
        )
    if out is not None:
        data = {"signature": story.signature, "target": story.target, **found.to_json()}
        with writing(f"--json {out}"):
            replace_file(out, json.dumps(data, indent=1) + "\n")
    if html is not None:
        from kvlockstep.fuzz.show.page import page_of

        page = page_of(story, lane=chosen.lane, fault=chosen.fault, why=trace.header.why, chances=found)
        with writing(f"--html {html}"):
            replace_file(html, page)
    console = make_console()
    console.print(f"{story.signature}: of {continuations} continuations from each point, so many end in {found.law}")
    for line in (*found.chart(), *found.sentences()):
        console.print(line, soft_wrap=True)
