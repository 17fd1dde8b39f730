"""What the gate leaves for other programs: a JUnit file, annotations for GitHub, a summary in Markdown.

Texts come from targets and traces of strangers; what has a meaning in a format is escaped in it. In the JUnit file a
test fails or has an error only if it is a reason why the gate is shut.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from kvlockstep.fuzz.campaign.ending import blocking, states_of
from kvlockstep.fuzz.campaign.folder import Cause, Progress, Settings
from kvlockstep.fuzz.campaign.supervisor import StoredRun
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, INTERRUPTED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.failures import replay_line
from kvlockstep.fuzz.files import replace_file
from kvlockstep.fuzz.verdict import Verdict

WORDS = {
    CLEAN: "clean",
    VIOLATION: "violation",
    USAGE: "wrong usage",
    UNKNOWN: "unknown",
    CRASHED: "a worker crashed or hung",
    BROKEN: "the harness failed",
    INTERRUPTED: "interrupted",
}

MAX_TEXT = 8_000
"""Characters of one text, at most: GitHub drops an annotation or a summary that is too long."""


@dataclass(frozen=True, slots=True)
class Result:
    """All that a gate came to."""

    settings: Settings
    progress: Progress
    stored: Sequence[StoredRun]
    verdict: Verdict
    failures: Path  # folder that those of the causes are in
    base: str | None = None
    texts: dict[str, str] = field(default_factory=dict)  # message of each cause, by its key
    not_met: Sequence[str] = ()  # known signatures that did not occur

    def replay_line(self, cause: Cause) -> str:
        return replay_line(self.failures / cause.folder / "trace.jsonl", cause.target)

    def text_of(self, cause: Cause) -> str:
        return _short(self.texts.get(cause.key, cause.signature))

    def cause_of(self, run: StoredRun) -> Cause | None:
        """Return the cause that a stored trace showed."""
        met = (run.text, run.target)
        return next((c for c in self.progress.causes.values() if (c.signature, c.target) == met), None)


# JUnit

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Test = tuple[str, str, str | None, str]
"""Group, name, what came of it (None: it passed), and the text that says so."""


def write_junit(path: Path, result: Result | Verdict) -> None:
    """Write a JUnit file: a test for each regression, each canary, the cases of each lane, each cause, and the verdict.

    A gate that ran nothing has its verdict only. Raises OSError.
    """
    suite = ElementTree.Element("testsuite", name="kvlockstep")
    tests = list(_tests(result)) if isinstance(result, Result) else [_test_of(result)]
    suite.set("tests", str(len(tests)))
    for ending, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(count, str(sum(test[2] == ending for test in tests)))
    suite.set("time", f"{result.progress.seconds if isinstance(result, Result) else 0.0:.1f}")
    for group, name, kind, text in tests:
        test = ElementTree.SubElement(suite, "testcase", classname=f"kvlockstep.{group}", name=_xml(name), time="0")
        if kind is not None:
            part = ElementTree.SubElement(test, kind, message=_xml(text.splitlines()[0] if text else kind))
            part.text = _xml(text)
            if kind != "skipped":
                part.set("type", f"kvlockstep.{group}")
        elif text:
            ElementTree.SubElement(test, "system-out").text = _xml(text)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    xml = ElementTree.tostring(root, encoding="unicode")
    _write(path, f'<?xml version="1.0" encoding="UTF-8"?>\n{xml}\n')


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)


def _tests(result: Result) -> Iterator[Test]:
    new = blocking(result.progress)
    for run in result.stored:
        yield "regressions", f"{run.file} on {_place(run.target, run.lane)}", *_ending_of(result, run)
    for state in states_of(result.progress):
        place = _place(state.order.target, state.order.lane)
        caught = state.canary is not None and state.canary.caught
        yield "canary", place, None if caught else "error", "" if caught else "the canary was not found"
        yield "cases", place, None, f"{state.statistics.done} operations done in {state.statistics.cases} cases"
    for cause in result.progress.causes.values():
        text = f"{result.text_of(cause)}\n{result.replay_line(cause)}"
        name = f"{cause.signature} on {cause.target}"
        if cause in new:
            yield "causes", name, "failure", text
        else:
            yield "causes", name, "skipped", f"{_why_not(cause, result.base)}: {text}"
    yield _test_of(result.verdict)


def _ending_of(result: Result, run: StoredRun) -> tuple[str | None, str]:
    if run.verdict == "clean":
        return None, ""
    if run.verdict == "skipped":
        return "skipped", run.text
    cause = result.cause_of(run)
    if run.verdict == "violates" and cause is not None:
        if cause in blocking(result.progress):
            return "failure", run.text
        return "skipped", f"{_why_not(cause, result.base)}: {run.text}"
    blocks = result.verdict.code != CLEAN
    return "error" if blocks else "skipped", f"{run.verdict}: {run.text}" if run.text else run.verdict


def _test_of(verdict: Verdict) -> Test:
    text = "\n".join([WORDS[verdict.code], *verdict.lines])
    return "verdict", "verdict", None if verdict.code in (CLEAN, VIOLATION) else "error", text


def _place(target: str, lane: str | None) -> str:
    return target if lane is None else f"{target} {lane}"


def _xml(text: str) -> str:
    """Replace what XML cannot hold at all."""
    return _NOT_XML.sub("?", text)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n... {len(text) - MAX_TEXT:,} characters more"


def _why_not(cause: Cause, base: str | None) -> str:
    """Say why a cause does not block."""
    if cause.known:
        return "known"
    if cause.old:
        return f"old, fails on {base} too"
    if cause.replays is None:
        return "not tried in a fresh process"
    return "did not replay in a fresh process"


# GitHub


class Stopped:
    """Lets GitHub take what is printed between ``begin`` and ``end`` for no workflow command, whoever wrote it."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)  # one that a target cannot know
        self.begin = f"::stop-commands::{self._token}"
        self.end = f"::{self._token}::"


