"""What a benchmark writes into the documentation, between two marks of its own, and where it was run."""

import os
import platform
import sys
from pathlib import Path


def write_between_marks(path: Path, benchmark: str, lines: list[str]) -> None:
    """Put ``lines`` between the marks of ``benchmark``, a path in the repository; there is one pair of them."""
    text = path.read_text()
    begin, end = f"<!-- begin {benchmark} -->", f"<!-- end {benchmark} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"{path}: expected the marks {begin} and {end} once each")
    head, tail = text.split(begin)[0], text.split(end)[1]
    path.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}")


def machine() -> str:
    """Say on what and beside how much other work a benchmark begins."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    load = os.getloadavg()[0]
    cpu = model.partition(":")[2].strip() or platform.machine()
    return f"{cpu}, one thread of {os.cpu_count()}, Python {platform.python_version()}, load {load:.1f} at the start"
