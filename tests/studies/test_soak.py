"""The soak study: many tiny cases, whose checksums show what a long run loses, doubles or half writes."""
import pytest

from kvlab.record.reading import table
from kvlab.record.store import RunStore, read_table
from kvlab.studies import soak
from kvlab.studies._run import run


def in_turn(job, cases):
    """An `each` that computes in this process."""
    for case in cases:
        yield job(case)


def test_a_run_of_the_smallest_size_finds_every_checksum(tmp_path):
    store = run("soak", size="smoke", out=tmp_path, progress=False)
    found = read_table(store.path)
    sums = found[found["metric"] == "checksum"]
    assert sorted(sums["seed"]) == list(range(100)) and set(sums["comparison_id"].value_counts()) == {1}
    assert all(value == soak.checksum(index) for index, value in zip(sums["seed"], sums["value"]))
    assert [f.name for f in soak.findings(found)] == ["checksums", "case_s", "worker_memory_growth",
                                                      "worker_files_growth"]
    assert found["hardware"].str.contains("logical cores").all()
    assert not set(found["metric"]) - set(soak.METRICS)
    assert all(found[found["metric"] == metric]["unit"].eq(unit).all() for metric, unit in soak.METRICS.items())


def test_findings_tell_wrong_from_absent():
    rows = [row for index in range(30) for row in soak.Tiny(index).rows()]
    for row in rows:
        if row["metric"] == "checksum" and row["seed"] == 7:
            row["value"] += 1
    rows = [row for row in rows if not (row["metric"] == "checksum" and row["seed"] == 9)]
    first, *others = soak.findings(table(rows))
    assert first.sentence == "28 of 30 cases gave the right checksum, 1 a wrong one, 1 none."
    assert first.value == 28 / 30 and all(finding.value is not None for finding in others)
    assert soak.findings(table([]))[0].value is None


def measured(worker, ends, memory, files=lambda index: 7, first=0):
    """Rows of a worker's cases that ended at those seconds, and held so much by then."""
    for index, end in enumerate(ends, first):
        for row in soak.Tiny(index).rows():
            told = {"worker_memory": memory, "worker_files": files}.get(row["metric"])
            value = end if row["metric"] == "finished_s" else told(index - first) if told else row["value"]
            yield {**row, "value": value, "worker": worker}


