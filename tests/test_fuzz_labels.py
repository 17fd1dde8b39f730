"""Each state label is reached by traces that deserve its name, and not by near misses of the same kind.

The traces are made by hand and run on the reference target; the last operation of each is the one in question.
"""

from dataclasses import dataclass, replace

import pytest

from kvlockstep.fuzz import labels
from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.label_needs import NEEDED_PARTS, PARTS_OF_NODES, hidden_from_labels
from kvlockstep.fuzz.labels import LABELS, Memory, name_of, reached
from kvlockstep.fuzz.lockstep import Lockstep
from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    AllocItem,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
    kind_of,
)
from kvlockstep.fuzz.targets.reference import ReferenceTarget
from kvlockstep.invariants import FULL

PAGES_OF_2 = CacheConfig(page_size=2, n_pages=8, n_rows=3, max_context_len=12)
PAGES_OF_1 = replace(PAGES_OF_2, page_size=1)
FOUR_PAGES = replace(PAGES_OF_2, n_pages=4)
LARGEST = (1 << 31) - 1
LORA = ("lora", None, ())


@dataclass(frozen=True)
class Case:
    """A trace whose last operation reaches the label, or does not."""

    label: object
    what: str
    ops: list
    config: CacheConfig = PAGES_OF_2


def alloc(name, n, drafts=()):
    return Alloc((AllocItem(name, n, tuple(drafts)),))


def flying(name, tokens, n=None, drafts=(), **submit):
    """Matched, and a pass over ``n`` tokens and the drafts in flight."""
    n = len(tokens) if n is None else n
    return [Submit(name, tuple(tokens), **submit), Match(name), alloc(name, n + len(drafts), drafts)]


def running(name, tokens, n=None, sampled=(), **submit):
    n = len(tokens) if n is None else n
    return [*flying(name, tokens, n, **submit), Commit(name, n, tuple(sampled))]


def published(name, tokens, n=None, **submit):
    return [*running(name, tokens, n, **submit), Release(name)]


ONE_EDGE = published("r0", (1, 2, 3, 4, 9))
FORK = [*ONE_EDGE, *published("r1", (1, 2, 5, 6, 9), n=3)]  # parent 1 2, children 3 4 and 5 6
TWICE = [*running("r0", (1, 2, 3)), *running("r1", (1, 2, 3))]  # the same tokens computed by two at once
IN_SECOND_PASS = [*running("r0", (1, 2, 3), sampled=(4,)), alloc("r0", 1)]
OVERALLOCATED = [*flying("r0", (1, 2), drafts=(3, 3, 3)), Commit("r0", 2, (4,))]  # 2 committed, 5 allocated
LOCKED_FIRST = [*running("r0", (1, 1, 9)), Checkpoint("r0"), *published("r1", (2, 2, 9))]
LOCKED_LAST = [*published("r1", (2, 2, 9)), *running("r0", (1, 1, 9)), Checkpoint("r0")]
SEEN_AGAIN = [Submit("r2", (2, 2, 8)), Match("r2"), Abort("r2")]  # a new stamp for 2 2
DRAFTED = flying("r0", (1,), drafts=(5, 5, 5))  # positions [0, 4)

