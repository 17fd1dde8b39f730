"""How many systematic mutants of `gpu_impl` the harness finds, and what those are that it does not find.

A seeded sample of the mutants of `fuzz/faults/mutants.py`; each is fuzzed on the torch lane in a process of its own
until a law is broken or its budget is spent, and those that survive once more, six times as long and from another
seed. A mutant counts as found if any law is broken, if no cache can be made of it, if its process dies or hangs, or if
it does not show what a law needs, which is never called clean; one that cannot be imported is left out. Survivors were
judged by hand, see ``mutants_judged.toml``: an *equivalent* one does what the original does in everything that the law
is about, and is left out of the score as well; a *blind spot* is not.

The file of results grows by a line a look. The same command goes on where it was interrupted; with another file it
begins anew.

Run: python benchmarks/mutants.py [--sample 400] [--seed 0] [--seconds 10] [--jobs 2] --out FILE.jsonl
"""

import argparse
import os
import resource
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvlockstep.fuzz.faults.mutant_hunt import Look, Looks, look_for_all, read_verdicts, score_of
from kvlockstep.fuzz.faults.mutants import Mutant, all_mutants, sample

JUDGED = Path(__file__).with_name("mutants_judged.toml")
MEMORY = 6 << 30
"""Bytes of data that a process may hold: a mutant may never stop to take more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=400, help="mutants, of all that there are")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the first look")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one core for each, counted from its first step")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--out", type=Path, required=True, help="results, JSON Lines")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    console = Console(soft_wrap=True, highlight=False)
    mutants = sample(arguments.seed, arguments.sample)
    looks = Looks(arguments.out)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("mutants", total=len(mutants))

        def ended(mutant: Mutant) -> Look | None:
            return looks.last(mutant.id, arguments.seed, arguments.seconds)

        def show() -> None:
            n_ended = sum(ended(mutant) is not None for mutant in mutants)
            progress.update(bar, completed=n_ended)

        show()
        for _ in look_for_all(mutants, arguments.seed, arguments.seconds, arguments.jobs, looks):
            show()
    found = {mutant.id: look for mutant in mutants if (look := ended(mutant)) is not None}
    print_result(console, mutants, found)


def print_result(console: Console, mutants: list[Mutant], found: dict[str, Look]) -> None:
    verdicts = read_verdicts(JUDGED)
    for title, key in (("module", _module), ("operator", _operator)):
        table = Table(title, "mutants", "found", "survived", "equivalent", "left out", box=None)
        for group in sorted({key(mutant) for mutant in mutants}):
            score = score_of((found[mutant.id] for mutant in mutants if key(mutant) == group), verdicts)
            counts = score.n + score.n_left_out, score.n_found, score.n - score.n_found
            table.add_row(group, *map(str, (*counts, score.n_equivalent, score.n_left_out)))
        console.print(table)
        console.print()

    outcomes = [look.outcome for look in found.values()]
    console.print("of these:", ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes))))
    for mutant in mutants:
        look, judged = found[mutant.id], verdicts.get(mutant.id)
        if look.outcome in ("survived", "trouble"):
            verdict = f"{judged.verdict}: {judged.reason}" if judged else f"not judged  {look.text}"
            console.print(f"\n{look.outcome}  {mutant.id}\n  {mutant.target_name}", markup=False)
            console.print(mutant.diff(), markup=False)
            console.print(f"  {verdict}", markup=False)
        elif judged is not None and judged.verdict == "equivalent":
            console.print(f"\njudged equivalent, but found by {look.law or look.text}: {mutant.id}", markup=False)
    for id in sorted(verdicts.keys() - all_mutants().keys()):
        console.print(f"\njudged, but there is no such mutant any more: {id}", markup=False)
    total = score_of(found.values(), verdicts)
    console.print(
        f"\nscore {total.n_found} of {total.n} ({total.of_all:.1%}); without {total.n_equivalent} equivalent ones "
        f"{total.n_found} of {total.n - total.n_equivalent} ({total.without_equivalents:.1%})"
    )


def _module(mutant: Mutant) -> str:
    return mutant.module


def _operator(mutant: Mutant) -> str:
    """Name the operator without what it replaces by what."""
    return mutant.operator.partition("_")[0]


if __name__ == "__main__":
    main()
