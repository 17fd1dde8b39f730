"""What the gate writes for other programs: JUnit, annotations of GitHub, Markdown. Also of texts that mean harm."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from kvlockstep.fuzz.campaign.folder import Cause, Lane, Progress, Settings
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.campaign.supervisor import StoredRun
from kvlockstep.fuzz.cli import commands
from kvlockstep.fuzz.commands.gate import Outputs
from kvlockstep.fuzz.exits import BROKEN, CLEAN, CRASHED, INTERRUPTED, UNKNOWN, USAGE, VIOLATION
from kvlockstep.fuzz.gate.known import KnownUnreadable, read_known
from kvlockstep.fuzz.gate.outputs import MAX_TEXT, Result, Stopped, annotations, said_of_stored, summary, write_junit
from kvlockstep.fuzz.statistics import Statistics
from kvlockstep.fuzz.verdict import Verdict

EVIL = (
    "]]> <script>&\x00\x1b[31m\ud800 | `x` **b** [a](http://b)\r\n\n::error::x\n```\n</pre></details>\n%0A 100%, a: b"
)
CANARY = {"law": "WriteSlotRepeated", "operations": 13, "seconds": 0.1}


def a_cause(signature="PageLeaked.abort", **facts):
    facts = {"replays": True, **facts}
    return Cause(signature, "mine:make", None, signature, "PageLeaked", None, "mine", 1.0, 10, 5, 2, **facts)


def a_result(*causes, code=VIOLATION, lines=("1 cause of failure",), stored=(), text=EVIL, canaries=(CANARY,)):
    settings = Settings(("mine:make",), (), 1, 1.0, Shard(), "abc", "2026-01-01T00:00:00Z")
    lane = Lane("mine:make", None, Statistics().to_json(), canaries=list(canaries))
    progress = Progress(seconds=1.5, lanes=[lane], causes={cause.key: cause for cause in causes})
    texts = {cause.key: text for cause in causes}
    return Result(settings, progress, stored, Verdict(code, list(lines)), Path("out/failures"), "main", texts)


def assert_is_junit(path):
    """What the schemas in use (Jenkins, GitLab, Ant) ask of a file."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite"
    assert set(suite.attrib) == {"name", "tests", "failures", "errors", "skipped", "time"}
    tests = list(suite)
    assert {test.tag for test in tests} == {"testcase"}
    for test in tests:
        assert set(test.attrib) == {"classname", "name", "time"}
        assert float(test.get("time")) >= 0
        assert [part.tag for part in test] in ([], ["failure"], ["error"], ["skipped"], ["system-out"])
        for part in test:
            wanted = {"failure": {"message", "type"}, "error": {"message", "type"}, "skipped": {"message"}}
            assert set(part.attrib) == wanted.get(part.tag, set())
    names = [(test.get("classname"), test.get("name")) for test in tests]
    assert len(set(names)) == len(names)
    counts = {tag: sum(test.find(tag) is not None for test in tests) for tag in ("failure", "error", "skipped")}
    assert int(suite.get("tests")) == len(tests)
    assert [int(suite.get(name)) for name in ("failures", "errors", "skipped")] == list(counts.values())
    return {f"{test.get('classname')} {test.get('name')}": test for test in tests}, counts


STORED = [
    StoredRun("mine:make", None, "1.jsonl", "clean", ""),
    StoredRun("mine:make", None, "2.jsonl", "violates", "PageLeaked.abort"),
    StoredRun("mine:make", "torch", "2.jsonl", "skipped", EVIL),
    StoredRun("mine:make", None, "3.jsonl", "died", "killed by SIGSEGV"),
    StoredRun("mine:make", None, "4.jsonl", "not run", ""),
]