REACH = [
    Case(labels.edge_split, "match inside", [*ONE_EDGE, *running("r1", (1, 2, 5))[:2]]),
    Case(labels.edge_split, "peek inside", [*ONE_EDGE, Submit("r1", (1, 2, 5)), Peek("r1")]),
    Case(
        labels.edge_split,
        "publication that diverges inside",
        [*running("r1", (1, 2, 5, 6)), *ONE_EDGE, Checkpoint("r1")],
    ),
    Case(
        labels.edge_split,
        "publication that ends inside, at release",
        [*running("r1", (1, 2)), *ONE_EDGE, Release("r1")],
    ),
    Case(labels.edge_split, "at retract", [*running("r1", (1, 2)), *ONE_EDGE, Retract("r1", True)]),
    Case(labels.split_at_page_boundary_inside_edge, "match", [*ONE_EDGE, *running("r1", (1, 2, 3, 5))[:2]]),
    Case(
        labels.locked_edge_split,
        "match",
        [*running("r0", (1, 2, 3, 4)), Checkpoint("r0"), *running("r1", (1, 2, 5))[:2]],
    ),
    Case(labels.duplicate_pages_freed_at_checkpoint, "second", [*TWICE, Checkpoint("r0"), Checkpoint("r1")]),
    Case(
        labels.duplicate_pages_freed_at_checkpoint,
        "one duplicate, one new page",
        [*running("r0", (1, 2)), *running("r1", (1, 2, 3, 4)), Checkpoint("r0"), Checkpoint("r1")],
    ),
    Case(labels.row_rewritten_to_canonical_slots, "second", [*TWICE, Checkpoint("r0"), Checkpoint("r1")]),
    Case(labels.partial_last_page_at_checkpoint, "three tokens", [*running("r0", (1, 2, 3)), Checkpoint("r0")]),
    Case(labels.partial_last_page_at_release, "three tokens", published("r0", (1, 2, 3))),
    Case(labels.partial_last_page_at_release, "rejected drafts", [*OVERALLOCATED, Release("r0")]),
    Case(labels.partial_last_page_at_abort, "three tokens", [*running("r0", (1, 2, 3)), Abort("r0")]),
    Case(labels.eviction_made_parent_evictable, "parent stays", [*FORK, Evict(4)]),
    Case(labels.eviction_made_parent_evictable, "parent follows", [*FORK, Evict(6)]),
    Case(
        labels.eviction_made_parent_evictable,
        "alloc",
        [*published("r0", (1, 1)), *published("r0", (1, 1, 2, 2), n=2), *flying("r1", (3,) * 7)],
        FOUR_PAGES,
    ),
    Case(labels.eviction_skipped_locked_leaf, "lru", [*LOCKED_FIRST, Evict(1)]),
    Case(
        labels.eviction_skipped_locked_leaf,
        "lru, the stamp counts",
        [*LOCKED_LAST, *SEEN_AGAIN, Evict(1)],
    ),
    Case(labels.eviction_skipped_locked_leaf, "mru", [*LOCKED_LAST, Evict(1)], replace(PAGES_OF_2, policy="mru")),
    Case(labels.eviction_skipped_locked_leaf, "fifo", [*LOCKED_FIRST, Evict(1)], replace(PAGES_OF_2, policy="fifo")),
    Case(labels.eviction_skipped_locked_leaf, "filo", [*LOCKED_LAST, Evict(1)], replace(PAGES_OF_2, policy="filo")),
    Case(labels.eviction_skipped_locked_leaf, "lfu", [*LOCKED_FIRST, Evict(1)], replace(PAGES_OF_2, policy="lfu")),
    Case(
        labels.eviction_skipped_locked_leaf,
        "slru, the victim was hit twice",
        [*published("r1", (2, 2, 9)), *published("r1", (2, 2, 9), n=1), *LOCKED_LAST[5:], Evict(1)],
        replace(PAGES_OF_2, policy="slru"),
    ),
    Case(
        labels.eviction_skipped_locked_leaf,
        "priority",
        [*published("r1", (2, 2, 9), priority=3), *running("r0", (1, 1, 9)), Checkpoint("r0"), Evict(1)],
        replace(PAGES_OF_2, policy="priority"),
    ),
    *(
        Case(label, "two leaves", [*FORK, Evict(1)], replace(PAGES_OF_2, policy=policy))
        for policy, label in labels.VICTIM_CHOSEN.items()
    ),
    Case(labels.allocation_evicted, "full pool", [*ONE_EDGE, *flying("r1", (7,) * 5)], FOUR_PAGES),
    Case(labels.out_of_pages, "all held", [*running("r0", (1,) * 6), *flying("r1", (2,) * 3)], FOUR_PAGES),
    Case(
        labels.out_of_rows,
        "all held",
        [op for i in range(4) for op in running(f"r{i}", (1,))][:-1],
    ),
    Case(labels.row_reused, "after release", [*published("r0", (1,)), *flying("r1", (2,))]),
    Case(
        labels.page_reused_while_old_row_names_it,
        "aborted row, page to another row",
        [*running("r0", (1, 2)), *running("r1", (3, 4), sampled=(5,)), Abort("r0"), alloc("r1", 1)],
    ),
    Case(
        labels.page_reused_while_old_row_names_it,
        "published, evicted, reused",
        [
            *running("r0", (1, 2)),
            *running("r1", (3, 4), sampled=(5,)),
            Release("r0"),
            Evict(1),
            alloc("r1", 1),
        ],
    ),
    Case(
        labels.page_reused_while_old_row_names_it,
        "partial page of a release",
        [*running("r0", (1, 2, 3)), *running("r1", (3, 4), sampled=(5,)), Release("r0"), alloc("r1", 1)],
    ),
    Case(
        labels.page_reused_while_old_row_names_it,
        "pending abort landed",
        [*flying("r0", (1, 2)), *running("r1", (3, 4), sampled=(5,)), Abort("r0"), Commit("r0", 0), alloc("r1", 1)],
    ),
    Case(labels.pool_exactly_full, "eight slots", flying("r0", (1,) * 7), FOUR_PAGES),
    Case(labels.tail_reused_without_new_page, "one position", [*OVERALLOCATED, alloc("r0", 1)]),
    Case(labels.tail_reused_without_new_page, "to its very end", [*OVERALLOCATED, alloc("r0", 3, (7, 7))]),
    Case(labels.tail_reused_without_new_page, "after a pass thrown away", [*DRAFTED, Commit("r0", 0), alloc("r0", 1)]),
    Case(
        labels.batch_of_two_or_more,
        "two",
        [
            *running("r0", (1, 2))[:2],
            *running("r1", (3,))[:2],
            Alloc((AllocItem("r1", 1), AllocItem("r0", 2))),
        ],
    ),
    Case(labels.later_chunk_of_a_prefill, "second half", [*running("r0", (1, 2, 3, 4), n=2), alloc("r0", 2)]),
    Case(
        labels.later_chunk_of_a_prefill,
        "after a matched prefix and a chunk",
        [*ONE_EDGE, *running("r1", (1, 2, 5, 6, 7), n=1), Checkpoint("r1"), alloc("r1", 1)],
    ),
    Case(labels.draft_rejected_across_page_boundary, "three of three rejected", [*DRAFTED, Commit("r0", 1)]),
    Case(labels.draft_rejected_across_page_boundary, "two of three rejected", [*DRAFTED, Commit("r0", 2)]),
    Case(labels.pass_thrown_away, "kept nothing", [*flying("r0", (1, 2)), Commit("r0", 0)]),
    Case(labels.pending_abort_landed, "commit", [*flying("r0", (1,)), Abort("r0"), Commit("r0", 1)]),
    Case(labels.abort_while_in_flight, "abort", [*flying("r0", (1,)), Abort("r0")]),
    Case(labels.retract_then_rematch, "running", [*running("r0", (1,)), Retract("r0"), Match("r0")]),
    Case(labels.retract_then_rematch, "matched", [*flying("r0", (1,))[:2], Retract("r0"), Peek("r0"), Match("r0")]),
    Case(labels.match_of_whole_prompt_minus_one, "tokens", [*ONE_EDGE, *flying("r1", (1, 2, 3))[:2]]),
    Case(
        labels.match_of_whole_prompt_minus_one,
        "pairs",
        [*published("r0", (1, 2, 3)), *flying("r1", (1, 2, 3, 7))[:2]],
        replace(PAGES_OF_2, key_units="bigram"),
    ),
    Case(
        labels.match_ended_inside_prompt,
        "other tokens follow",
        [*ONE_EDGE, *flying("r1", (1, 2, 5, 5))[:2]],
    ),
    Case(
        labels.same_tokens_in_two_namespaces,
        "plain and lora",
        [*published("r0", (1, 2, 3)), *published("r1", (1, 2, 3), namespace=LORA)],
    ),
    Case(labels.reset_with_old_handles_alive, "released", [*published("r0", (1, 2)), Reset()]),
]

