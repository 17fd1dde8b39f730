"""What each bias and each weight of the generator does for the statistic that it names.

Every row compares two generators on the model as its own target (no implementation, so that only what is drawn
counts): all biases on, and the one bias switched off, or all rules of one kind but the first taken away (the only one,
where there is one). The statistic is given for 10,000 operations done. A bias whose statistic does not fall without
it has no reason to be there.

Run: python benchmarks/biases.py [--operations 20000] [--seeds 2] [--only NAME]
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvlockstep.fuzz import biases
from kvlockstep.fuzz.biases import Bias
from kvlockstep.fuzz.crew import n_cores
from kvlockstep.fuzz.machine import WEIGHTS, CacheMachine, rule_name
from kvlockstep.fuzz.registry import factory_for
from kvlockstep.fuzz.worker import Order, Worker
from kvlockstep.reference.allowances import ALLOWANCES

EVERY = "all on"


def bias_names() -> list[str]:
    return [name for name, value in vars(biases).items() if isinstance(value, Bias)]


def switch_off(name: str) -> None:
    """Take one bias or weight out of the generator of this process."""
    if name in WEIGHTS:
        rank, n_rules = list(WEIGHTS).index(name), WEIGHTS[name].rules
        for copy in range(min(1, n_rules - 1), n_rules):
            delattr(CacheMachine, rule_name(rank, name, copy))
    elif name != EVERY:
        setattr(biases, name, replace(getattr(biases, name), drawn=()))


def rates(asked: tuple[str, int, int]) -> tuple[str, Counter[str], int]:
    """Run one generator from one seed; count labels and refusals, and the operations done."""
    name, seed, n_operations = asked
    switch_off(name)

    class Short(Worker):
        def run(self, *arguments: object) -> None:
            if self.statistics.done >= n_operations:
                self.interrupt()
            super().run(*arguments)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as out:
        order = Order("reference", None, 3600.0, seed, out, "worker", canary=False)
        worker = Short(order, factory_for("reference"), lambda event, **facts: None)
        worker.fuzz()
    counts = Counter(worker.statistics.labels)
    counts.update({f"{kind}: {outcome}": n for (kind, outcome), n in worker.statistics.outcomes.items()})
    return name, counts, worker.statistics.done


def in_processes(work: Callable, asked: list) -> Iterator:  # type: ignore[type-arg]
    """Do each piece of work in a process of its own, on all cores: a generator changed stays changed."""
    with ProcessPoolExecutor(n_cores(), max_tasks_per_child=1) as pool:
        yield from pool.map(work, asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--operations", type=int, default=20_000, help="done, for each generator and seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", action="append", help="name of a bias or weight; default: all")
    options = parser.parse_args()

    names = options.only or [*WEIGHTS, *bias_names()]
    asked = [(name, seed, options.operations) for name in [EVERY, *names] for seed in range(options.seeds)]
    counts: dict[str, Counter[str]] = {name: Counter() for name in [EVERY, *names]}
    done: Counter[str] = Counter()
    console = Console()
    for name, counted, n in track(in_processes(rates, asked), total=len(asked), console=console):
        counts[name].update(counted)
        done[name] += n

    def rate(name: str, statistic: str) -> float:
        return 10_000 * counts[name][statistic] / done[name]

    table = Table(title=f"for 10,000 operations done, of {done[EVERY]:,}", title_justify="left")
    for column in ("bias or weight", "statistic", "with", "without"):
        table.add_column(column, justify="left" if column in ("bias or weight", "statistic") else "right")
    statistics = chain(
        ((name, WEIGHTS[name].statistic) for name in names if name in WEIGHTS),
        ((name, getattr(biases, name).statistic) for name in names if name not in WEIGHTS),
    )
    for name, statistic in statistics:
        with_it, without = rate(EVERY, statistic), rate(name, statistic)
        if statistic in ALLOWANCES:
            table.add_row(name, statistic, "needs a target that declares it", "", style="dim")
        else:
            style = None if without < with_it else "bold red"
            table.add_row(name, statistic, f"{with_it:.1f}", f"{without:.1f}", style=style)
    console.print(table)


if __name__ == "__main__":
    main()
