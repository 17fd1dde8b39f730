"""The command that holds a snapshot of a live cache to the laws: for whoever has a dump of it and no trace.

One snapshot shows what is, and not how it came about. So the checks that compare two snapshots, or need what a run
remembers, are listed as not checked, and those whose part the file does not have as skipped. Neither counts as passed.

The passes in flight are what the last batches wrote, so law 3 is checked on ``write_sets``, where the file has them.
"""

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import click

from kvlockstep.fuzz.commands.options import accept_unobserved
from kvlockstep.fuzz.exits import BROKEN, CLEAN, UNKNOWN, USAGE, VIOLATION, Stop, complain, make_console
from kvlockstep.fuzz.replay_files import worst
from kvlockstep.fuzz.snapshot_file import STDIN, Dump, SnapshotError, read
from kvlockstep.fuzz.verdict import CHARTER
from kvlockstep.invariants import FULL, Observation, PoolView, Snapshot, Violation
from kvlockstep.invariants.checks import CHECKS, HARNESS_PARTS, Check, hidden_parts, run_every_check

EXIT_CODES = (
    "Exit codes: 0 clean; 1 a violation; 2 wrong usage or unreadable input; 10 unknown, a law of the charter could not "
    "be checked; 12 the harness failed or could not write; 130 interrupted."
)

A_RUN, TWO_SNAPSHOTS = "a run", "two snapshots"

NEEDS: dict[str, str] = {
    "only_the_write_set_changed": A_RUN,
    "reads_return_what_was_computed": A_RUN,
    "match_leaves_a_token_to_compute": A_RUN,
    "match_returns_committed_prefix": A_RUN,
    "peek_finds_a_committed_prefix": A_RUN,
    "requests_in_flight_keep_their_row": A_RUN,
    "requests_in_flight_keep_their_write_slots": A_RUN,
    "requests_in_flight_keep_their_pages": A_RUN,
    "page_generations_never_fall": TWO_SNAPSHOTS,
    "row_generations_never_fall": TWO_SNAPSHOTS,
    "pages_given_back_have_a_new_generation": TWO_SNAPSHOTS,
    "rows_given_back_have_a_new_generation": TWO_SNAPSHOTS,
    "alloc_gives_the_room_there_is": TWO_SNAPSHOTS,
    "evict_frees_what_was_asked": TWO_SNAPSHOTS,
    "evictions_are_reported": TWO_SNAPSHOTS,
    "refusal_changes_nothing": TWO_SNAPSHOTS,
}
"""The checks that one snapshot says nothing to, by name: what they would need."""

_OF_A_STEP = ("was", "after")
"""Facts of a violation that tell what was before and what was done; a snapshot has neither."""

_WRITE_SETS = "write_sets"


@dataclass(slots=True)
class Result:
    """What one snapshot gave."""

    checked: list[Check] = field(default_factory=list)
    skipped: list[tuple[Check, list[str]]] = field(default_factory=list)  # with the parts that the file does not have
    not_checked: list[Check] = field(default_factory=list)
    violations: list[tuple[Check, Violation]] = field(default_factory=list)
    crashed: list[tuple[Check, str]] = field(
        default_factory=list
    )  # where a broken snapshot made a check crash, and how

    def unseen_laws(self) -> list[int]:
        """List the laws of the charter that could not be checked in full."""
        return sorted({check.law for check, _ in [*self.skipped, *self.crashed]}.intersection(CHARTER))

    def code(self, accepted: Collection[int]) -> int:
        """Give the exit code; ``accepted`` are the laws of the charter that need not have been checked."""
        if self.violations:
            return VIOLATION
        if self.crashed:
            return BROKEN
        return CLEAN if set(self.unseen_laws()) <= set(accepted) else UNKNOWN


def check_dump(dump: Dump) -> Result:
    """Hold one snapshot to every check that one snapshot is enough for. Never raises for a broken one."""
    result = Result()
    snapshot, write_sets = dump.snapshot, dump.write_sets
    missing = hidden_parts(snapshot).difference(HARNESS_PARTS) | ({_WRITE_SETS} if write_sets is None else set())
    for check in CHECKS:
        lacks = sorted(missing.intersection([*check.needs, _WRITE_SETS] if check.law == 3 else check.needs))
        if check.name in NEEDS:
            result.not_checked.append(check)
        elif lacks:
            result.skipped.append((check, lacks))
        else:
            result.checked.append(check)
    seen = Observation(0, "pass", list(write_sets or ()), 0, None, _nothing_of(snapshot), snapshot)
    seen.write_sets = None if write_sets is None else list(write_sets.values())
    findings = run_every_check(seen)
    for violation in findings.violations:
        violation.facts = [fact for fact in violation.facts if fact[0] not in _OF_A_STEP]
        result.violations.append((_source_of(violation), violation))
    by_name = {check.name: check for check in result.checked}
    for line in findings.did_not_run:
        name, _, what = line.partition(": ")
        result.crashed.append((by_name[name], what))
        result.checked.remove(by_name[name])
    return result


def _nothing_of(snapshot: Snapshot) -> Snapshot:
    """Return what stands before a snapshot where nothing is known of it: the same pools, and nobody in them."""
    pools = {name: PoolView(view.n_pages, None, None, None, None, None) for name, view in snapshot.pools.items()}
    return Snapshot(snapshot.page_size, snapshot.n_rows, pools, None, None, None, None, None)


def _source_of(violation: Violation) -> Check:
    """Return the check that raised a violation: where a class has several, the one in its traceback."""
    names = set()
    at = violation.__traceback__
    while at is not None:
        names.add(at.tb_frame.f_code.co_name)
        at = at.tb_next
    return next(check for check in CHECKS if check.name in names and type(violation) in check.violations)


