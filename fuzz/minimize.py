"""Makes a failing trace short: fewer requests and operations, then smaller numbers and prompts, then a smaller config.

Each candidate runs from a fresh state and is kept only if it fails with the same cause signature, so that
the search cannot slide to another bug. Every sub-list of a trace is a valid trace; that is what makes plain
deletion work. Whole requests go first, many at a time: a replay costs as much as its trace is long. The best
trace so far is handed to ``save`` whenever it gets better, so that an interrupted search loses nothing and a
later one goes on from there.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count, dropwhile
from time import monotonic
from typing import Any, cast

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.dispatch import model_arguments
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Op,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
    kind_of,
    named_requests,
)
from kvlockstep.fuzz.registry import Factory, TargetUnusable
from kvlockstep.fuzz.replay import failing_signature
from kvlockstep.fuzz.requirements import lacking
from kvlockstep.fuzz.targets.base import Target
from kvlockstep.fuzz.targets.reference import new_cache

Ops = tuple[Op, ...]
SIZES = ("page_size", "n_rows", "n_pages", "max_context_len")
Save = Callable[[CacheConfig, Ops], None]
Judge = Callable[[CacheConfig, Ops], tuple[str | None, int]]
"""Says with which signature a trace fails, if it does, and how many of its operations ran."""


class Minimizer:
    """Search for the shortest trace with one signature. ``tried`` counts the replays.

    Each runs in this process, unless there is a ``judge`` that runs it elsewhere, as that of a `Ward` does; then
    ``factory`` is asked only what the target promises.
    """

    def __init__(
        self,
        config: CacheConfig,
        ops: Ops,
        factory: Factory,
        signature: str,
        *,
        seconds: float,
        save: Save | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.factory = factory
        self.signature = signature
        self.deadline = monotonic() + seconds
        self.save = save
        self.judge = judge if judge is not None else lambda config, ops: failing_signature(config, ops, factory)
        self.tried = 0
        self._made: dict[tuple[str, ...], Target] = {}  # by the options that are on, which may change what is promised
        self._unpromised = set(lacking(self._target_with(config), config, ops))

    def run(self) -> bool:
        """Minimize in place. Return True if no further step helped, False if the time ran out first."""
        if not self._accept(self.config, self.ops):
            return False
        size = None
        reductions = (
            self._untangle,
            self._keep_last_requests,
            self._drop_requests,
            self._drop_chunks,
            self._split_names,
            self._simplify,
            self._shorten_prompts,
            self._shrink,
            self._join,
            self._relabel,
        )
        while size != (size := self._size()):
            for reduce in reductions:
                reduce()
                if self.is_late():
                    return False
        return True

    def is_same(self, signature: str | None) -> bool:
        """Tell whether a candidate fails in the way that is looked for."""
        return signature == self.signature

    def is_late(self) -> bool:
        """Tell whether the time is over."""
        return monotonic() > self.deadline

    def _size(self) -> tuple[object, ...]:
        return (self.config, self.ops)

    def _accept(self, config: CacheConfig, ops: Ops) -> bool:
        """Run a candidate; keep it, cut after its failing operation, if it fails in the same way."""
        if self.is_late():
            return False
        try:
            if not self._is_promised(config, ops):
                return False
            self.tried += 1
            signature, steps = self.judge(config, ops)
        except TargetUnusable:  # it cannot be built in this size
            return False
        if not self.is_same(signature):
            return False
        self.config, self.ops = config, ops[:steps]
        if self.save is not None:
            self.save(self.config, self.ops)
        return True

    def _accept_in_less_room(self, ops: Ops, pages: Sequence[int]) -> bool:
        """Try with so many pages less: where the failure needs a full pool, less to hold needs a smaller one."""
        sizes = [self.config.n_pages - fewer for fewer in pages if fewer < self.config.n_pages]
        return any(self._accept(replace(self.config, n_pages=size), ops) for size in sizes)

    def _split_names(self) -> None:
        """Give a later request of the same name a name of its own: then the earlier one need not end first.

        The model has mostly done so already, for all of them; this is for a target that it cannot follow alone.
        """
        submitted: set[str] = set()
        for index in range(len(self.ops)):
            op = self.ops[index] if index < len(self.ops) else None
            if not isinstance(op, Submit):
                continue
            if op.request in submitted:
                used = {name for other in self.ops for name in named_requests(other)}
                fresh = next(name for i in range(len(used) + 1) if (name := f"r{i}") not in used)
                later = tuple(_with_names(other, {op.request: fresh}) for other in self.ops[index:])
                if self._accept(self.config, self.ops[:index] + later):
                    submitted.add(fresh)
            submitted.add(op.request)

    def _untangle(self) -> None:
        """Tell requests of one name apart, and leave out what is refused, in two replays.

        The model says what is refused; where the target's choices would make that differ, the replay shows it.
        """
        named, done = _followed(self.config, self.ops)
        self._accept_other(named)
        if len(named) == len(self.ops):
            earlier = tuple(op for op, was_done in zip(self.ops[:-1], done, strict=False) if was_done)
            self._accept_other((*earlier, *self.ops[-1:]))

    def _keep_last_requests(self) -> None:
        """Try the last few alone: what is short costs little to try, and what came long before is mostly not needed.

        Also without drafts in a failing batch: where less of a prompt was found they come too early, and are refused.
        """
        names = _by_last_mention(self.ops)
        n_kept = 1
        while n_kept < len(names):
            kept = _from_first_request(_without(self.ops, names[n_kept:]))
            if self._accept_other(kept) or self._accept_other((*kept[:-1], _without_drafts(kept[-1]))):
                return
            n_kept += max(1, n_kept // 2)

    def _drop_requests(self) -> None:
        """Drop many at a time, the oldest first, then fewer; one by one also with a smaller pool."""
        size = len(_by_last_mention(self.ops)) // 2
        while size:
            names = _by_last_mention(self.ops)
            for start in reversed(range(0, len(names), size)):
                kept = _without(self.ops, names[start : start + size])
                if kept != self.ops:
                    self._accept_in_less_room(kept, (0, 1, 2, 3, 4, 6, 8) if size == 1 else (0,))
            size //= 2

    def _drop_chunks(self) -> None:
        size = max(1, len(self.ops) // 2)
        while True:
            start = len(self.ops) - size
            while start > -size:
                low = max(0, start)
                candidate = self.ops[:low] + self.ops[start + size :]
                if len(candidate) < len(self.ops):
                    self._accept(self.config, candidate)
                start = min(start, len(self.ops)) - size
            if size == 1:
                return
            size //= 2

    def _simplify(self) -> None:
        index = 0
        while index < len(self.ops):
            for simpler in _simpler(self.ops[index]):
                if self._accept(self.config, (*self.ops[:index], simpler, *self.ops[index + 1 :])):
                    break
            else:
                index += 1
            if self.is_late():
                return

    def _shorten_prompts(self) -> None:
        """Cut a prompt together with the first pass over it, or the pass would ask for tokens that are gone."""
        for name in sorted({op.request for op in self.ops if isinstance(op, Submit)}):
            cut = 64 * self.config.page_size
            while cut:
                shorter = _shortened(self.ops, name, cut)
                pages = cut // self.config.page_size
                if shorter is None or not self._accept_in_less_room(shorter, sorted({0, pages, pages + 1})):
                    cut //= 2

    def _join(self) -> None:
        """Let one batch do what two did, or one request, which goes on, what two did one behind the other."""
        while any(self._accept(self.config, joined) for joined in _joined(self.ops)):
            pass

    def _relabel(self) -> None:
        """Name requests ``r0``, ``r1`` and tokens 1, 2 in the order in which they appear."""
        names = dict.fromkeys(name for op in self.ops for name in named_requests(op))
        new_names = {name: f"r{i}" for i, name in enumerate(names)}
        self._accept_other(tuple(_with_names(op, new_names) for op in self.ops))
        tokens = dict.fromkeys(token for op in self.ops for token in _tokens_of(op))
        new_tokens = {token: i for i, token in enumerate(tokens, start=1)}
        self._accept_other(tuple(_with_tokens(op, new_tokens) for op in self.ops))

    def _accept_other(self, ops: Ops) -> bool:
        return ops != self.ops and self._accept(self.config, ops)

    def _is_promised(self, config: CacheConfig, ops: Ops) -> bool:
        """Tell whether the target promises all that this needs, but for what the trace needed from the start."""
        return self._unpromised.issuperset(lacking(self._target_with(config), config, ops))

    def _target_with(self, config: CacheConfig) -> Target:
        """Build a target with the same options on, to see what it promises."""
        if config.options not in self._made:
            self._made[config.options] = self.factory(config)
        return self._made[config.options]

    def _shrink(self) -> None:
        """Take each plainer value that still fails; of a size the smallest that does."""
        for name, value in list(_plainer_values(self.config)):
            present = getattr(self.config, name)
            if value == present or (name in SIZES and value > present):
                continue
            candidate = replace(self.config, **{name: value})
            if candidate.is_valid():
                self._accept(candidate, self.ops)


def _followed(config: CacheConfig, ops: Ops) -> tuple[Ops, list[bool]]:
    """Run the model alone: give each request a name of its own, and tell which operations are done."""
    model = new_cache(config)
    fresh = (f"r{number}" for number in count())
    names: dict[str, str] = {}
    named: list[Op] = []
    done: list[bool] = []
    for op in ops:
        kind, arguments = kind_of(op), model_arguments(op)
        done.append(model.refusal(kind, *arguments) is None)
        for name in named_requests(op):
            if name not in names or (isinstance(op, Submit) and done[-1]):
                names[name] = next(fresh)
        named.append(_with_names(op, names))
        if done[-1]:
            getattr(model, kind)(*arguments)
    return tuple(named), done


def _by_last_mention(ops: Ops) -> list[str]:
    """List the requests, the one that was named last first."""
    return list(dict.fromkeys(name for op in reversed(ops) for name in named_requests(op)))


def _without(ops: Ops, names: Collection[str]) -> Ops:
    """Leave out some requests."""
    return tuple(without for op in ops if (without := _op_without(op, names)) is not None)


def _op_without(op: Op, names: Collection[str]) -> Op | None:
    if isinstance(op, Alloc):
        batch = tuple(item for item in op.batch if item.request not in names)
        return Alloc(batch) if batch or not op.batch else None
    return None if any(name in names for name in named_requests(op)) else op


def _without_drafts(op: Op) -> Op:
    if isinstance(op, Alloc):
        return Alloc(tuple(AllocItem(item.request, max(1, item.n - len(item.drafts))) for item in op.batch))
    return op


def _from_first_request(ops: Ops) -> Ops:
    """Leave out what comes before any request: there is nothing to evict yet."""
    return tuple(dropwhile(lambda op: not named_requests(op), ops))


def _with_names(op: Op, names: dict[str, str]) -> Op:
    """Replace request names; one that is not in ``names`` stays."""
    if isinstance(op, Alloc):
        return Alloc(tuple(replace(item, request=names.get(item.request, item.request)) for item in op.batch))
    if isinstance(op, Evict | Reset):
        return op
    return replace(op, request=names.get(op.request, op.request))


def _tokens_of(op: Op) -> tuple[int, ...]:
    match op:
        case Submit(tokens=tokens):
            return tuple(tokens)
        case Alloc(batch):
            return tuple(token for item in batch for token in item.drafts)
        case Commit(sampled=sampled):
            return sampled
        case _:
            return ()


def _with_tokens(op: Op, tokens: dict[int, int]) -> Op:
    """Replace tokens; every one of the operation is in ``tokens``."""
    match op:
        case Submit():
            return replace(op, tokens=tuple(tokens[token] for token in op.tokens))
        case Alloc(batch):
            return Alloc(tuple(replace(i, drafts=tuple(tokens[token] for token in i.drafts)) for i in batch))
        case Commit():
            return replace(op, sampled=tuple(tokens[token] for token in op.sampled))
        case _:
            return op


def _simpler(op: Op) -> Iterator[Op]:
    """Yield operations that say less, the boldest first."""
    match op:
        case Submit(_, tokens, namespace, priority, private):
            if namespace != (None, None, ()):
                yield replace(op, namespace=(None, None, ()))
                yield from (replace(op, namespace=part) for part in _smaller_namespaces(op) if part != namespace)
            if priority:
                yield replace(op, priority=0)
            if private:
                yield replace(op, private=False)
            plain = tuple(sorted(set(tokens)))
            if plain != tuple(range(1, len(plain) + 1)):
                yield replace(op, tokens=tuple(1 + plain.index(token) for token in tokens))
            if len(plain) > 1:
                yield replace(op, tokens=(1,) * len(tokens))
        case Alloc(batch):
            if len(batch) > 1:
                yield from (Alloc(batch[:i] + batch[i + 1 :]) for i in range(len(batch)))
            for i, item in enumerate(batch):
                for n, drafts in _smaller_passes(item):
                    yield Alloc((*batch[:i], AllocItem(item.request, n, drafts), *batch[i + 1 :]))
        case Commit(_, kept, sampled):
            if sampled:
                yield replace(op, sampled=())
            if sampled not in ((), (1,)):
                yield replace(op, sampled=(1,))
            yield from (replace(op, kept=fewer) for fewer in (kept // 2, kept - 1) if 0 <= fewer < kept)
        case Retract(_, True):
            yield replace(op, publish=False)
        case Evict(n):
            yield from (Evict(fewer) for fewer in (1, n // 2, n - 1) if 1 <= fewer < n)


def _smaller_namespaces(op: Submit) -> Iterator[tuple[str | None, str | None, tuple[str, ...]]]:
    extra_key, cache_salt, content_ids = op.namespace
    yield (None, cache_salt, content_ids)
    yield (extra_key, None, content_ids)
    yield (extra_key, cache_salt, ())


def _smaller_passes(item: AllocItem) -> Iterator[tuple[int, tuple[int, ...]]]:
    known = item.n - len(item.drafts)
    if item.drafts:
        yield known, ()
        yield item.n - 1, item.drafts[:-1]
    if known > 1:
        yield 1, ()
        yield item.n - 1, item.drafts


def _shortened(ops: Ops, name: str, cut: int) -> Ops | None:
    """Take ``cut`` tokens off the prompt of ``name``, off its first pass and off what that pass kept."""
    shorter: list[Op] = []
    stage = 0  # 0: before the submit, 1: before the first alloc, 2: before its commit, 3: done
    for op in ops:
        if stage == 0 and isinstance(op, Submit) and op.request == name:
            if len(op.tokens) <= cut:
                return None
            shorter.append(replace(op, tokens=op.tokens[:-cut]))
            stage = 1
        elif stage == 1 and isinstance(op, Alloc) and name in named_requests(op):
            batch = tuple(replace(i, n=i.n - cut) if i.request == name else i for i in op.batch)
            if any(item.n < 1 for item in batch):
                shorter.append(op)
                stage = 3
                continue
            shorter.append(Alloc(batch))
            stage = 2
        elif stage == 2 and isinstance(op, Commit) and op.request == name:
            shorter.append(replace(op, kept=max(0, op.kept - cut)))
            stage = 3
        else:
            shorter.append(op)
    return tuple(shorter) if stage else None


def _joined(ops: Ops) -> Iterator[Ops]:
    """Yield shorter traces that have one batch or one request less, and ask for the same."""
    for i, j in combinations([index for index, op in enumerate(ops) if isinstance(op, Alloc)], 2):
        batch = Alloc((*cast(Alloc, ops[i]).batch, *cast(Alloc, ops[j]).batch))
        yield (*ops[:i], *ops[i + 1 : j], batch, *ops[j + 1 :])
        yield (*ops[:i], batch, *ops[i + 1 : j], *ops[j + 1 :])
    submits = {op.request: op for op in ops if isinstance(op, Submit)}
    for first, second in combinations(submits, 2):
        if not any(isinstance(op, Alloc) and {first, second} <= set(named_requests(op)) for op in ops):
            yield _as_one_request(ops, first, submits[second], None)
            yield _as_one_request(ops, first, submits[second], Checkpoint(first))


def _as_one_request(ops: Ops, first: str, second: Submit, end: Op | None) -> Ops:
    """Submit the second prompt at once, and go on where the second request began; ``end`` is what ends the first."""
    joined: list[Op] = []
    for op in ops:
        match op:
            case Submit(name) if name == first:
                joined.append(replace(second, request=first))
            case Release(name) | Abort(name) | Retract(name) if name == first:
                joined += [end] if end is not None else []
            case Submit(name) | Peek(name) | Match(name) if name == second.request:
                pass
            case _:
                joined.append(_with_names(op, {second.request: first}))
    return tuple(joined)


def _plainer_values(config: CacheConfig) -> Iterator[tuple[str, Any]]:
    plain = CacheConfig()
    for off in config.options:
        yield "options", tuple(name for name in config.options if name != off)
    for name in ("policy", "key_units", "prefix_sharing", "dtype", "kv_heads", "head_dim"):
        yield name, getattr(plain, name)
    yield "layers", 1
    for name in SIZES:
        size = getattr(config, name)
        yield from ((name, fewer) for fewer in sorted({1, 2, 3, 4, 6, 8, 12, size // 2, size - 1}) if 1 <= fewer < size)
