"""What the gate leaves for other programs: a JUnit file, annotations for GitHub, a summary in Markdown.

Texts come from targets and traces of strangers; what has a meaning in a format is escaped in it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from kvlockstep.fuzz.campaign.ending import blocking, states_of
from kvlockstep.fuzz.campaign.folder import Cause, Progress, Settings
from kvlockstep.fuzz.campaign.supervisor import StoredRun
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, INTERRUPTED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.failures import replay_line
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

    def replay_line(self, cause: Cause) -> str:
        return replay_line(self.failures / cause.folder / "trace.jsonl", cause.target)


# JUnit

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(path: Path, result: Result) -> None:
    """Write a JUnit file: a test for each regression, each canary, the cases of each lane and each cause."""
    suite = ElementTree.Element("testsuite", name="kvlockstep")
    for test, kind, text in _tests(result):
        suite.append(test)
        if kind is not None:
            first = text.splitlines()[0] if text else kind
            part = ElementTree.SubElement(test, kind, message=_xml(first))
            part.text = _xml(text)
    for kind in ("failure", "error", "skipped"):
        name = {"failure": "failures", "error": "errors"}.get(kind, kind)
        suite.set(name, str(sum(test.find(kind) is not None for test in suite)))
    suite.set("tests", str(len(suite)))
    suite.set("time", f"{result.progress.seconds:.1f}")
    tree = ElementTree.ElementTree(suite)
    ElementTree.indent(tree)
    draft = path.with_name(f".{path.name}.new")
    tree.write(draft, encoding="utf-8", xml_declaration=True)
    draft.replace(path)


def _tests(result: Result) -> Iterator[tuple[ElementTree.Element, str | None, str]]:
    for run in result.stored:
        kind = {"clean": None, "violates": "failure", "skipped": "skipped"}.get(run.verdict, "error")
        yield _test("regressions", f"{run.file} on {_place(run.target, run.lane)}"), kind, run.text or run.verdict
    for state in states_of(result.progress):
        place = _place(state.order.target, state.order.lane)
        caught = state.canary is not None and state.canary.caught
        yield _test("canary", place), None if caught else "error", "the canary was not found"
        yield _test("cases", f"{state.statistics.done} operations on {place}"), None, ""
    for cause in result.progress.causes.values():
        text = f"{result.texts.get(cause.key, cause.signature)}\n{result.replay_line(cause)}"
        kind = "failure" if cause in blocking(result.progress) else "skipped"
        yield _test("causes", cause.signature), kind, text if kind == "failure" else f"{_why_not(cause)}: {text}"
    kind = "error" if result.verdict.code not in (CLEAN, VIOLATION) else None
    yield _test("verdict", WORDS[result.verdict.code]), kind, "\n".join(result.verdict.lines)


def _test(group: str, name: str) -> ElementTree.Element:
    return ElementTree.Element("testcase", classname=f"kvlockstep.{group}", name=_xml(name))


def _place(target: str, lane: str | None) -> str:
    return target if lane is None else f"{target} {lane}"


def _xml(text: str) -> str:
    """Replace what XML cannot hold at all."""
    return _NOT_XML.sub("?", text)


def _why_not(cause: Cause) -> str:
    """Say why a cause does not block."""
    if cause.known:
        return "known"
    return "fails on the base too" if cause.old else "did not replay in a fresh process"


# GitHub


def annotations(result: Result) -> Iterable[str]:
    """Yield a workflow command a line: an error for each cause that blocks, else a notice, and for the verdict."""
    new = blocking(result.progress)
    for cause in result.progress.causes.values():
        level = "error" if cause in new else "notice"
        why = "" if cause in new else f" ({_why_not(cause)})"
        text = f"{result.texts.get(cause.key, cause.signature)}\n  replay    {result.replay_line(cause)}"
        yield _command(level, f"kvlockstep: {cause.signature}{why}", text)
    if result.verdict.code not in (CLEAN, VIOLATION):
        level = "warning" if result.verdict.code == UNKNOWN else "error"
        yield _command(level, f"kvlockstep: {WORDS[result.verdict.code]}", "\n".join(result.verdict.lines))


def _command(level: str, title: str, text: str) -> str:
    data = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    name = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{data}"


# Markdown


def summary(result: Result) -> str:
    """Return the summary of a gate for the page of its job."""
    settings, progress = result.settings, result.progress
    lines = [f"## kvlockstep gate: {WORDS[result.verdict.code]}", ""]
    lines += [f"- {_markdown(line)}" for line in result.verdict.lines]
    lines += ["", "| | " + " | ".join(_markdown(state.order.name) for state in states_of(progress)) + " |"]
    states = states_of(progress)
    lines += ["|---|" + "---:|" * len(states)]
    for name, cells in {
        "operations done": [f"{state.statistics.done:,}" for state in states],
        "cases": [f"{state.statistics.cases:,}" for state in states],
        "distinct cases": [f"{state.statistics.distinct_cases:,}" for state in states],
        "canary": ["found" if state.canary is not None and state.canary.caught else "not found" for state in states],
    }.items():
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    counts = {word: sum(run.verdict == word for run in result.stored) for word in ("clean", "violates", "skipped")}
    said = ", ".join(f"{n} {word}" for word, n in counts.items() if n)
    lines += [
        "",
        f"Regressions: {said or 'none were run'}. Seed base `{_code(settings.base)}`, shard {settings.shard}.",
    ]
    if progress.causes:
        lines += ["", "| cause | blocks | operations | replay |", "|---|---|---:|---|"]
        for cause in progress.causes.values():
            blocks = "yes" if cause in blocking(progress) else f"no: {_why_not(cause)}"
            replay = f"`{_code(result.replay_line(cause))}`"
            lines.append(f"| {_markdown(cause.signature)} | {blocks} | {cause.minimized_len} | {replay} |")
        for cause in progress.causes.values():
            text = _code(result.texts.get(cause.key, ""), inline=False)
            lines += [
                "",
                f"<details><summary>{_markdown(cause.signature)}</summary>",
                "",
                "```",
                text,
                "```",
                "</details>",
            ]
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    """Let a text of a line say what it says: no table cell, tag, link or emphasis."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#!])", r"\\\1", plain)


def _code(text: str, *, inline: bool = True) -> str:
    """Make a text fit between the marks of code."""
    if inline:
        return " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return text.replace("```", "'''")
