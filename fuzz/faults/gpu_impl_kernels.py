"""Faults in the kernels of `gpu_impl`; the torch twins do not have them, so they are looked for interpreted."""

from kvlockstep.fuzz.faults.fault import SourceFault

KERNEL_FAULTS = (
    SourceFault(
        name="kernel-offset-of-batch-position",
        story="The kernel that expands pages takes the slot within a page from the number in the batch.",
        kind="page versus token units",
        bug="sgl-project/sglang#7112",
        module="kernels.py",
        old="* PAGE_SIZE + pos % PAGE_SIZE",
        new="* PAGE_SIZE + number % PAGE_SIZE",
        laws=("PageNotConsecutive", "WriteSlotIllegal"),
        lane="interpret",
    ),
    SourceFault(
        name="kernel-value-of-first-layer",
        story="The kernel that writes KV sends the values of every layer to the first one.",
        kind="component or tier not valid together",
        bug="sgl-project/sglang#26866",
        module="kernels.py",
        old="    tl.store(pool_ptr + target + v_plane,",
        new="    tl.store(pool_ptr + target % (2 * v_plane) + v_plane,",
        laws=("ContentWrong",),
        lane="interpret",
    ),
    SourceFault(
        name="kernel-row-rewrite-one-short",
        story="The kernel that rewrites a row to the canonical slots leaves out the last position.",
        kind="insert and match disagree, row not remapped",
        module="kernels.py",
        old="    mask = i < n\n    page = tl.load(pages_ptr",
        new="    mask = i < n - 1\n    page = tl.load(pages_ptr",
        laws=("RowOffCanonicalPath", "PageOutOfRange"),
        lane="interpret",
    ),
    SourceFault(
        name="kernel-search-one-step-short",
        story="The kernel that expands pages searches its run one step too few unless the runs are a power of two.",
        kind="page versus token units",
        module="kernels.py",
        old="        (n_runs - 1).bit_length(),\n",
        new="        n_runs.bit_length() - 1,\n",
        laws=("WriteSlotIllegal", "WriteSlotRepeated", "PageLeaked"),
        lane="interpret",
    ),
)