def annotations(result: Result | Verdict) -> Iterable[str]:
    """Yield a workflow command a line: for a verdict that no cause gives, and for each cause, an error if it blocks.

    GitHub shows the first ten of each kind.
    """
    verdict = result.verdict if isinstance(result, Result) else result
    if verdict.code not in (CLEAN, VIOLATION):
        level = "warning" if verdict.code == UNKNOWN else "error"
        yield _command(level, f"kvlockstep: {WORDS[verdict.code]}", _short("\n".join(verdict.lines)))
    if not isinstance(result, Result):
        return
    new = blocking(result.progress)
    for cause in sorted(result.progress.causes.values(), key=lambda cause: cause not in new):
        why = "" if cause in new else f" ({_why_not(cause, result.base)})"
        text = f"{result.text_of(cause)}\n  replay    {result.replay_line(cause)}"
        yield _command("error" if cause in new else "notice", f"kvlockstep: {cause.signature}{why}", text)


def _command(level: str, title: str, text: str) -> str:
    return f"::{level} title={_data(title).replace(':', '%3A').replace(',', '%2C')}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


# Markdown


def summary(result: Result | Verdict) -> str:
    """Return the summary of a gate for the page of its job."""
    verdict = result.verdict if isinstance(result, Result) else result
    lines = [f"## kvlockstep gate: {WORDS[verdict.code]}", "", *(f"- {_markdown(line)}" for line in verdict.lines)]
    if isinstance(result, Result):
        lines += [*_what_was_done(result), *_causes(result)]
    return "\n".join(lines) + "\n\n"


def _what_was_done(result: Result) -> list[str]:
    settings, states = result.settings, states_of(result.progress)
    lines = ["", "| | " + " | ".join(_markdown(state.order.name) for state in states) + " |"]
    lines += ["|---|" + "---:|" * len(states)]
    for name, cells in {
        "operations done": [f"{state.statistics.done:,}" for state in states],
        "cases": [f"{state.statistics.cases:,}" for state in states],
        "distinct cases": [f"{state.statistics.distinct_cases:,}" for state in states],
        "canary": ["found" if state.canary is not None and state.canary.caught else "not found" for state in states],
    }.items():
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    said = said_of_stored(result.stored)
    lines += ["", f"Regressions: {said}. Seed base {_code(settings.base)}, shard {settings.shard}."]
    if result.not_met:
        lines += ["", f"Known, not met: {', '.join(map(_code, result.not_met))}."]
    return lines


def said_of_stored(stored: Sequence[StoredRun]) -> str:
    """Say how many stored traces came to which end."""
    words = dict.fromkeys(["clean", "violates", "skipped", *(run.verdict for run in stored)])
    counts = {word: sum(run.verdict == word for run in stored) for word in words}
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n) or "none"


def _causes(result: Result) -> list[str]:
    causes, new = result.progress.causes.values(), blocking(result.progress)
    if not causes:
        return []
    lines = ["", "| cause | target | blocks | operations | replay |", "|---|---|---|---:|---|"]
    for cause in causes:
        blocks = "yes" if cause in new else f"no: {_markdown(_why_not(cause, result.base))}"
        cells = _markdown(cause.signature), _markdown(cause.target), blocks, f"{cause.minimized_len}"
        lines.append(f"| {' | '.join(cells)} | {_code(result.replay_line(cause))} |")
    for cause in causes:
        # an empty line would end the block of HTML
        text = "\n".join(escape(line) if line.strip() else "&nbsp;" for line in result.text_of(cause).splitlines())
        lines += ["", f"<details><summary>{escape(cause.signature)}</summary>", f"<pre>{text}</pre>", "</details>"]
    return lines


def _markdown(text: str) -> str:
    """Let a text of a line say what it says: no table cell, tag, link or emphasis."""
    plain = escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#!~])", r"\\\1", plain)


def _code(text: str) -> str:
    """Return a text of a line as code, also in a cell of a table."""
    return f"<code>{_markdown(text)}</code>"