LONG_EDGE = published("r0", (1, 2, 3, 4, 5, 6, 7, 8, 9))

REACH += [
    Case(
        labels.edge_of_four_pages_split_behind_its_second,
        "match behind the third",
        [*LONG_EDGE, Submit("r1", (1, 2, 3, 4, 5, 6, 0)), Match("r1")],
    ),
    Case(labels.eviction_found_nothing, "empty tree", [Evict(1)]),
    Case(labels.eviction_found_nothing, "all locked", [*running("r0", (1, 2, 3)), Checkpoint("r0"), Evict(2)]),
    Case(labels.peek_renewed_a_victim, "whole edge", [*ONE_EDGE, Submit("r1", (1, 2, 3, 4, 8)), Peek("r1")]),
    Case(labels.peek_renewed_a_victim, "inside an edge", [*ONE_EDGE, Submit("r1", (1, 2, 8)), Peek("r1")]),
    Case(labels.private_request_published_nothing, "one page", published("r0", (1, 2, 3), private=True)),
    Case(
        labels.private_request_published_nothing,
        "pairs",
        published("r0", (1, 2, 3), private=True),
        replace(PAGES_OF_2, key_units="bigram"),
    ),
    Case(labels.token_of_31_bits_published, "last of a page", published("r0", (1, LARGEST, 2))),
    Case(
        labels.token_of_31_bits_published,
        "in a pair",
        published("r0", (1, 1, LARGEST)),
        replace(PAGES_OF_2, key_units="bigram"),
    ),
]

