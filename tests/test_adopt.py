"""The guide for adopters and the example it is made of: what it shows is what stands there, and what is printed."""

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.lockstep import Lockstep, TargetRaised
from kvlockstep.fuzz.machine import PAGE_SIZES, run_cases
from kvlockstep.fuzz.registry import BUILT_IN, TargetUnusable, factory_for
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.targets.base import OutOfPages, OutOfRows
from kvlockstep.fuzz.targets.wrong import WRONG
from kvlockstep.fuzz.verdict import verdict_of
from kvlockstep.invariants import FULL, Violation
from kvlockstep.invariants.agreement import ChoiceIllegal, OutcomeDiffers, RequestsDiffer, TreeDiffers
from kvlockstep.invariants.content import ContentWrong, MatchedUncommitted, MatchTooLong
from kvlockstep.invariants.in_flight import InFlightDisturbed
from kvlockstep.invariants.locks import LockCountWrong
from kvlockstep.invariants.ownership import PageLeaked, PageOwnedTwice, RowLeaked
from kvlockstep.invariants.paths import RowOffCanonicalPath
from kvlockstep.invariants.promises import EvictReportWrong, RefusalChangedState
from kvlockstep.invariants.sizes import SizesDoNotRecount
from kvlockstep.invariants.tree_shape import LinksDisagree, NamespaceMixed
from kvlockstep.invariants.writes import PaddingOwned, WriteSlotIllegal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples lie in the checkout, not in the package

from examples.hash_blocks import HashBlockCache
from examples.hash_blocks_target import HashBlockTarget
from examples.hash_blocks_wrong import (
    DeclaresNothing,
    HashesTokensAlone,
    KeepsDuplicateInRow,
    LeaksTail,
    ReusesHeadFirst,
)
from examples.shown_target import ShownTarget
from examples.smallest_target import SmallestTarget

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "adopt.md").read_text()
EXAMPLES = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
SECONDS = 4  # of each run of the guide, at most; all that it shows is reached in the first


# What the guide shows of files


def blocks(language, text=GUIDE):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().split("\n")[0][:60])
def test_code_in_the_guide_stands_in_an_example(code):
    assert [name for name, text in EXAMPLES.items() if code in text], "no example has these lines"


def test_smallest_target_is_shown_whole():
    assert EXAMPLES["smallest_target.py"] in blocks("python")


def test_paths_and_modules_that_the_guide_names_exist():
    links = re.findall(r"\]\(([^)]+)\)", GUIDE)
    modules = {f"kvlockstep.fuzz.{name}" for name in re.findall(r"`kvlockstep\.fuzz\.([\w.]+)`", GUIDE)}

    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    for module in modules:
        assert (ROOT / f"{module.removeprefix('kvlockstep.').replace('.', '/')}.py").exists()
    assert len(links) > 4
    assert len(modules) > 2


