"""Named, deliberate differences from SPEC that a cache may declare; the model then does what each one says.

An allowance is as narrow as its sentence: whatever it does not name stays as SPEC has it, and is compared.
Each is counted where it made a difference (`Cache.allowed`), so that a declared one that is never used shows.
"""

SENTENCES = {
    "split_refreshes_tail": (
        "Where a match or a publication splits an edge, the unmatched lower part is stamped too, just before the path."
    ),
    "split_dates_upper_new": "The upper part of a split counts as created at the split.",
    "prompt_split": (
        "A publication that reaches past the prompt also ends a node at the prompt's whole pages, stamps the path to "
        "it once more and gives that path the request's priority + 1; it counts no hit."
    ),
    "page_nodes": "Every published page is a node of its own.",
    "pages_overestimated": (
        "An alloc that takes new slots may evict as if each request of the batch needed up to one page more: a victim "
        "beyond the need is legal only while fewer slots are free than the batch takes, plus page_size for each of its "
        "requests, with pages of two or more."
    ),
    "evicts_before_refusal": "An alloc that is refused with OutOfPages may have evicted first, in policy order.",
}
"""What each allowance says, in one sentence."""

ALLOWANCES = tuple(SENTENCES)
"""All there are."""