@click.command(epilog=EXIT_CODES)
@click.argument("files", metavar="SNAPSHOT.json...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a snapshot, for machines.")
@accept_unobserved
def check(files: tuple[str, ...], as_json: bool, accepted: tuple[str, ...]) -> None:
    """Hold snapshots of live caches to the laws, as far as one snapshot shows them; - is standard input.

    All violations are printed, the laws of the charter first. What one snapshot cannot show is listed as not checked,
    what the file leaves out as skipped.
    """
    if files.count(STDIN) > 1:
        raise Stop(f"{STDIN}: standard input can be read once", USAGE)
    laws = [int(law) for law in accepted]
    sys.exit(worst([_check(file, laws, as_json=as_json, several=len(files) > 1) for file in files]))


def _check(file: str, accepted: list[int], *, as_json: bool, several: bool) -> int:
    """Check one file, print what came of it, and return the exit code."""
    name = "standard input" if file == STDIN else file
    try:
        dump = read(file)
    except SnapshotError as error:
        if as_json:
            click.echo(json.dumps({"file": name, "verdict": "unreadable", "exit_code": USAGE, "reason": str(error)}))
        return complain(str(error), USAGE)
    result = check_dump(dump)
    code = result.code(accepted)
    if as_json:
        click.echo(json.dumps(_report(name, dump, result, code, accepted)))
    else:
        _print(name, dump, result, code, accepted, several=several)
    of = f"{name}: " if several else ""
    if code == UNKNOWN:
        for law in sorted(set(result.unseen_laws()).difference(accepted)):
            parts = sorted({part for check, lacks in result.skipped if check.law == law for part in lacks})
            why = f"{of}law {law} could not be checked, the snapshot has no {', '.join(parts)}"
            complain(f"{why}: --accept-unobserved {law} calls it clean all the same", code)
    if code == BROKEN:
        check, what = result.crashed[0]
        complain(f"{of}{check.name} crashed where no law was found broken, this is its own bug: {what}", code)
    return code


_VERDICTS = {CLEAN: "clean", VIOLATION: "violation", UNKNOWN: "unknown", BROKEN: "broken"}


def _report(name: str, dump: Dump, result: Result, code: int, accepted: Collection[int]) -> dict[str, Any]:
    return {
        "file": name,
        "source": dump.source,
        "verdict": _VERDICTS[code],
        "exit_code": code,
        "violations": [
            {
                "law": check.law,
                "check": check.name,
                "violation": type(violation).__name__,
                "headline": violation.headline,
                "facts": [list(fact) for fact in violation.facts],
            }
            for check, violation in result.violations
        ],
        "checked": [{"law": check.law, "check": check.name} for check in result.checked],
        "skipped": [
            {"law": check.law, "check": check.name, "not_in_the_dump": lacks} for check, lacks in result.skipped
        ],
        "not_checked": [
            {"law": check.law, "check": check.name, "needs": NEEDS[check.name]} for check in result.not_checked
        ],
        "did_not_run": [{"law": check.law, "check": check.name, "raised": what} for check, what in result.crashed],
        "unobserved_charter_laws": result.unseen_laws(),
        "accepted_unobserved": sorted(set(result.unseen_laws()).intersection(accepted)),
    }


def _print(name: str, dump: Dump, result: Result, code: int, accepted: Collection[int], *, several: bool) -> None:
    console = make_console()
    snapshot = dump.snapshot
    n_slots = snapshot.pools[FULL].n_pages * snapshot.page_size
    counts = [("node", snapshot.nodes), ("request", snapshot.requests), ("held row", snapshot.rows)]
    sizes = [f"{n_slots:,} slots in pages of {snapshot.page_size}"]
    sizes += [f"{len(part):,} {what}{'' if len(part) == 1 else 's'}" for what, part in counts if part is not None]
    console.print(f"{name}: {', '.join(sizes)}, dumped from {dump.source or 'nobody knows where'}", soft_wrap=True)
    for _, violation in result.violations:
        console.print(str(violation), style="bold red", soft_wrap=True)
    laws = sorted({check.law for check in result.checked})
    console.print(f"checked: {len(result.checked)} of {len(CHECKS)} checks, of laws {' '.join(map(str, laws))}")
    for check, lacks in result.skipped:
        console.print(f"  skipped: not in the dump ({', '.join(lacks)}): law {check.law}, {check.name}", soft_wrap=True)
    for check, what in result.crashed:
        console.print(f"  did not run on a snapshot so broken ({what}): law {check.law}, {check.name}", soft_wrap=True)
    for needs in (TWO_SNAPSHOTS, A_RUN):
        of_laws: dict[int, list[str]] = {}
        for check in result.not_checked:
            if NEEDS[check.name] == needs:
                of_laws.setdefault(check.law, []).append(check.name)
        for law, names in sorted(of_laws.items()):
            console.print(f"  not checked: needs {needs}: law {law}, {', '.join(names)}", soft_wrap=True)
    of = f"{name}: " if several else ""
    if code == VIOLATION:
        by_law = sorted({check.law for check, _ in result.violations})
        n = len(result.violations)
        checks = "1 check" if n == 1 else f"{n} checks"
        console.print(f"{of}violation: {checks} of laws {' '.join(map(str, by_law))} failed", soft_wrap=True)
    elif code == UNKNOWN:
        console.print(f"{of}unknown: no law was found broken, and too little was seen to call this clean")
    elif code == CLEAN:
        console.print(f"{of}clean: no law that one snapshot shows is broken", soft_wrap=True)
        for law in sorted(set(result.unseen_laws()).intersection(accepted)):
            console.print(f"{of}clean but for law {law}: not observed, accepted by --accept-unobserved {law}")