MISS = [
    Case(
        labels.edge_of_four_pages_split_behind_its_second,
        "behind its first",
        [*LONG_EDGE, Submit("r1", (1, 2, 0)), Match("r1")],
    ),
    Case(
        labels.edge_of_four_pages_split_behind_its_second,
        "edge of two pages",
        [*ONE_EDGE, Submit("r1", (1, 2, 0)), Match("r1")],
    ),
    Case(labels.eviction_found_nothing, "one node", [*ONE_EDGE, Evict(1)]),
    Case(labels.peek_renewed_a_victim, "nothing found", [*ONE_EDGE, Submit("r1", (7, 7, 8)), Peek("r1")]),
    Case(
        labels.peek_renewed_a_victim,
        "locked leaf",
        [*running("r0", (1, 2, 3)), Checkpoint("r0"), Submit("r1", (1, 2, 8)), Peek("r1")],
    ),
    Case(labels.private_request_published_nothing, "published", published("r0", (1, 2, 3))),
    Case(labels.private_request_published_nothing, "no whole page", published("r0", (1,), private=True)),
    Case(
        labels.private_request_published_nothing,
        "no cache shares",
        published("r0", (1, 2, 3), private=True),
        replace(PAGES_OF_2, prefix_sharing=False),
    ),
    Case(labels.token_of_31_bits_published, "small tokens", published("r0", (1, 2, 3))),
    Case(labels.token_of_31_bits_published, "behind the last whole page", published("r0", (1, 2, LARGEST))),
    Case(labels.edge_split, "match of a whole edge", [*ONE_EDGE, *running("r1", (1, 2, 3, 4, 5))[:2]]),
    Case(labels.edge_split, "match that ends in the first page", [*ONE_EDGE, *running("r1", (1, 5, 3))[:2]]),
    Case(labels.edge_split, "publication below an edge", [*ONE_EDGE, *published("r1", (1, 2, 3, 4, 5, 6), n=2)]),
    Case(
        labels.split_at_page_boundary_inside_edge,
        "pages of one, where nothing else can be",
        [*ONE_EDGE, *running("r1", (1, 2, 5))[:2]],
        PAGES_OF_1,
    ),
    Case(labels.locked_edge_split, "nobody holds it", [*ONE_EDGE, *running("r1", (1, 2, 5))[:2]]),
    Case(labels.duplicate_pages_freed_at_checkpoint, "first", [*TWICE, Checkpoint("r0")]),
    Case(
        labels.duplicate_pages_freed_at_checkpoint,
        "matched, not computed again",
        [*running("r0", (1, 2, 3)), Checkpoint("r0"), *running("r1", (1, 2, 3), n=1), Checkpoint("r1")],
    ),
    Case(labels.duplicate_pages_freed_at_checkpoint, "published before", [*TWICE, Checkpoint("r0"), Checkpoint("r0")]),
    Case(labels.row_rewritten_to_canonical_slots, "first", [*TWICE, Checkpoint("r0")]),
    Case(labels.partial_last_page_at_checkpoint, "whole pages", [*running("r0", (1, 2)), Checkpoint("r0")]),
    Case(
        labels.partial_last_page_at_checkpoint,
        "whole pages committed, more allocated",
        [*OVERALLOCATED, Checkpoint("r0")],
    ),
    Case(
        labels.partial_last_page_at_checkpoint,
        "refused in flight",
        [*IN_SECOND_PASS, Checkpoint("r0")],
    ),
    Case(labels.partial_last_page_at_release, "whole pages", published("r0", (1, 2))),
    Case(labels.partial_last_page_at_release, "refused in flight", [*flying("r0", (1, 2, 3)), Release("r0")]),
    Case(labels.partial_last_page_at_abort, "whole pages", [*running("r0", (1, 2)), Abort("r0")]),
    Case(labels.partial_last_page_at_abort, "pending, nothing freed", [*flying("r0", (1, 2, 3)), Abort("r0")]),
    Case(labels.partial_last_page_at_abort, "no row yet", [*ONE_EDGE, *flying("r1", (1, 2, 3))[:2], Abort("r1")]),
    Case(labels.partial_last_page_at_abort, "never matched", [Submit("r0", (1, 2, 3)), Abort("r0")]),
    Case(labels.eviction_made_parent_evictable, "one child left", [*FORK, Evict(2)]),
    Case(labels.eviction_made_parent_evictable, "no parent but the root", [*ONE_EDGE, Evict(2)]),
    Case(labels.eviction_made_parent_evictable, "parent locked", [*FORK, *flying("r2", (1, 2, 9))[:2], Evict(100)]),
    Case(labels.eviction_skipped_locked_leaf, "the locked one is newer", [*LOCKED_LAST, Evict(1)]),
    Case(
        labels.eviction_skipped_locked_leaf, "nothing evicted", [*running("r0", (1, 1, 9)), Checkpoint("r0"), Evict(1)]
    ),
    Case(labels.eviction_skipped_locked_leaf, "nobody holds one", [*FORK, Evict(1)]),
    Case(labels.eviction_skipped_locked_leaf, "mru", [*LOCKED_FIRST, Evict(1)], replace(PAGES_OF_2, policy="mru")),
    Case(
        labels.eviction_skipped_locked_leaf,
        "fifo, the stamp does not count",
        [*LOCKED_LAST, *SEEN_AGAIN, Evict(1)],
        replace(PAGES_OF_2, policy="fifo"),
    ),
    Case(
        labels.eviction_skipped_locked_leaf,
        "priority, the locked one is higher",
        [*running("r0", (1, 1, 9), priority=1), Checkpoint("r0"), *published("r1", (2, 2, 9)), Evict(1)],
        replace(PAGES_OF_2, policy="priority"),
    ),
    *(
        Case(label, what, [*ops, Evict(1)], replace(PAGES_OF_2, policy=policy))
        for policy, label in labels.VICTIM_CHOSEN.items()
        for what, ops in (("one leaf", ONE_EDGE), ("the other leaf locked", LOCKED_LAST), ("no leaf", []))
    ),
    *(
        Case(label, "another policy", [*FORK, Evict(1)], replace(PAGES_OF_2, policy=other))
        for (_, label), other in zip(labels.VICTIM_CHOSEN.items(), ["mru", "lru", *["mru"] * 6], strict=True)
    ),
    Case(labels.allocation_evicted, "room", [*ONE_EDGE, *flying("r1", (7,) * 4)], FOUR_PAGES),
    Case(labels.allocation_evicted, "refused", [*running("r0", (1,) * 6), *flying("r1", (2,) * 3)], FOUR_PAGES),
    Case(labels.out_of_pages, "last page", [*running("r0", (1,) * 6), *flying("r1", (2,) * 2)], FOUR_PAGES),
    Case(labels.out_of_pages, "out of rows", [op for i in range(4) for op in running(f"r{i}", (1,))][:-1]),
    Case(labels.out_of_rows, "last row", [op for i in range(3) for op in running(f"r{i}", (1,))][:-1]),
    Case(labels.out_of_rows, "out of pages", [*running("r0", (1,) * 6), *flying("r1", (2,) * 3)], FOUR_PAGES),
    Case(labels.row_reused, "first holder", flying("r0", (1,))),
    Case(
        labels.row_reused,
        "later pass in a row that was reused",
        [*published("r0", (1,)), *running("r1", (2,), sampled=(3,)), alloc("r1", 1)],
    ),
    Case(
        labels.page_reused_while_old_row_names_it,
        "the row went with the page",
        [*running("r0", (1, 2)), Abort("r0"), *flying("r1", (3, 4))],
    ),
    Case(
        labels.page_reused_while_old_row_names_it,
        "its page is the tree's now",
        [*running("r0", (1, 2)), *running("r1", (3, 4), sampled=(5,)), Release("r0"), alloc("r1", 1)],
    ),
    Case(
        labels.page_reused_while_old_row_names_it,
        "duplicate: the row was rewritten",
        [
            *running("r0", (1, 2)),
            *running("r1", (1, 2)),
            *running("r2", (3, 4), sampled=(5,)),
            Release("r0"),
            Release("r1"),
            alloc("r2", 1),
        ],
    ),
    Case(labels.pool_exactly_full, "one page left", flying("r0", (1,) * 6), FOUR_PAGES),
    Case(labels.tail_reused_without_new_page, "one position more", [*OVERALLOCATED, alloc("r0", 4, (7, 7, 7))]),
    Case(
        labels.tail_reused_without_new_page,
        "rest of the last page",
        [*running("r0", (1,), sampled=(2,)), alloc("r0", 1)],
    ),
    Case(labels.batch_of_two_or_more, "one", flying("r0", (1,))),
    Case(
        labels.batch_of_two_or_more,
        "refused",
        [*flying("r0", (1,)), *flying("r1", (1,))[:2], Alloc((AllocItem("r1", 1), AllocItem("r0", 1)))],
    ),
    Case(labels.later_chunk_of_a_prefill, "first chunk", flying("r0", (1, 2, 3, 4), n=2)),
    Case(labels.later_chunk_of_a_prefill, "first chunk after a match", [*ONE_EDGE, *flying("r1", (1, 2, 5, 6), n=1)]),
    Case(labels.later_chunk_of_a_prefill, "decode", [*running("r0", (1, 2), sampled=(3,)), alloc("r0", 1)]),
    Case(
        labels.later_chunk_of_a_prefill,
        "the first chunk again, as it was thrown away",
        [*flying("r0", (1, 2, 3, 4), n=2), Commit("r0", 0), alloc("r0", 2)],
    ),
    Case(labels.draft_rejected_across_page_boundary, "rejected within a page", [*DRAFTED, Commit("r0", 3)]),
    Case(labels.draft_rejected_across_page_boundary, "all accepted", [*DRAFTED, Commit("r0", 4)]),
    Case(labels.draft_rejected_across_page_boundary, "thrown away", [*DRAFTED, Commit("r0", 0)]),
    Case(labels.draft_rejected_across_page_boundary, "refused", [*DRAFTED, Commit("r0", 5)]),
    Case(labels.draft_rejected_across_page_boundary, "aborted meanwhile", [*DRAFTED, Abort("r0"), Commit("r0", 1)]),
    Case(labels.pass_thrown_away, "kept", [*flying("r0", (1, 2)), Commit("r0", 2)]),
    Case(labels.pass_thrown_away, "aborted meanwhile", [*flying("r0", (1, 2)), Abort("r0"), Commit("r0", 0)]),
    Case(labels.pass_thrown_away, "refused", [*running("r0", (1, 2)), Commit("r0", 0)]),
    Case(labels.pending_abort_landed, "nobody aborted", running("r0", (1,))),
    Case(
        labels.pending_abort_landed,
        "another one of that name",
        [*flying("r0", (1,)), Abort("r0"), Commit("r0", 1), *running("r0", (2,))],
    ),
    Case(labels.pending_abort_landed, "refused", [*flying("r0", (1,)), Abort("r0"), Commit("r0", 2)]),
    Case(labels.abort_while_in_flight, "running", [*running("r0", (1,)), Abort("r0")]),
    Case(labels.abort_while_in_flight, "new", [Submit("r0", (1,)), Abort("r0")]),
    Case(labels.retract_then_rematch, "never retracted", flying("r0", (1,))[:2]),
    Case(
        labels.retract_then_rematch,
        "another one of that name",
        [*running("r0", (1,)), Retract("r0"), Abort("r0"), *flying("r0", (1,))[:2]],
    ),
    Case(labels.match_of_whole_prompt_minus_one, "a page short", [*ONE_EDGE, *flying("r1", (1, 2, 3, 4))[:2]]),
    Case(labels.match_of_whole_prompt_minus_one, "nothing to match", flying("r0", (1,))[:2]),
    Case(
        labels.match_of_whole_prompt_minus_one,
        "pairs, one token more",
        [*published("r0", (1, 2, 3)), *flying("r1", (1, 2, 3, 7, 7))[:2]],
        replace(PAGES_OF_2, key_units="bigram"),
    ),
    Case(labels.match_ended_inside_prompt, "whole prompt", [*ONE_EDGE, *flying("r1", (1, 2, 3))[:2]]),
    Case(labels.match_ended_inside_prompt, "nothing found", [*ONE_EDGE, *flying("r1", (5, 2, 3))[:2]]),
    Case(labels.same_tokens_in_two_namespaces, "one namespace", [*ONE_EDGE, *published("r1", (1, 2, 5, 5), n=2)]),
    Case(
        labels.same_tokens_in_two_namespaces,
        "other tokens",
        [*published("r0", (1, 2, 3)), *published("r1", (2, 1, 3), namespace=LORA)],
    ),
    Case(
        labels.same_tokens_in_two_namespaces,
        "refused",
        [
            *published("r0", (1, 2, 3)),
            *published("r1", (1, 2, 3), namespace=LORA),
            *flying("r0", (5,)),
            Release("r0"),
        ],
    ),
    Case(labels.reset_with_old_handles_alive, "fresh cache", [Reset()]),
    Case(labels.reset_with_old_handles_alive, "no row was ever taken", [*flying("r0", (1,))[:2], Abort("r0"), Reset()]),
    Case(
        labels.reset_with_old_handles_alive,
        "refused",
        [*published("r0", (1, 2)), *flying("r0", (1,)), Reset()],
    ),
]


