"""The folder of a campaign: a party is nobody else's, goes on where it was, and survives the death of its writer."""

import multiprocessing
from dataclasses import replace

import pytest

from kvlockstep.fuzz.campaign.folder import (
    Cause,
    FolderUnusable,
    Lane,
    Settings,
    ended_well,
    is_running,
    join,
    journal_of,
    numbers_of,
    progress_of,
    settings_of,
)
from kvlockstep.fuzz.campaign.seeds import Shard
from kvlockstep.fuzz.statistics import Statistics

SETTINGS = Settings(("reference",), ("torch",), 2, 60.0, Shard(), "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z")
CAUSE = Cause("PageLeaked.abort", "reference", None, "PageLeaked.abort", "PageLeaked", None, "w", 1.0, 9, 8, 7)


def test_party_is_read_as_it_was_written(tmp_path):
    with join(tmp_path, SETTINGS, resume=False) as party:
        party.progress.units["w"] = 3
        party.progress.causes[CAUSE.key] = CAUSE
        party.progress.lanes.append(
            Lane("reference", None, Statistics().to_json(), unobserved=[(1, "check", ["rows"])])
        )
        party.note("begin", resumed=False)
        party.save()
        written = party.progress

    assert numbers_of(tmp_path) == [1]
    assert settings_of(tmp_path, 1) == SETTINGS
    assert progress_of(tmp_path, 1) == written
    assert list(journal_of(tmp_path, 1)) == [{"t": 0.0, "event": "begin", "resumed": False}]


def test_resume_goes_on_with_a_party_that_did_the_same_and_did_not_end(tmp_path):
    with join(tmp_path, SETTINGS, resume=False) as first:
        first.progress.units["w"] = 3
        first.save()

    with join(tmp_path, replace(SETTINGS, workers=3), resume=True) as other_work:
        assert (other_work.number, other_work.progress.units) == (2, {})
    assert not SETTINGS.same_work(replace(SETTINGS, sanitize=True))
    longer = replace(SETTINGS, seconds=90.0, base="another", started="2026-01-02T00:00:00Z")
    with join(tmp_path, longer, resume=True) as again:
        assert (again.number, again.progress.units) == (1, {"w": 3})
        assert (again.settings.base, again.settings.seconds) == (SETTINGS.base, 90.0)
        again.progress.ended = True
        again.save()
    with join(tmp_path, SETTINGS, resume=True) as fresh:
        assert fresh.number == 3
    with join(tmp_path, SETTINGS, resume=False) as fresh:
        assert fresh.number == 4


def hold(folder, has_it, let_go):
    with join(folder, SETTINGS, resume=True):
        has_it.set()
        let_go.wait(30)


def test_party_that_somebody_is_at_work_on_is_not_taken(tmp_path):
    context = multiprocessing.get_context("spawn")
    has_it, let_go = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, has_it, let_go))
    other.start()
    assert has_it.wait(30)
    try:
        assert is_running(tmp_path, 1)
        with join(tmp_path, SETTINGS, resume=True) as mine:
            assert mine.number == 2
    finally:
        let_go.set()
        other.join()
    assert not is_running(tmp_path, 1)


def test_line_that_was_cut_by_a_death_is_taken_back_and_the_next_one_is_whole(tmp_path):
    with join(tmp_path, SETTINGS, resume=False) as party:
        party.note("begin")
        journal = party.folder / "journal.jsonl"
    with journal.open("a") as file:
        file.write('{"t": 1.0, "ev')

    assert [event["event"] for event in journal_of(tmp_path, 1)] == ["begin"]
    with join(tmp_path, SETTINGS, resume=True) as party:
        party.note("sample")
    assert [event["event"] for event in journal_of(tmp_path, 1)] == ["begin", "sample"]


@pytest.mark.parametrize(("events", "well"), [([], True), (["begin"], False), (["begin", "end"], True)])
def test_party_that_says_no_last_word_was_killed(tmp_path, events, well):
    with join(tmp_path, SETTINGS, resume=False) as party:
        for event in events:
            party.note(event)

    assert ended_well(tmp_path, 1) is well


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "no JSON",
        "[]",
        '{"kvlockstep_progress": 99}',
        '{"kvlockstep_progress": 1}',
        '{"kvlockstep_progress": 1, "lanes": [], "causes": {}, "hours": 8}',
        '{"kvlockstep_progress": 1, "lanes": [], "causes": {"one": {}}}',
    ],
)
def test_file_of_another_kind_or_version_is_one_line(tmp_path, text):
    with join(tmp_path, SETTINGS, resume=False) as party:
        (party.folder / "progress.json").write_text(text)

    with pytest.raises(FolderUnusable, match=r"progress\.json: .*: name another folder"):
        progress_of(tmp_path, 1)


def test_settings_of_another_kind_are_one_line(tmp_path):
    with join(tmp_path, SETTINGS, resume=False) as party:
        (party.folder / "party.json").write_text('{"kvlockstep_party": 1, "targets": []}')

    with pytest.raises(FolderUnusable, match=r"party\.json: .*: name another folder"):
        join(tmp_path, SETTINGS, resume=True)


@pytest.mark.parametrize("line", [b'{"t": 1}\n', b"\xff\xfe\n"])
def test_line_that_is_no_event_is_named(tmp_path, line):
    with join(tmp_path, SETTINGS, resume=False) as party:
        party.note("begin")
        (party.folder / "journal.jsonl").open("ab").write(line)

    with pytest.raises(FolderUnusable, match=r"journal\.jsonl:2: "):
        list(journal_of(tmp_path, 1))


def test_folder_without_parties_is_no_campaign(tmp_path):
    assert numbers_of(tmp_path) == []
    assert progress_of(tmp_path, 7).units == {}
