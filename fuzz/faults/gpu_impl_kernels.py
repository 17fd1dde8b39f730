"""Faults in what `gpu_impl` does on the device.

The torch twins do not have those in the kernels, so these are looked for interpreted.
"""

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
        name="kernel-layers-half-a-plane-apart",
        story="The kernel that reads KV takes a layer to be as large as its keys, and reads values of the one before.",
        kind="component or tier not valid together",
        module="kernels.py",
        old="    source = (layer * 2 * n_slots + slot) * WORDS + word\n",
        new="    source = (layer * n_slots + slot) * WORDS + word\n",
        laws=("ContentWrong",),
        lane="interpret",
    ),
    SourceFault(
        name="decode-writes-keys-as-values",
        story="A pass of a single token, as in decode, writes its keys in place of its values too.",
        kind="component or tier not valid together",
        module="device.py",
        old="self._as_words(k), self._as_words(v))",
        new="self._as_words(k), self._as_words(v if len(slots) > 1 else k))",
        laws=("ContentWrong",),
    ),
    SourceFault(
        name="padding-written-to-last-slot",
        story="A pass of an odd number of tokens is padded, and the padding is written to the last slot of the pool.",
        kind="stale entry in a side table after recycling",
        bug="vllm-project/vllm#43810",
        module="device.py",
        old="        if slots.shape[0]:\n",
        new="        if slots.shape[0] % 2:\n"
        "            slots = torch.cat((slots, slots.new_tensor([self.kv_pool.shape[2] - 1])))\n"
        "            k, v = torch.cat((k, k[:, -1:]), dim=1), torch.cat((v, v[:, -1:]), dim=1)\n"
        "        if slots.shape[0]:\n",
        laws=("SlotChangedOutsideWriteSet", "ContentWrong"),
    ),
)