OF_NODES = tuple(PARTS_OF_NODES)
HIDEABLE = ("rows", "row_generations", "requests", "nodes", "free_pages", *OF_NODES)


def without(snapshot, hidden):
    """Take parts of a snapshot away."""
    pool, nodes = snapshot.pools[FULL], snapshot.nodes
    unseen = dict.fromkeys(name for part in hidden for name in PARTS_OF_NODES.get(part, ()))
    if unseen:
        nodes = [replace(view, **unseen) for view in nodes]
    fields = {part: None for part in hidden if part not in ("free_pages", *OF_NODES)}
    pools = {FULL: replace(pool, free_pages=None)} if "free_pages" in hidden else snapshot.pools
    return replace(snapshot, **{"pools": pools, "nodes": nodes, **fields})


def labels_of_last(case, hidden=()):
    """Run a trace and return the labels that its last operation reached, told without the hidden parts."""
    memory = Memory(case.config)
    names = []

    def watch(op, seen):
        before, now = without(seen.before, hidden), without(seen.now, hidden)
        names.append(reached(replace(seen, before=before, now=now), memory))

    lockstep = Lockstep(case.config, ReferenceTarget(case.config), watch=watch)
    outcomes = [lockstep.run(op).refused for op in case.ops]
    refused = [(step, refused) for step, refused in enumerate(outcomes[:-1]) if refused]
    assert not refused, f"only the last operation of a case may be refused, got {refused}"
    return names[-1]