def test_installed_packages_are_all_that_a_target_of_ones_own_needs():
    (install,) = [block for block in blocks("sh") if "pip install" in block]
    named = re.search(r"pip install (.*)", install)[1].split()
    code = (
        "import sys\n"
        "import kvlockstep.fuzz.cli, kvlockstep.fuzz.worker, kvlockstep.fuzz.replay, kvlockstep.fuzz.minimize\n"
        "import examples.hash_blocks_wrong\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    # Hypothesis loads whatever names itself its plugin, needed or not
    env = {**os.environ, "HYPOTHESIS_NO_PLUGINS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    owners = packages_distributions()
    imported = {owner for module in done.stdout.split() for owner in owners.get(module, ())}

    assert set(named) <= imported
    # Hypothesis takes typing_extensions where it finds them, and goes without where it does not
    assert imported - with_what_they_need(named) <= {"kvlockstep", "setuptools", "typing_extensions"}


def with_what_they_need(names):
    """Give packages and what they require, and so on, by their names in a registry."""
    found, todo = set(), [*names]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            needed = [line for line in requires(name) or () if "extra ==" not in line]
            todo += [re.match(r"[\w.-]+", line)[0] for line in needed if is_installed(line)]
    return found


def is_installed(requirement):
    try:
        requires(re.match(r"[\w.-]+", requirement)[0])
    except PackageNotFoundError:
        return False
    return True


# What the guide shows of runs


def runs():
    """Console blocks that build on each other: those of a section, or of the last three."""
    parts = re.split(r"^## (\d+)\..*\n", GUIDE, flags=re.MULTILINE)[1:]
    found = {}
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        for block in blocks("console", text):
            alone = "targets.wrong" in block or int(number) < 9
            found.setdefault(number if alone else "9-11", []).append(block)
    return found


def commands(block):
    """Split a console block into commands, each with the lines that it shows."""
    found = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif line.startswith("> "):
            found[-1][0].append(line[2:])
        else:
            found[-1][1].append(line)
    return [("\n".join(command), shown) for command, shown in found]


def plain(line):
    """Leave out how wide, how many and how long: figures differ from run to run, names and laws do not."""
    return re.sub(r"\d[\d,.]*", "#", " ".join(line.split()))


def missing_line(shown, printed):
    """Give the first line of the guide that was not printed in its place; None where all were."""
    lines, at, skips = [plain(line) for line in printed.splitlines() if line.strip()], 0, False
    for line in shown:
        wanted = plain(line)
        if wanted == "...":
            skips = True
            continue
        begins = wanted.removesuffix("...").strip() if wanted.endswith("...") else None
        hits = [i for i in range(at, len(lines)) if lines[i] == wanted or (begins and lines[i].startswith(begins))]
        if not hits or (hits[0] != at and not skips):
            return line
        at, skips = hits[0] + 1, False
    return None if at == len(lines) or skips else f"nothing more, but it printed {lines[at]!r}"


@pytest.mark.parametrize("shown_blocks", [pytest.param(found, id=f"section {name}") for name, found in runs().items()])
def test_commands_in_the_guide_print_what_it_shows(shown_blocks, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (script,) = [block for block in blocks("sh") if "kvlockstep" in block]
    (tmp_path / "fuzz.sh").write_text(shortened(script))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "COLUMNS": "100"}

    for command, shown in [pair for block in shown_blocks for pair in commands(block)]:
        done = subprocess.run(
            ["bash", "-c", shortened(command)],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert missing_line(shown, done.stdout) is None, f"$ {command}\n{done.stdout}"


def shortened(command):
    return re.sub(r"--seconds (\d+)", lambda found: f"--seconds {min(SECONDS, int(found[1]))}", command)


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        (["a 1", "b"], "a 22\nb\n", None),
        (["a", "...", "c"], "a\nb\nc\n", None),
        (["a", "..."], "a\nb\n", None),
        (["a, ..."], "a, b\n", None),
        (["a", "c"], "a\nb\nc\n", "c"),
        (["a", "...", "d"], "a\nb\nc\n", "d"),
        (["b", "a"], "a\nb\n", "b"),
        (["a"], "a\nb\n", "nothing more, but it printed 'b'"),
    ],
)
def test_line_that_was_not_printed_is_found(shown, printed, missing):
    assert missing_line(shown, printed) == missing


def test_guide_runs_every_wrong_target_but_the_last():
    (command,) = [c for block in blocks("console") for c, _ in commands(block) if "targets.wrong" in c]
    *named, last = [cls.__name__ for cls in WRONG]

    assert re.findall(r"[A-Z]\w+", command.split("; do")[0]) == named
    assert f"the last, `{last}`," in " ".join(GUIDE.split())


# The example as a cache


def cache_of(n_blocks=4, sharing=True):
    return HashBlockCache(n_blocks, block_size=2, n_rows=2, max_len=8, sharing=sharing)


def run(cache, tokens, namespace=None, publish=True):
    """Run one sequence to its end; give the numbers of its blocks."""
    sequence = cache.admit(tokens, namespace)
    cache.grow(sequence, len(tokens))
    if publish:
        cache.publish(sequence, tokens)
    numbers = [block.number for block in sequence.blocks]
    cache.finish(sequence)
    return numbers


def test_block_goes_before_the_one_in_front_of_it():
    cache = cache_of()
    first, second, third = run(cache, [1, 2, 3, 4, 5, 6])
    run(cache, [1, 2, 9], publish=False)

    assert cache.evict(2) == [third, second]
    assert [block.number for block in cache.lookup([1, 2, 3], None)] == [first]


def test_empty_block_is_taken_before_a_cached_one():
    cache = cache_of()
    cached = run(cache, [1, 2, 3, 4])
    sequence = cache.admit([7] * 7, None)

    assert cache.grow(sequence, 4) == []
    assert cache.grow(sequence, 6) == [cached[-1]]
    assert cache.n_reusable == 1


def test_of_two_equal_blocks_the_older_is_kept():
    cache = cache_of()
    older, younger = (cache.admit([1, 2, 3], None) for _ in range(2))
    for sequence in (older, younger):
        cache.grow(sequence, 3)
    cache.publish(older, [1, 2, 3])
    cache.publish(younger, [1, 2, 3])

    assert younger.blocks[0] is older.blocks[0]
    assert cache.slots(younger, 0, 2) == cache.slots(older, 0, 2)
    assert older.blocks[0].ref_count == 2
    assert len(cache.queue) == 1, "the duplicate"


def test_block_of_another_namespace_or_another_beginning_is_not_found():
    cache = cache_of()
    run(cache, [1, 2, 3, 4], ("a", None))

    assert len(cache.lookup([1, 2, 3, 4, 5], ("a", None))) == 2
    assert cache.lookup([1, 2, 3, 4, 5], (None, "a")) == []
    assert cache.lookup([3, 4, 5], ("a", None)) == []


def test_cache_without_sharing_finds_nothing():
    cache = cache_of(sharing=False)
    run(cache, [1, 2, 3, 4])

    assert cache.admit([1, 2, 3], None).blocks == []
    assert (len(cache.queue), len(cache.free_rows), cache.cached) == (4, 2, {})


# The example under test


class Cases:
    """Cases of one target, as a worker runs them, in this process."""

    config = None
    options = ()
    page_sizes = PAGE_SIZES

    def __init__(self, cls):
        self.cls = cls
        self.capabilities = cls.capabilities
        self.allowed = {}

    def start(self, config):
        lockstep = Lockstep(config, self.cls(config))
        for name in lockstep.model.allowed:  # of a case without sharing it is empty
            self.allowed.setdefault(name, 0)
        return lockstep

    def run(self, lockstep, op):
        lockstep.run(op)
        for name, n in lockstep.model.allowed.items():
            self.allowed[name] = max(self.allowed.get(name, 0), n)


def violation_of(cls, n_batches=12):
    """Run a target until it breaks a law; None if it breaks none."""
    for seed in range(n_batches):
        try:
            run_cases(Cases(cls), seed, 20, 60)
        except Violation as violation:
            return violation
    return None


@pytest.mark.parametrize("cls", [SmallestTarget, ShownTarget, HashBlockTarget])
def test_honest_target_breaks_no_law(cls):
    assert violation_of(cls, n_batches=3) is None


def test_allowance_of_the_example_makes_a_difference():
    cases = Cases(HashBlockTarget)
    run_cases(cases, 0, 20, 60)

    assert cases.allowed.keys() == HashBlockTarget.allowances
    assert min(cases.allowed.values()) > 0


PLANTED = {
    LeaksTail: (PageLeaked,),
    KeepsDuplicateInRow: (RowOffCanonicalPath,),
    HashesTokensAlone: (MatchedUncommitted, NamespaceMixed),  # the second where it is published before it is found
    ReusesHeadFirst: (LinksDisagree, ChoiceIllegal),  # the second where no child of the victim is left
    DeclaresNothing: (TreeDiffers,),
}


@pytest.mark.parametrize(("cls", "laws"), PLANTED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_planted_bug_is_caught(cls, laws):
    assert isinstance(violation_of(cls), laws)


# First mistakes: each row of the guide's table


class LetsItsOwnErrorThrough(HashBlockTarget):
    def alloc(self, batch):
        try:
            return super().alloc(batch)
        except OutOfPages:
            raise MemoryError("no blocks") from None


class ReturnsNumpy(HashBlockTarget):
    def alloc(self, batch):
        done = super().alloc(batch)
        done.write_sets = [list(np.array(slots)) for slots in done.write_sets]
        return done


class RefusesPagesBeforeRows(HashBlockTarget):
    def alloc(self, batch):
        try:
            return super().alloc(batch)
        except OutOfRows:
            raise OutOfPages from None


class ReturnsWholeRow(HashBlockTarget):
    def alloc(self, batch):
        done = super().alloc(batch)
        lives = [self.table.live[item.request] for item in batch]
        ends = [live.committed_len + item.n for live, item in zip(lives, batch, strict=True)]
        done.write_sets = [self.cache.slots(live.engine, 0, end) for live, end in zip(lives, ends, strict=True)]
        return done


class CountsRowsFromZero(HashBlockTarget):
    def __init__(self, config):
        super().__init__(config)
        self.cache.free_rows = list(range(config.n_rows))


class CountsPagesFromZero(HashBlockTarget):
    def __init__(self, config):
        super().__init__(config)
        self.cache.queue[0] = self.cache.blocks[0]


class TakesBeforeItRefuses(HashBlockTarget):
    def alloc(self, batch):
        for live in self.table.batch(batch):
            if live.engine.row is None and self.cache.free_rows:
                self.cache.grow(live.engine, 0)
        return super().alloc(batch)


class TakesRowAtMatch(HashBlockTarget):
    def match(self, request, *arguments):
        matched_len = super().match(request, *arguments)
        if self.cache.free_rows:
            self.cache.grow(self.table.live[request].engine, 0)
        return matched_len


class KeepsNames(HashBlockTarget):
    def retract(self, request, publish):
        live = self.table.named(request, "retract")
        if publish and live.state == "RUNNING":
            self._publish(live)
        if live.engine.row is not None:  # kept, its pages would show it first, as pages of two owners
            self._end(live)
            return
        self.cache.finish(live.engine)
        live.engine = self.cache.admit([], None)


class PublishesAtCommit(HashBlockTarget):
    def commit(self, request, kept, sampled):
        super().commit(request, kept, sampled)
        if request in self.table.live:
            self._publish(self.table.live[request])


class AbortsAtOnce(HashBlockTarget):
    def abort(self, request):
        self._end(self.table.named(request, "abort"))


class LooksUpAllTokens(HashBlockCache):
    def lookup(self, tokens, namespace):
        return super().lookup([*tokens, 0], namespace)


class MatchesLastToken(HashBlockTarget):
    cache_type = LooksUpAllTokens


class LocksAtPeek(HashBlockTarget):
    def peek(self, request, tokens, namespace, private):
        self.table.refuse_known(request, "peek")
        return len(self.cache.admit(tokens, namespace, not private).blocks) * self.config.page_size


class TellsNoEviction(HashBlockTarget):
    def alloc(self, batch):
        done = super().alloc(batch)
        done.evicted = []
        return done


class ShowsPageTwice(HashBlockTarget):
    def snapshot(self):
        snapshot = super().snapshot()
        pool = snapshot.pools[FULL]
        snapshot.pools[FULL] = replace(pool, free_pages=pool.free_pages + pool.free_pages[:1])
        return snapshot


class CountsReusableAsFree(HashBlockTarget):
    def snapshot(self):
        snapshot = super().snapshot()
        snapshot.pools[FULL].available = len(self.cache.queue) * self.config.page_size
        return snapshot


class SwapsLayers(HashBlockTarget):
    def write_kv(self, slots, values):
        self.cache.write(slots, (np.asarray(values, np.uint32) ^ self.salts)[:, ::-1])


MISTAKES = {
    LetsItsOwnErrorThrough: TargetRaised,
    ReturnsNumpy: OutcomeDiffers,
    RefusesPagesBeforeRows: OutcomeDiffers,
    ReturnsWholeRow: WriteSlotIllegal,
    CountsRowsFromZero: RowLeaked,
    CountsPagesFromZero: PaddingOwned,
    TakesBeforeItRefuses: RefusalChangedState,
    TakesRowAtMatch: RequestsDiffer,
    KeepsNames: RequestsDiffer,
    PublishesAtCommit: RequestsDiffer,
    DeclaresNothing: TreeDiffers,
    AbortsAtOnce: InFlightDisturbed,
    MatchesLastToken: MatchTooLong,
    LocksAtPeek: LockCountWrong,
    TellsNoEviction: EvictReportWrong,
    ShowsPageTwice: PageOwnedTwice,
    CountsReusableAsFree: SizesDoNotRecount,
    SwapsLayers: ContentWrong,
}


def table_of_messages():
    """First column of the table in the section on first failures."""
    (rows,) = re.findall(r"^\| you see \|.*\n\|[-|]+\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    return [row.split(" | ")[0].removeprefix("| ").strip("`") for row in rows.splitlines()]


@pytest.mark.parametrize(("cls", "law"), MISTAKES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_first_mistake_gives_the_message_of_the_guide(cls, law):
    violation = violation_of(cls)

    assert type(violation) is law
    assert plain(f"{law.__name__}: {violation.headline}") in map(plain, table_of_messages())


def test_every_message_of_the_guide_is_given():
    """The rows that no violation is behind are verdicts of a run; the rest is as many as there are mistakes."""
    of_runs = [message for message in table_of_messages() if not re.match(r"[A-Z]\w+: ", message)]

    assert len(table_of_messages()) == len(MISTAKES) + len(of_runs)
    assert [line for line in of_runs if plain(line) not in map(plain, verdicts_of_short_runs())] == []
    assert len(of_runs) == 5


def verdicts_of_short_runs():
    """What is said of a run that was slow and reached little, and of one whose failure did not come again."""
    from kvlockstep.fuzz.canary import Canary
    from kvlockstep.fuzz.crew import WorkerState
    from kvlockstep.fuzz.worker import Order

    order = Order("my_target:make", None, 5.0, 0, "out", "my_target")
    found = Canary("WriteSlotRepeated", 13, 0.1)
    slow, flaky = WorkerState(order, canary=found), WorkerState(order, canary=found)
    slow.statistics = Statistics(cases=8, cases_under_pressure=1)
    slow.statistics.outcomes["alloc", "done"] = 700
    slow.statistics.labels["row reused"] = 3
    slow.capabilities = ["no_sharing"]
    flaky.failure, flaky.replays = {"signature": "PageLeaked.abort"}, False
    return verdict_of([slow], 5.0).lines + verdict_of([flaky], 5.0).lines


# What block caches do otherwise


class KeepsBothOfTwoEqualBlocks(HashBlockTarget):
    class cache_type(HashBlockCache):  # noqa: N801
        def _publish_block(self, sequence, i, content):
            if self.hash_of(content) not in self.cached:
                super()._publish_block(sequence, i, content)


class EvictsOneBlockMore(HashBlockTarget):
    n_more: ClassVar = Counter()

    def alloc(self, batch):
        done = super().alloc(batch)
        done.evicted += self._one_more("alloc")
        return done

    def evict(self, n_slots):
        return super().evict(n_slots) + self._one_more("evict")

    def _one_more(self, kind):
        numbers = self.cache.evict(1)
        self.n_more[kind] += len(numbers)
        return [self._slots_of(number) for number in numbers]


def guide_row(beginning):
    (row,) = re.findall(rf"^\| {beginning} \|.*", GUIDE, re.MULTILINE)
    return row


def test_cache_that_keeps_duplicates_is_told_as_the_guide_says():
    laws = (PageLeaked, RowOffCanonicalPath, LinksDisagree)

    assert isinstance(violation_of(KeepsBothOfTwoEqualBlocks), laws)
    assert all(f"`{law.__name__}`" in guide_row("keeps both of two equal blocks") for law in laws)


def test_cache_that_is_called_legal_may_evict_more():
    assert violation_of(EvictsOneBlockMore, n_batches=2) is None
    assert min(EvictsOneBlockMore.n_more[kind] for kind in ("alloc", "evict")) > 10


# What cannot be a target


class Half:
    name, conformance, capabilities = "half", "legal", frozenset({"sharing", "policy:lru"})
    peek = match = alloc = commit = checkpoint = release = abort = None


class WithoutPublish(HashBlockTarget):
    def retract(self, request):
        self._end(self.table.named(request, "retract"))


class NamesPolicyAlone(HashBlockTarget):
    capabilities = frozenset({"sharing", "lru"})


class ShowsArray(HashBlockTarget):
    def snapshot(self):
        return replace(super().snapshot(), free_rows=np.arange(3))


UNUSABLE = {"MyTarget": lambda config: type("MyTarget", (Half,), {})()}
UNUSABLE |= {cls.__name__: cls for cls in (WithoutPublish, NamesPolicyAlone, ShowsArray)}


def test_what_cannot_be_a_target_is_said_as_the_guide_shows(monkeypatch):
    import examples.smallest_target as module

    said = []
    for name, factory in UNUSABLE.items():
        monkeypatch.setattr(module, name, factory, raising=False)
        with pytest.raises(TargetUnusable) as unusable:
            factory_for(f"examples.smallest_target:{name}")(CacheConfig())
        said.append(str(unusable.value).replace(f"examples.smallest_target:{name}", "my_target:make"))

    assert blocks("text") == ["".join(f"{line}\n" for line in said)]
    assert "my_target" not in BUILT_IN