def test_junit_has_a_test_for_each_thing_that_was_tried(tmp_path):
    write_junit(
        tmp_path / "new" / "gate.xml", a_result(a_cause(), a_cause("PageLeaked.release", known=True), stored=STORED)
    )
    tests, counts = assert_is_junit(tmp_path / "new" / "gate.xml")

    assert counts == {"failure": 2, "error": 2, "skipped": 2}
    assert tests["kvlockstep.regressions 2.jsonl on mine:make"].find("failure") is not None
    assert tests["kvlockstep.causes PageLeaked.abort on mine:make"].find("failure") is not None
    assert (
        tests["kvlockstep.causes PageLeaked.release on mine:make"].find("skipped").get("message").startswith("known: ")
    )
    assert tests["kvlockstep.verdict verdict"].find("failure") is None
    assert "::error::x" in tests["kvlockstep.causes PageLeaked.abort on mine:make"].find("failure").text
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["gate.xml"]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"known": True}, "known"),
        ({"old": True}, "old, fails on main too"),
        ({"replays": False}, "did not replay in a fresh process"),
        ({"replays": None}, "not tried in a fresh process"),
    ],
)
def test_failure_that_does_not_block_is_skipped_everywhere(tmp_path, facts, why):
    """Nor does the regression that showed it, so that a job that reads the file is as green as the gate."""
    result = a_result(a_cause(**facts), code=CLEAN, lines=["clean"], stored=STORED[:3], text="PageLeaked: page 1")
    write_junit(tmp_path / "gate.xml", result)
    tests, counts = assert_is_junit(tmp_path / "gate.xml")

    assert counts == {"failure": 0, "error": 0, "skipped": 3}
    message = tests["kvlockstep.causes PageLeaked.abort on mine:make"].find("skipped").get("message")
    assert message == f"{why}: PageLeaked: page 1"
    (line,) = annotations(result)
    assert line.startswith(f"::notice title=kvlockstep%3A PageLeaked.abort ({why.replace(',', '%2C')})::")
    assert f"| no: {why} |" in summary(result)


@pytest.mark.parametrize("code", [CLEAN, USAGE, UNKNOWN, CRASHED, BROKEN, INTERRUPTED])
def test_verdict_alone_is_an_error_of_junit_unless_clean(tmp_path, code):
    write_junit(tmp_path / "gate.xml", Verdict(code, ["why"]))
    _, counts = assert_is_junit(tmp_path / "gate.xml")

    assert counts == {"failure": 0, "error": int(code != CLEAN), "skipped": 0}
    assert summary(Verdict(code, ["why"])).startswith("## kvlockstep gate: ")


def test_canary_that_was_not_found_is_an_error_of_junit(tmp_path):
    write_junit(tmp_path / "gate.xml", a_result(code=UNKNOWN, lines=["blind"], canaries=()))
    tests, counts = assert_is_junit(tmp_path / "gate.xml")

    assert counts["error"] == 2
    assert tests["kvlockstep.canary mine:make"].find("error") is not None


def test_annotation_is_one_line_that_says_the_text(tmp_path):
    """What GitHub makes of it is the text again."""
    (line,) = annotations(a_result(a_cause()))

    assert "\n" not in line
    assert "\r" not in line
    found = re.fullmatch(r"::error title=([^:,]*)::(.*)", line)
    undone = found[2].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    assert undone.startswith(EVIL)
    assert undone.endswith(
        "\n  replay    kvlockstep replay --target mine:make out/failures/PageLeaked.abort/trace.jsonl"
    )


def test_annotations_begin_with_the_verdict_and_what_blocks():
    causes = a_cause("A.abort", known=True), a_cause("B.abort")
    lines = list(annotations(a_result(*causes, code=INTERRUPTED, lines=["interrupted"])))

    assert [line.split("::")[1] for line in lines] == [
        "error title=kvlockstep%3A interrupted",
        "error title=kvlockstep%3A B.abort",
        "notice title=kvlockstep%3A A.abort (known)",
    ]


def test_text_without_end_is_cut():
    (line,) = annotations(a_result(a_cause(), text="x" * 1_000_000))

    assert len(line) < MAX_TEXT + 500
    assert line.endswith("/PageLeaked.abort/trace.jsonl")
    assert "992,000 characters more" in line


def test_words_of_targets_are_no_commands_between_the_marks():
    one, other = Stopped(), Stopped()

    assert one.begin.startswith("::stop-commands::")
    assert one.end == f"::{one.begin.removeprefix('::stop-commands::')}::"
    assert one.end != other.end


def test_summary_holds_no_markup_of_strangers():
    text = summary(a_result(a_cause(), lines=[EVIL], stored=STORED))
    tags = re.findall(r"</?([a-z]+)>", text)

    assert set(tags) == {"details", "summary", "pre", "code"}
    assert tags.count("pre") == 2
    bullet = next(line for line in text.splitlines() if line.startswith("- "))
    assert r"\| \`x\` \*\*b\*\* \[a\](http://b) ::error::x \`\`\`" in bullet
    (table,) = [block for block in text.split("\n\n") if block.startswith("| cause |")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} == {6}
    details = text[text.index("<details>") : text.index("</details>")]
    assert "\n\n" not in details  # an empty line ends a block of HTML