def title(case):
    return f"{case.label.__name__}-{case.what}"


@pytest.mark.parametrize("case", REACH, ids=title)
def test_label_is_reached(case):
    assert name_of(case.label) in labels_of_last(case)


@pytest.mark.parametrize("case", MISS, ids=title)
def test_label_is_not_reached(case):
    assert name_of(case.label) not in labels_of_last(case)


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label.__name__)
def test_label_has_cases_that_reach_and_miss_it_by_an_operation_it_is_asked_after(label):
    for cases in (REACH, MISS):
        kinds = {kind_of(case.ops[-1]) for case in cases if case.label is label}
        assert kinds, f"{label.__name__} has no case"
        assert kinds <= set(LABELS[label].kinds), f"{label.__name__} is asked after {LABELS[label].kinds}"


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label.__name__)
def test_label_is_told_from_the_parts_that_it_needs_and_from_no_other(label):
    cases = [case for case in REACH if case.label is label]
    needed = NEEDED_PARTS.get(label, ())
    for part in needed:
        assert not [case.what for case in cases if name_of(label) in labels_of_last(case, [part])], part

    # parts of a node are hidden where nodes are
    others = [part for part in HIDEABLE if part not in needed and not (part in OF_NODES and "nodes" not in needed)]
    assert [case.what for case in cases if name_of(label) not in labels_of_last(case, others)] == []


