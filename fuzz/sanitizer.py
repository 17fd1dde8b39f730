"""Watches what interpreted Triton kernels do to memory, and raises a violation before they do it wrong.

Triton's interpreter runs the programs of a launch one after another, on bare addresses. So a store that misses its
tensor hits another one or the heap, and a race is hidden: the last program wins, always. Under a `Sanitizer`

* every access is held to the tensor that its address was made from, and a store to the cells that the kernel promises
  to write (a *promise*, given from outside; a kernel without one may write all of its tensors);
* a store must not write an address twice;
* an address that a program stores to is no other program's, in the same launch;
* a launch of several programs runs a second time from the same bytes, with its programs in another order or
  interleaved at their memory operations, as a seed says; it must leave the same bits.

A kernel gets addresses of our own in place of those of its tensors, each tensor's in a range of its own, so that
pointer arithmetic cannot lose which tensor an address was made from. They become real ones behind the checks.

Knows Triton's interpreter and no cache; Triton is imported when it is first used. The bits that a launch leaves are
those that it leaves unwatched.

Not seen: accesses through tensor descriptors, tuples of tensors and pointers that were loaded from memory (these are
reported as out of bounds); that an atomic operation of one program orders the plain ones of another (a lock looks like
a race); races between the lanes of one program, other than one store's; what is read and was never written.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from random import Random
from threading import Semaphore, Thread
from typing import Any

import numpy as np

from kvlockstep.invariants import Violation

Cells = np.ndarray[Any, np.dtype[np.int64]]
Bits = np.ndarray[Any, np.dtype[np.uint8]]

Promise = Callable[[Mapping[str, Any]], Mapping[str, Cells]]
"""From the arguments of a launch: the cells that it may write, of each pointer through which it may write at all.