def test_summary_counts_regressions_and_names_the_known_that_were_not_met():
    result = replace(a_result(stored=STORED), not_met=["PageLeaked.abort"])

    assert said_of_stored(STORED) == "1 clean, 1 violates, 1 skipped, 1 died, 1 not run"
    assert said_of_stored([]) == "none"
    assert "Regressions: 1 clean, 1 violates, 1 skipped, 1 died, 1 not run. Seed base <code>abc</code>" in summary(
        result
    )


def test_output_that_cannot_be_written_is_named_and_the_others_are_written(tmp_path, capsys):
    outputs = Outputs(Path("/dev/full"), False, tmp_path / "gate.md")

    assert outputs.hand_out(Verdict(CLEAN, ["clean"])) is False
    assert capsys.readouterr().err == "kvlockstep: --junit /dev/full: No space left on device\n"
    assert (tmp_path / "gate.md").exists()
    assert Path("/dev/full").is_char_device()


def test_earlier_junit_file_stays_whole_when_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    write_junit(tmp_path / "gate.xml", Verdict(CLEAN, ["clean"]))
    before = (tmp_path / "gate.xml").read_bytes()

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_junit(tmp_path / "gate.xml", Verdict(USAGE, ["why"]))

    assert (tmp_path / "gate.xml").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_known_causes_are_read_with_remarks(tmp_path):
    (tmp_path / "known.txt").write_text("# ours\n\n  PageLeaked.abort  # until the rewrite\nDied.retract.SIGSEGV\n")

    assert read_known(tmp_path / "known.txt") == {"PageLeaked.abort", "Died.retract.SIGSEGV"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a\n.hidden\n", ":2: '.hidden' is no signature"),
        (b"\xff\n", ": not UTF-8"),
        (b"a" * 500, "...' is no signature"),
    ],
)
def test_known_file_that_is_none_is_named_with_its_line(tmp_path, data, said):
    (tmp_path / "known.txt").write_bytes(data)
    with pytest.raises(KnownUnreadable, match=re.escape(said)):
        read_known(tmp_path / "known.txt")


# What is there to be copied


ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / "examples" / "ci").glob("*.yml"))


def commands_in(text):
    """List the commands of kvlockstep in a script, without what GitHub fills in."""
    whole = re.sub(r"\$\{\{.*?\}\}", "1", text.replace("\\\n", " "))
    lines = [line.strip().removeprefix("$ ") for line in whole.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.removeprefix("$ ").startswith("kvlockstep ")]


def assert_is_understood(words):
    """Names of commands and options; what stands for a value is filled in elsewhere."""
    options = {name for param in commands.commands[words[1]].params for name in param.opts}
    assert {word for word in words if word.startswith("--")} <= options, words


def test_commands_in_the_documentation_are_understood():
    text = (ROOT / "docs" / "ci.md").read_text()
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL)
    found = [words for block in blocks for words in commands_in(block)]

    assert len(found) >= 4
    for words in found:
        assert_is_understood(words)
    for option in re.findall(r"`(--[a-z-]+)", text):
        assert_is_understood(["kvlockstep", "gate", "" if option in ("--editable",) else option])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflow_of_github_is_one(file):
    workflow = yaml.safe_load(file.read_text())
    assert set(workflow) <= {"name", True, "permissions", "concurrency", "env", "jobs"}  # yaml reads "on" as True
    (job,) = workflow["jobs"].values()
    assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert set(step) <= {"uses", "run", "with", "if"}
        assert re.fullmatch(r"actions/[a-z/-]+@v\d+", step.get("uses", "actions/checkout@v4"))
    found = [words for step in job["steps"] for words in commands_in(step.get("run", ""))]

    assert found
    for words in found:
        assert_is_understood(words)


def test_gate_begins_where_the_night_ended():
    """The cache of one workflow is that of the other, and the folder that the commands are told."""
    texts = [file.read_text() for file in WORKFLOWS]
    caches = [set(re.findall(r"path: (kvlockstep-night/corpus)\n +key: (\S+-)\$", text)) for text in texts]

    assert caches == [{("kvlockstep-night/corpus", "kvlockstep-corpus-")}] * 2
    assert "--corpus kvlockstep-night " in texts[1] + texts[0]
    assert "--out kvlockstep-night\n" in texts[0] + texts[1]