def test_a_run_that_slows_down_and_keeps_memory_is_told():
    ends = [0.001 * i if i < 900 else 0.9 + 0.004 * (i - 900) for i in range(1000)]
    rows = [*measured("", ends, lambda i: (100 + i // 10) << 20, lambda i: 7 + i // 500)]
    found = soak.findings(table(rows[::-1]))                # committed in any order
    assert [one.sentence for one in found[1:]] == [
        "Between two answers lay 1.3 ms on average.",
        "The last tenth of the cases took 4.00 × the time of the second, and those between them 1.00 to 1.00 ×.",
        "The most memory that a worker held went from 119 MiB in the second tenth of the cases to 199 MiB in the last: "
        "+80.00 MiB.",
        "The most open files that a worker held went from 7 in the second tenth of the cases to 8 in the last: +1."]
    assert [one.value for one in found[1:]] == pytest.approx([1.296 / 999, 4, 80 << 20, 1])


def test_of_many_workers_the_worst_is_told_and_those_of_few_cases_are_left_out():
    rows = [*measured("a/0", [0.001 * i + 1e-6 * i * i for i in range(1000)], lambda i: 100 << 20),
            *measured("b/0", [5 + 0.002 * i for i in range(1000)], lambda i: (2000 - i) << 20, first=1000),
            *measured("c/0", [9 + 0.1 * i for i in range(5)], lambda i: (1 + i) << 30, first=2000)]
    found = {one.name: one for one in soak.findings(table(rows))}
    assert found["case_s"].sentence == (
        "Between two answers of a worker lay 2 ms (a/0) to 100 ms (c/0) on average, over 3 workers.")
    assert found["worker_memory_growth"].sentence.endswith(
        " 100 MiB in the second tenth of the cases to 100 MiB in the last: +0.00 MiB (the largest of 2 workers, a/0).")
    assert found["slowing"].value == pytest.approx(2.9 / 1.3, rel=1e-3) and found["case_s"].value == pytest.approx(0.1)
    assert found["slowing"].sentence.endswith(" (the largest of 2 workers, a/0).")


def test_a_checksum_that_is_there_twice_is_told():
    rows = [row for index in (0, 1, 1) for row in soak.Tiny(index).rows()]
    assert soak.findings(table(rows))[0].sentence == (
        "2 of 2 cases gave the right checksum, 0 a wrong one, 0 none. 1 checksums are there twice.")


def test_a_case_works_and_takes_memory_as_it_is_told():
    assert soak.Tiny(1, take_bytes=64 << 20).rows()[0]["value"] == soak.checksum(1)
    import time
    before = time.thread_time()
    soak.Tiny(1, work_s=0.02).rows()
    assert time.thread_time() - before >= 0.02


def test_what_a_system_does_not_tell_is_missing(monkeypatch):
    monkeypatch.setattr(soak, "_memory", lambda: None)
    monkeypatch.setattr(soak, "_files", lambda: None)
    kinds = {row["metric"]: row["kind"] for row in soak.Tiny(0).rows()}
    assert kinds == {"checksum": "measured", "worker_memory": "missing", "worker_files": "missing",
                     "finished_s": "measured"}


@pytest.mark.parametrize("options", [dict(device="cuda"), dict(variants=("naive",)), dict(model="x")])
def test_options_that_mean_nothing_here_are_refused(options):
    with pytest.raises(ValueError, match="leave out --device, --variants and --model"):
        soak.cases("smoke", **options)


def test_an_engine_is_chosen_by_name_and_kept_on_resume(tmp_path, monkeypatch):
    asked = []

    def made(engine, address, patience_s, used, met):
        asked.append((engine, address))

        def each(job, cases):
            met("3fa2c1", {"cpu": "a"})
            for rows in in_turn(job, list(cases)[:40]):
                yield [{**row, "worker": "3fa2c1"} for row in rows]
        return each
    monkeypatch.setattr("kvlab.studies._run._each", made)
    store = []
    with pytest.raises(RuntimeError, match="gave no rows of 60 of 100 cases"):
        run("soak", size="smoke", out=tmp_path, progress=False, engine="ray", address="auto", begun=store.append)
    with pytest.raises(RuntimeError, match="gave no rows of 20 of 60 cases"):
        run("soak", resume=store[0].path, progress=False)
    assert asked == [("ray", "auto"), ("ray", None)]
    again = RunStore.open(store[0].path)
    assert again.manifest.options["engine"] == "ray" and again.workers == {"3fa2c1": {"cpu": "a"}}
    assert set(again.table()["worker"]) == {"3fa2c1"} and len(again.committed) == 80
    with pytest.raises(ValueError, match="resume with the same options"):
        run("soak", resume=store[0].path, progress=False, engine="local")


def test_engines_that_do_not_exist_or_go_with_nothing_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(KeyError, match="no engine named 'rya'. Did you mean 'ray'"):
        run("soak", size="smoke", out=tmp_path, engine="rya")
    with pytest.raises(ValueError, match="--address is of a cluster, and the engine is local: add --engine ray"):
        run("soak", size="smoke", out=tmp_path, address="auto")
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_stopped_is_listed_with_what_it_lacks(tmp_path):
    from kvlab.listing import runs

    def stopped(job, cases):
        for case in list(cases)[:40]:
            yield job(case)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        run("soak", size="smoke", out=tmp_path, progress=False, each=stopped)
    (one,) = runs(tmp_path)
    assert (one["state"], one["comparisons"]) == ("40 of 100 cases", 40)
    run("soak", resume=one["path"], progress=False, each=in_turn)
    (one,) = runs(tmp_path)
    assert (one["state"], one["comparisons"]) == ("closed", 100)


def test_a_resume_looks_first_whether_another_process_has_the_run(tmp_path, monkeypatch):
    held = []
    with pytest.raises(RuntimeError):
        run("soak", size="smoke", out=tmp_path, progress=False, each=lambda job, cases: iter(()), begun=held.append)
    monkeypatch.setattr("kvlab.studies._run._each", lambda *given: pytest.fail("a cluster was started"))
    taken = RunStore.open(held[0].path, hold=True)
    with pytest.raises(OSError, match="is being written by process"):
        run("soak", resume=held[0].path, progress=False)
    taken.close()


def test_a_pause_as_before_a_resume_is_left_out_and_said(tmp_path):
    rows = [row for index in range(1000) for row in soak.Tiny(index).rows()]
    for at, row in enumerate(row for row in rows if row["metric"] == "finished_s"):
        row["value"] = 5.0 + at * 0.01 + (90.0 if at >= 500 else 0.0)
    pace, slowing = (found for found in soak.findings(table(rows)) if found.name in ("case_s", "slowing"))
    assert pace.value == pytest.approx(0.01, rel=0.02) and "1 pause of over 10 s, as before a --resume" in pace.sentence
    assert slowing.value == pytest.approx(1.0, rel=0.02)