Cells are counted in elements from the first one of the tensor.
"""

MOST_INTERLEAVED = 64
"""Programs; each has a thread. A larger launch is only run in another order."""

RANGE_BITS = 48
HALF_RANGE = 1 << (RANGE_BITS - 1)


class KernelViolation(Violation):
    """A kernel did to memory what it must not. Base of what a sanitizer finds."""


class KernelAccessOutOfBounds(KernelViolation):
    """An access outside of the tensor that its address was made from."""


class KernelWriteUnpromised(KernelViolation):
    """A write inside of a tensor, to a cell that this launch does not promise to write."""


class KernelStoreRepeats(KernelViolation):
    """One store writes an address with two lanes: either may win."""


class KernelWritesCollide(KernelViolation):
    """Two programs write one address, and not both atomically: either may win."""


class KernelReadRaces(KernelViolation):
    """One program stores to an address that another one reads: it may see the old value or the new one."""


class KernelDependsOnOrder(KernelViolation):
    """A launch leaves other bits if its programs run in another order, or interleaved."""


@dataclass(frozen=True, slots=True)
class _Access:
    """One kind of memory operation."""

    verb: str
    reads: bool
    writes: bool
    atomic: bool = False


_LOAD, _STORE = _Access("loads", True, False), _Access("stores to", False, True)
_ATOMIC_LOAD = _Access("loads", True, False, atomic=True)
_ATOMIC_STORE = _Access("stores to", False, True, atomic=True)
_UPDATE = _Access("updates", True, True, atomic=True)


def _lanes(lanes: Cells, n: int) -> str:
    """Say which lanes of a block: ``[0, 2) [5, 6) of 8``."""
    ends = np.flatnonzero(np.diff(lanes) != 1)
    starts, stops = [0, *(ends + 1)], [*ends, len(lanes) - 1]
    spans = [f"[{lanes[a]}, {lanes[b] + 1})" for a, b in zip(starts, stops, strict=True)]
    more = f" and {len(spans) - 8} more spans" if len(spans) > 8 else ""
    return f"{' '.join(spans[:8])}{more} of {n}"


class _Operand:
    """A pointer argument of a launch: a tensor, and the cells of it that may be written."""

    def __init__(self, name: str, tensor: Any, number: int, may_write: Cells | None) -> None:
        self.name = name
        self.tensor = tensor
        self.base = (number << RANGE_BITS) + HALF_RANGE  # what the kernel takes for its address
        self.start: int = tensor.data_ptr()
        self.item: int = tensor.element_size()
        self.may_write = may_write  # None: all
        self._cells: Cells | None = None  # of a tensor with gaps, in the order of its elements
        if not tensor.is_contiguous():
            self._cells = np.zeros(tuple(tensor.shape), dtype=np.int64)
            for axis, stride in enumerate(tensor.stride()):
                steps = np.arange(tensor.shape[axis]) * stride
                self._cells += steps.reshape([-1 if a == axis else 1 for a in range(tensor.dim())])
            self._cells = self._cells.ravel()

    def not_of(self, cells: Cells) -> Cells:
        """Return where those of the given cells stand that it does not have."""
        if self._cells is not None:
            return np.flatnonzero(~np.isin(cells, self._cells))
        return np.flatnonzero((cells < 0) | (cells >= self.tensor.numel()))

    def place(self, cell: int) -> str:
        """Name a cell of the tensor as an element: ``row_table_ptr[1, 4]``."""
        at = cell if self._cells is None else int(np.flatnonzero(self._cells == cell)[0])
        return self.element(at)

    def element(self, at: int) -> str:
        index = np.unravel_index(at, tuple(self.tensor.shape)) if self.tensor.dim() else (0,)
        return f"{self.name}[{', '.join(map(str, index))}]"

    def __str__(self) -> str:
        gaps = "" if self._cells is None else f" with strides {list(self.tensor.stride())}"
        return f"{self.name}, {str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)}{gaps}"

    def bits(self) -> Bits:
        """Copy the bytes of all elements, in their order: one line an element."""
        import torch

        flat = self.tensor.detach().flatten().clone()
        bits: Bits = flat.view(torch.uint8).reshape(-1, self.item).numpy()
        return bits


@dataclass(slots=True)
class _Program:
    """One program of a launch."""

    number: int
    index: tuple[int, int, int]
    atomic: bool = False  # what it does now is a part of an atomic operation


@dataclass(frozen=True, slots=True)
class _Touch:
    """What one memory operation of a program touched: real addresses, and the lane of each."""

    program: _Program
    access: _Access
    addresses: Cells
    size: int
    lanes: Cells
    n_lanes: int
    low: int
    high: int

    def may_race(self, other: "_Touch") -> bool:
        if self.program is other.program or self.low > other.high or other.low > self.high:
            return False
        return any(one.access.writes and not one.access.atomic for one in (self, other))

    def of_byte(self, byte: int) -> str:
        """Say which lanes touched a byte."""
        hit = (self.addresses <= byte) & (byte < self.addresses + self.size)
        return _lanes(self.lanes[hit], self.n_lanes)


def _cells_of(offsets: Cells, size: int, item: int) -> Cells:
    """Return the cells that accesses of ``size`` bytes touch: a line each, its last cell maybe repeated."""
    first, last = offsets // item, (offsets + size - 1) // item
    cells: Cells = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
    return cells


def _common(one: _Touch, other: _Touch) -> Cells:
    """Return the addresses that both touch: of whole elements, or else of bytes."""
    if one.size == other.size and not any((touch.addresses % touch.size).any() for touch in (one, other)):
        return np.intersect1d(one.addresses, other.addresses)
    ours, others = [(t.addresses[:, None] + np.arange(t.size)).ravel() for t in (one, other)]
    return np.intersect1d(ours, others)


class _Stopped(BaseException):
    """Ends a program whose launch is over."""


class _Launch:
    """One launch, in place of the function of its kernel: the interpreter calls it once, and it runs all programs."""

    def __init__(
        self, kernel: Any, arguments: Mapping[str, Any], grid: Any, promise: Promise | None, order: Random, source: str
    ) -> None:
        from triton.runtime.interpreter import interpreter_builder

        self.__globals__ = kernel.__globals__  # these three the interpreter asks for
        self.__signature__ = inspect.signature(kernel)
        self.__name__: str = kernel.__name__
        self._builder: Any = interpreter_builder
        self._kernel = kernel
        self._grid = grid
        self._order = order
        self._source = source  # of the order, in words
        promised = promise(arguments) if promise is not None else None
        tensors = [(name, value) for name, value in arguments.items() if hasattr(value, "data_ptr")]
        self._operands = [
            _Operand(name, tensor, number, None if promised is None else promised.get(name, np.zeros(0, np.int64)))
            for number, (name, tensor) in enumerate(tensors, start=1)
        ]
        self._written = [one for one in self._operands if one.may_write is None or len(one.may_write)]
        self._touches: list[_Touch] | None = None  # None: they were looked at in an earlier run
        self._programs: list[_Program] = []
        self._program = _Program(0, (0, 0, 0))
        self._alive: list[_Program] = []  # those that are interleaved and did not end
        self._turns: list[Semaphore] = []
        self._end = Semaphore(0)  # is released when all have ended, or one has failed
        self._error: BaseException | None = None

    # Running programs

    def __call__(self, **arguments: Any) -> None:
        grid = self._grid(arguments) if callable(self._grid) else self._grid
        grid = (*grid, *(1,) * (3 - len(grid)))
        for operand in self._operands:
            handle = arguments[operand.name].handle
            handle.data = np.full_like(handle.data, operand.base)
        self._builder.set_grid_dim(*grid)
        self._programs = [_Program(i, (x, y, z)) for i, (x, y, z) in enumerate(product(*map(range, grid)))]
        again = len(self._programs) > 1
        before = [(one, one.tensor.detach().clone()) for one in self._written] if again else []
        self._touches = []
        self._one_by_one(self._programs, arguments)
        self._touches = None
        if not again:
            return
        after = [one.bits() for one in self._written]
        for operand, bits in before:
            operand.tensor.copy_(bits)
        interleaved = len(self._programs) <= MOST_INTERLEAVED and self._order.random() < 0.5
        if interleaved:
            self._interleaved(arguments)
        else:
            shuffled = self._order.sample(self._programs, len(self._programs))
            self._one_by_one(shuffled, arguments)
        self._compare(after, "interleaved" if interleaved else "in another order")

    def _one_by_one(self, programs: Sequence[_Program], arguments: Mapping[str, Any]) -> None:
        for program in programs:
            self._program = program
            self._builder.set_grid_idx(*program.index)
            self._kernel(**arguments)

    def _interleaved(self, arguments: Mapping[str, Any]) -> None:
        """Give each program a thread, and let one run at a time, from one memory operation to the next."""
        self._alive = list(self._programs)
        self._turns = [Semaphore(0) for _ in self._programs]
        threads = [Thread(target=self._follow, args=(one, arguments), daemon=True) for one in self._programs]
        for thread in threads:
            thread.start()
        try:
            self._pass_on(self._order.choice(self._alive))
            self._end.acquire()
        finally:
            self._alive = []
            for turn in self._turns:
                turn.release()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _follow(self, program: _Program, arguments: Mapping[str, Any]) -> None:
        """Run one program in its thread, when it is its turn."""
        try:
            self._wait(program)
            self._kernel(**arguments)
        except _Stopped:
            return
        except BaseException as error:
            self._error = error
        if self._alive:  # nobody waits for the launch to end where it was interrupted
            self._alive.remove(program)
        if self._alive and self._error is None:
            self._pass_on(self._order.choice(self._alive))
        else:
            self._end.release()

    def _pass_on(self, program: _Program) -> None:
        self._program = program
        self._builder.set_grid_idx(*program.index)
        self._turns[program.number].release()

    def _wait(self, program: _Program) -> None:
        self._turns[program.number].acquire()
        if not self._alive:
            raise _Stopped

    def _give_way(self) -> None:
        """Let the order decide which program does its next memory operation first."""
        program, following = self._program, self._order.choice(self._alive)
        if following is not program:
            self._pass_on(following)
            self._wait(program)

    def _compare(self, after: Sequence[Bits], how: str) -> None:
        for operand, expected in zip(self._written, after, strict=True):
            got = operand.bits()
            if (differing := np.flatnonzero((got != expected).any(axis=1))).size:
                at = int(differing[0])
                raise KernelDependsOnOrder(
                    f"{self.__name__} leaves other bits in {operand.element(at)} with its programs {how}",
                    [
                        ("kernel", f"{self.__name__}, {len(self._programs)} programs {how}, {self._source}"),
                        ("pointer", str(operand)),
                        ("elements", f"{len(differing)} differ"),
                        ("expected", f"bytes {expected[at].tobytes().hex(' ')}, with the programs in order"),
                        ("got", f"bytes {got[at].tobytes().hex(' ')}"),
                    ],
                    (self.__name__, operand.name),
                )

    # Looking at accesses

    @contextmanager
    def atomically(self) -> Iterator[None]:
        """Take what is done inside for one atomic operation."""
        program = self._program
        program.atomic = True
        try:
            yield
        finally:
            program.atomic = False

    def look(self, access: _Access, pointers: Any, mask: Any) -> Any:
        """Check one memory operation; return its pointers as real ones. Raises KernelViolation."""
        if self._alive:
            self._give_way()
        if self._program.atomic:
            access = _ATOMIC_STORE if access.writes else _ATOMIC_LOAD
        given = np.asarray(pointers.data)
        addresses = given.astype(np.int64).ravel()
        on = np.ones(given.shape, bool) if mask is None else np.broadcast_to(np.asarray(mask.data), given.shape)
        real = addresses.copy()
        numbers = addresses >> RANGE_BITS
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        active = np.flatnonzero(on.ravel())
        for number in np.unique(numbers[active]).tolist():
            lanes = active[numbers[active] == number]
            if not 1 <= number <= len(self._operands):
                raise self._astray(access, lanes, given.size)
            operand = self._operands[number - 1]
            offsets = addresses[lanes] - operand.base
            self._check_bounds(access, operand, offsets, size, lanes, given.size)
            real[lanes] = offsets + operand.start
            if access.writes:
                self._check_write(access, operand, offsets, size, lanes, given.size)
            if self._touches is not None:
                self._check_races(operand, access, real[lanes], size, lanes, given.size)
        return type(pointers)(real.astype(np.uint64).reshape(given.shape), pointers.dtype)

    def _facts(self, lanes: Cells, n: int, operand: _Operand | None) -> list[tuple[str, str]]:
        return [
            ("kernel", f"{self.__name__}, {self._named(self._program)}"),
            ("lanes", _lanes(lanes, n)),
            ("pointer", str(operand) if operand is not None else "made from no pointer argument"),
        ]

    def _named(self, program: _Program) -> str:
        """``program 1 of 3``, by its number, and for grids of more axes by its index too."""
        index = f" at {program.index}" if any(program.index[1:]) else ""
        return f"program {program.number}{index} of {len(self._programs)}"

    def _astray(self, access: _Access, lanes: Cells, n: int) -> KernelViolation:
        return KernelAccessOutOfBounds(
            f"{self.__name__} {access.verb} an address of no tensor that it was given",
            self._facts(lanes, n, None),
            (self.__name__, "no pointer"),
        )

    def _check_bounds(
        self, access: _Access, operand: _Operand, offsets: Cells, size: int, lanes: Cells, n: int
    ) -> None:
        cells = _cells_of(offsets, size, operand.item)
        if (strays := operand.not_of(cells.ravel())).size:
            cell = int(cells.ravel()[strays[0]])
            wrong = np.unique(strays // cells.shape[1])
            raise KernelAccessOutOfBounds(
                f"{self.__name__} {access.verb} element {cell} of {operand.name}, "
                f"expected one of its {operand.tensor.numel()}",
                self._facts(lanes[wrong], n, operand),
                (self.__name__, operand.name),
            )

    def _check_write(self, access: _Access, operand: _Operand, offsets: Cells, size: int, lanes: Cells, n: int) -> None:
        cells = _cells_of(offsets, size, operand.item)
        if operand.may_write is not None and (unpromised := ~np.isin(cells, operand.may_write)).any():
            raise KernelWriteUnpromised(
                f"{self.__name__} {access.verb} {operand.place(int(cells[unpromised][0]))}, "
                "expected what it promises to write",
                self._facts(lanes[unpromised.any(axis=1)], n, operand),
                (self.__name__, operand.name),
            )
        if access.atomic:
            return
        order = np.argsort(offsets, kind="stable")
        overlaps = np.flatnonzero(np.diff(offsets[order]) < size)
        if overlaps.size:
            offset = offsets[order[overlaps[0]]]
            repeated = lanes[(offsets >= offset) & (offsets < offset + size)]
            place = operand.place(int(offset) // operand.item)
            raise KernelStoreRepeats(
                f"{self.__name__} stores to {place} with {len(repeated)} lanes at once, expected 1",
                self._facts(repeated, n, operand),
                (self.__name__, operand.name),
            )

    def _check_races(
        self, operand: _Operand, access: _Access, addresses: Cells, size: int, lanes: Cells, n: int
    ) -> None:
        assert self._touches is not None
        low, high = int(addresses.min()), int(addresses.max()) + size - 1
        now = _Touch(self._program, access, addresses, size, lanes, n, low, high)
        for earlier in self._touches:
            if not now.may_race(earlier) or not (common := _common(now, earlier)).size:
                continue
            byte = int(common[0])
            place = operand.place((byte - operand.start) // operand.item)
            first, second = earlier.program.number, now.program.number
            if now.access.writes and earlier.access.writes:
                finding: type[KernelViolation] = KernelWritesCollide
                both = f"programs {first} and {second} of {self.__name__} both write {place}"
            else:
                finding = KernelReadRaces
                reader, writer = (first, second) if now.access.writes else (second, first)
                both = f"program {reader} of {self.__name__} reads {place}, which program {writer} writes"
            raise finding(
                f"{both}, expected one program there",
                [
                    ("kernel", f"{self.__name__}, {self._named(now.program)}, {self._named(earlier.program)}"),
                    ("lanes", f"{now.of_byte(byte)} of program {second}"),
                    ("lanes", f"{earlier.of_byte(byte)} of program {first}"),
                    ("pointer", str(operand)),
                    ("addresses", f"{len(common)} in common"),
                ],
                (self.__name__, operand.name),
            )
        self._touches.append(now)


class Sanitizer:
    """Watches launches. ``seed`` says in which order programs run the second time; ``promises`` are by kernel."""

    def __init__(self, seed: int, promises: Mapping[str, Promise] | None = None) -> None:
        self.seed = seed
        self.promises = promises or {}
        self.n_launches = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every launch of this process while inside; afterwards the interpreter is as it was.

        Before: this process is on the lane ``interpret``. A launch inside raises KernelViolation.
        """
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def watched(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._launch(launch, executor, args, kwargs)

        GridExecutor.__call__ = watched
        try:
            yield
        finally:
            GridExecutor.__call__ = launch

    def _launch(
        self, launch: Callable[..., None], executor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        kernel = executor.fn
        signature = inspect.signature(kernel)
        known = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **known)
        bound.apply_defaults()
        running = _Launch(
            kernel,
            bound.arguments,
            executor.grid,
            self.promises.get(kernel.__name__),
            Random(f"{self.seed} {self.n_launches}"),
            f"by seed {self.seed} in launch {self.n_launches}",
        )
        self.n_launches += 1
        executor.fn, executor.grid = running, (1,)
        with _hooked(running):
            try:
                launch(executor, *args, **kwargs)
            except Exception as error:
                if (finding := _finding_in(error)) is None:
                    raise
                raise finding from None


def _finding_in(error: BaseException | None) -> KernelViolation | None:
    """Return what was found, out of the exceptions that the interpreter puts around it, one a call of a function."""
    while error is not None and not isinstance(error, KernelViolation):
        error = error.__cause__
    return error


@contextmanager
def _hooked(launch: _Launch) -> Iterator[None]:
    """Let a launch see the memory operations of the interpreter."""
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store = builder.create_masked_load, builder.create_masked_store
    update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas
    hooks: dict[str, Callable[..., Any]] = {  # versions of Triton differ in the arguments behind these
        "create_masked_load": lambda ptrs, mask, *rest: load(launch.look(_LOAD, ptrs, mask), mask, *rest),
        "create_masked_store": lambda ptrs, value, mask, *rest: store(
            launch.look(_STORE, ptrs, mask), value, mask, *rest
        ),
        "create_atomic_rmw": lambda op, ptr, value, mask, *rest: update(
            op, launch.look(_UPDATE, ptr, mask), value, mask, *rest
        ),
        "create_atomic_cas": lambda ptr, *rest: exchange(launch.look(_UPDATE, ptr, None), *rest),
    }

    def as_atomic(method: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            with launch.atomically():
                return method(*args)

        return hook

    for name in ("create_atomic_load", "create_atomic_store", "create_atomic_poll"):  # made from plain ones
        if hasattr(builder, name):
            hooks[name] = as_atomic(getattr(builder, name))
    vars(builder).update(hooks)
    try:
        yield
    finally:
        for name in hooks:
            vars(builder).pop(name)
