"""Faults in how `gpu_impl` takes pages, gives them back and makes room for more."""

from kvlockstep.fuzz.faults.fault import SourceFault

MEMORY_FAULTS = (
    SourceFault(
        name="last-pages-taken-stay-free",
        story="A request that takes all the free pages is given the list of them, and the list is left as it was.",
        kind="reuse while a reader or writer is still in flight",
        module="cache.py",
        old="            request.pages.extend(self.free_pages.take(n_pages))\n",
        new="            if n_pages == len(self.free_pages):\n"
        "                request.pages.extend(reversed(self.free_pages.free))\n"
        "            else:\n"
        "                request.pages.extend(self.free_pages.take(n_pages))\n",
        laws=("PageOwnedTwice",),
        needs=("only when the pool is exactly full",),
    ),
    SourceFault(
        name="late-free-takes-page-from-third",
        story="The last page of an ended request is freed again when the next one ends, unless it is seen to be free.",
        kind="same thing freed twice",
        bug="sgl-project/sglang#25590",
        module="cache.py",
        old="        self.free_pages.give_back(live.pages[whole_pages(live.protected_len, self.config.page_size) :])\n",
        new="        own_pages = live.pages[whole_pages(live.protected_len, self.config.page_size) :]\n"
        "        self.free_pages.give_back(own_pages)\n"
        "        late, self._late = getattr(self, '_late', no_tokens()), own_pages[-1:]\n"
        "        if late and late[0] not in self.free_pages.free and late[0] not in self.tree.all_pages():\n"
        "            self.free_pages.give_back(late)\n",
        laws=("PageOwnedTwice",),
        needs=("three requests", "page reused by a third request"),
    ),
    SourceFault(
        name="end-frees-one-page-too-early",
        story="The end of a request that holds a prefix frees from one page too early on, up to one page too early.",
        kind="same thing freed twice",
        bug="sgl-project/sglang#24193",
        module="cache.py",
        old="        self.free_pages.give_back(live.pages[whole_pages(live.protected_len, self.config.page_size) :])\n",
        new="        first = whole_pages(live.protected_len, self.config.page_size)\n"
        "        own_pages = live.pages[first:]\n"
        "        if first and own_pages:\n"
        "            own_pages = live.pages[first - 1 : -1]\n"
        "        self.free_pages.give_back(own_pages)\n",
        laws=("PageOwnedTwice",),
        needs=("balanced totals with two owners",),
    ),
    SourceFault(
        name="free-of-several-lists-one-twice",
        story="Of pages that come back together the last one is left out, and the one before it listed twice.",
        kind="same thing freed twice",
        bug="vllm-project/vllm#42571",
        module="free_stack.py",
        old="        self.free.extend(numbers)",
        new="        self.free.extend(numbers[:-1])\n        self.free.extend(numbers[-2:-1] or numbers[-1:])",
        laws=("PageOwnedTwice", "PageLeaked"),
        needs=("balanced totals with two owners",),
    ),
    SourceFault(
        name="eviction-counts-slots-for-pages",
        story="What an eviction is asked for counts in pages and what it has freed in slots, so it stops too early.",
        kind="page versus token units",
        bug="sgl-project/sglang#32433",
        module="cache.py",
        old="            freed += len(pages)\n",
        new="            freed += len(pages) * self.config.page_size\n",
        laws=("EvictPromiseBroken", "TargetRaised"),
    ),
    SourceFault(
        name="inner-nodes-not-counted-as-room",
        story="Only leaves count as room that eviction can make, so a request is refused that there would be room for.",
        kind="promise of capacity broken, or no progress",
        bug="ai-dynamo/dynamo#10919",
        module="cache.py",
        old="        if need > len(self.free_pages) + self.tree.evictable:\n",
        new="        leaves = sum(len(self.tree.pages[node]) // 4 for node in self.tree.victims.nodes())\n"
        "        if need > len(self.free_pages) + leaves:\n",
        laws=("AllocPromiseBroken",),
    ),
)