def test_each_part_is_named_when_it_is_hidden():
    lockstep = Lockstep(PAGES_OF_2, ReferenceTarget(PAGES_OF_2))
    for op in ONE_EDGE:
        lockstep.run(op)

    assert hidden_from_labels(lockstep.now) == set()
    for part in HIDEABLE:
        assert hidden_from_labels(without(lockstep.now, [part])) == {part}
    assert set(HIDEABLE) == {part for parts in NEEDED_PARTS.values() for part in parts}


def test_label_names_are_different():
    assert len({name_of(label) for label in LABELS}) == len(LABELS)


def test_label_is_not_reached_by_what_a_snapshot_does_not_show():
    """A target that shows nothing reaches only what its answers show."""
    config = PAGES_OF_2
    names = set()
    memory = Memory(config)

    def watch(op, seen):
        now, before = (
            replace(s, rows=None, row_generations=None, requests=None, nodes=None) for s in (seen.now, seen.before)
        )
        names.update(reached(replace(seen, now=now, before=before), memory))

    lockstep = Lockstep(config, ReferenceTarget(config), watch=watch)
    for op in [*FORK, *TWICE, Checkpoint("r0"), Checkpoint("r1"), Abort("r0"), Release("r1"), Evict(100), Reset()]:
        lockstep.run(op)

    assert names == {"match ended inside prompt", "match of whole prompt minus one"}
