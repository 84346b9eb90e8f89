"""A CPU's memory counters, on a made-up machine: bytes come out per call, whatever the unit, and absence is a sentence.

The meter is a file that each call moves on; a stand-in for perf says by how much it moved while it ran.
"""
import os
import stat
import threading
from dataclasses import replace

import pytest
from made_variants import SMALL, compare, made, of

from kvlab.attention import ideal_traffic, trial
from kvlab.kv.formats import kv_format
from kvlab.probes import measure, perf
from kvlab.probes._known import Operation
from kvlab.probes.perf import CannotCount, Counted, Perf, PerfStat, Resctrl, counter

READ, WRITE = 3 * 2**20, 2**20                                       # bytes of a call
FAST = Perf(window_s=0.02, pairs=1)
PERF = r"""
file= events= tried=
while [ $# -gt 0 ]; do
    case $1 in -o) file=$2; shift;; -e) events=$2; shift;; sleep) tried=1;; esac
    shift
done
%(first)s
read r0 w0 < %(meter)s
finish() {
    read r w < %(meter)s
    { echo "# started on a day"; echo; %(lines)s } > $file
    exit 0
}
[ -n "$tried" ] && finish
trap finish INT
while :; do sleep 0.01; done
"""
SPLIT = ('echo "$(( (r - r0) / %(per)d )),%(unit)s,read,1,100.00,,";'
         'echo "$(( (w - w0) / %(per)d )),%(unit)s,write,1,100.00,,";')


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root without counters, a PATH without perf, and a meter."""
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/perf_event_paranoid").write_text("-1\n")
    (tmp_path / perf.DEVICES / "software").mkdir(parents=True)
    (tmp_path / "meter").write_text("0 0\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(perf, "ROOT", tmp_path)
    monkeypatch.setattr(perf, "START_S", 0.8)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(perf.shutil, "which", lambda name: (
        str(tmp_path / "bin" / name) if (tmp_path / "bin" / name).exists() else None))
    return tmp_path


def unit(machine, *names):
    for name in names:
        (machine / perf.DEVICES / name).mkdir(parents=True)


def stand_in(machine, lines=SPLIT, per=1, unit="", first=""):
    lines = lines % dict(per=per, unit=unit) if "%(" in lines else lines
    (machine / "bin/perf").write_text("#!/bin/sh" + PERF % dict(meter=machine / "meter", lines=lines, first=first))
    (machine / "bin/perf").chmod(stat.S_IRWXU)


def metered(machine, read=READ, write=WRITE):
    """A variant each of whose calls moves the meter."""
    def call(honest, inputs):
        r, w = map(int, (machine / "meter").read_text().split())
        (machine / "meter").write_text(f"{r + read} {w + write}\n")
        return honest()
    return made("metered", call)


@pytest.mark.parametrize("names, per, named", [
    (["uncore_imc_0", "uncore_imc_1"], (2**20, "MiB"), "uncore_imc"),
    (["uncore_imc_free_running_0"], (2**10, "KiB"), "uncore_imc_free_running"),
    (["amd_umc_0", "amd_umc_11"], (64, ""), "amd_umc"),
    (["uncore_imc"], (1, "Bytes"), "uncore_imc"),
])
def test_bytes_per_call_in_whatever_unit_perf_gives_them(machine, names, per, named):
    unit(machine, *names)
    stand_in(machine, per=per[0], unit=per[1])
    rows = measure(compare(metered(machine)), [FAST])
    assert {r["status"] for r in rows} == {"ok"}
    assert of(rows, "hbm_read_bytes")[0]["value"] == READ and of(rows, "hbm_write_bytes")[0]["value"] == WRITE
    total = of(rows, "hbm_bytes")[0]
    assert total["value"] == total["low"] == total["high"] == READ + WRITE
    assert [total[of] for of in ("kind", "method", "source", "scope")] == ["measured", "counter", "perf", "system"]
    assert f"perf ({named})" in total["note"] and "idle floor" in total["note"]
    ideal = ideal_traffic(SMALL, kv_format("fp32"), 4)
    assert of(rows, "traffic_to_model")[0]["value"] == pytest.approx((READ + WRITE) / sum(ideal[:2]))


def test_resctrl_is_taken_where_no_controller_counts_and_sums_all_caches(machine):
    files = [machine / perf.GROUPS / f"mon_L3_0{i}" / "mbm_total_bytes" for i in range(2)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("1000\n")

    def call(honest, inputs):
        for file in files:
            file.write_text(f"{int(file.read_text()) + READ}\n")
        return honest()
    rows = measure(compare(made("metered", call)), [FAST])
    assert of(rows, "hbm_bytes")[0]["value"] == 2 * READ and "resctrl" in of(rows, "hbm_bytes")[0]["note"]
    assert "resctrl counts reads and writes together" in of(rows, "hbm_read_bytes")[0]["note"]
    assert of(rows, "read_amplification")[0]["kind"] == "missing"
    files[1].write_text("Unavailable\n")
    with pytest.raises(CannotCount, match="mbm_total_bytes of resctrl cannot be read"):
        counter()


def test_an_operation_is_counted_as_a_trial_is(machine, monkeypatch):
    monkeypatch.setattr(perf, "last_level_cache", lambda: (2**16, "test"))
    monkeypatch.setattr(perf, "counter", lambda: Growing(rate=0, per_call=READ))
    op = Operation("read", 2**18)
    calls = op.calls
    monkeypatch.setattr(Operation, "calls", lambda self, copies: [counted(c) for c in calls(copies)])
    found = {r.metric: r for r in FAST.operation(op)}
    assert found["hbm_read_bytes"].value == READ and found["read_amplification"].value == READ / 2**18
    assert {r.kind for r in FAST.operation(replace(op, device="cuda"))} == {"missing"}


class Growing:
    """A counter that moves on by itself, and by what `counted` calls add."""
    name, unsplit, calls = "growing", "", 0

    def __init__(self, rate, per_call):
        self.rate, self.per_call, self.now = rate, per_call, perf.time.perf_counter
        Growing.calls, self.began = 0, self.now()

    def edge(self):
        total = self.rate * (self.now() - self.began) + self.per_call * Growing.calls
        return Counted(total, total, 0.0)


def counted(call):
    def counting():
        Growing.calls += 1
        return call()
    return counting


def test_what_the_idle_machine_moves_is_taken_off(machine, monkeypatch):
    """The floor is ten times as much as the calls move, in the same time."""
    monkeypatch.setattr(perf, "counter", lambda: Growing(rate=10 * READ / 1e-3, per_call=READ))
    variant = made("counted", lambda honest, inputs: counted(lambda: perf.time.sleep(1e-3) or honest())())
    rows = measure(compare(variant), [Perf(window_s=0.05, pairs=2)])
    assert of(rows, "hbm_read_bytes")[0]["value"] == pytest.approx(READ, rel=0.2)


def test_reads_that_stores_cause_make_no_copy_differ_from_its_formula(machine, monkeypatch):
    """A copy whose written lines are read first counts 1.5 × its formula: the interval begins at 1."""
    monkeypatch.setattr(perf, "last_level_cache", lambda: (2**16, "test"))
    op = Operation("copy", 2**18)
    monkeypatch.setattr(perf, "counter", lambda: Growing(rate=0, per_call=3 * op.nbytes))
    calls = op.calls
    monkeypatch.setattr(Operation, "calls", lambda self, copies: [counted(c) for c in calls(copies)])
    found = {r.metric: r for r in FAST.operation(op)}
    ratio, total = found["traffic_to_model"], found["hbm_bytes"]
    assert (ratio.value, ratio.low, ratio.high) == (1.5, 1.0, 1.5) and "begins 0.50 lower" in ratio.note
    assert total.low == total.high == 3 * op.nbytes, "these bytes did move"


def test_traffic_that_does_not_grow_with_the_calls_is_no_number(machine, monkeypatch):
    monkeypatch.setattr(perf, "counter", lambda: Growing(rate=0, per_call=0))
    rows = measure(compare(made("still", lambda honest, inputs: honest())), [FAST])
    assert {r["kind"] for r in rows} == {"missing"} and "wait until they rest" in rows[0]["note"]


def test_a_machine_that_hides_its_counters_says_so(machine):
    for shown in ("cpu", "msr"):
        unit(machine, shown)
    why = Perf().why_not(trial("naive", SMALL))
    assert "a virtual machine hides them; needs bare metal" in why and "mount -t resctrl" in why
    assert "use ncu or gpm" in Perf().why_not(Operation("copy", 2**20, device="cuda"))


def test_without_the_program_it_says_what_to_install(machine):
    unit(machine, "uncore_imc_0")
    assert "perf is not installed (Debian: apt-get install linux-perf)" in Perf().why_not(trial("naive", SMALL))


@pytest.mark.parametrize("uid, remedy", [(1000, True), (0, False)])
def test_a_system_that_is_shut_to_users_says_how_to_open_it(machine, monkeypatch, uid, remedy):
    unit(machine, "uncore_imc_0")
    stand_in(machine, first="echo 'Error:' >&2; echo 'Access to performance monitoring is limited.' >&2; exit 255")
    (machine / "proc/sys/kernel/perf_event_paranoid").write_text("2\n")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    why = Perf().why_not(trial("naive", SMALL))
    assert ("sysctl kernel.perf_event_paranoid=0" in why) is remedy
    assert "perf ended with exit code 255 on perf (uncore_imc)" in why


@pytest.mark.parametrize("lines, why", [
    ("echo '<not supported>,,read,0,100.00,,';", "perf says <not supported>"),
    ("echo '5,parsecs,read,0,100.00,,'; echo '5,parsecs,write,0,100.00,,';", "unit 'parsecs'"),
    ("echo '5,Mi';", "'5,Mi' is cut off"), ("echo '5,MiB,read,0';", "'5,MiB,read,0' is cut off"),
    ("echo 'x5,MiB,read,0,100.00,,';", "'x5', of '100.00' % of the time, is no number"),
    ("echo '5,MiB,read,0,x,,';", "'5', of 'x' % of the time, is no number"),
    ("echo '5,MiB,read,0,100.00,,'; echo '5,MiB,write,0,62.50,,';", "write for 62.5 % of the time only and guessed"),
    ("echo '5,MiB,read,0,nan,,'; echo '5,MiB,write,0,nan,,';", "read for nan % of the time only"),
    ('[ "$LC_ALL" = C ] || exit 9; echo "<not counted>,,read,0,0.00,,";', "perf says <not counted>"),
    ("echo '5,MiB,read,0,100.00,,';", "1 counts for 2 events"),
    ("", "0 counts for 2 events"),
])
def test_what_perf_writes_and_kvlab_does_not_understand_is_a_sentence(machine, lines, why):
    unit(machine, "uncore_imc_0")
    stand_in(machine, lines or ":;")
    assert why in Perf().why_not(trial("naive", SMALL))


def test_a_perf_that_does_not_end_is_ended(machine, monkeypatch):
    unit(machine, "uncore_imc_0")
    stand_in(machine)
    (machine / "bin/deaf").write_text("#!/bin/sh\ntrap '' INT\nwhile :; do sleep 0.01; done\n")
    one = PerfStat("uncore_imc", "uncore_imc/data_reads/", "uncore_imc/data_writes/")
    one.tried()
    (machine / "bin/deaf").chmod(stat.S_IRWXU)
    monkeypatch.setattr(one, "command", lambda file: [str(machine / "bin/deaf")])
    monkeypatch.setattr(perf, "TRIED_S", 0.2)
    one.edge()
    running = one.running
    with pytest.raises(CannotCount, match="did not end within 0.2 s"):
        one.edge()
    assert running.poll() is not None and one.running is None
    assert threading.active_count() < 20


def test_resctrl_needs_its_file_system():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perf, "ROOT", perf.Path("/nowhere"))
        with pytest.raises(CannotCount, match="mount -t resctrl"):
            Resctrl().edge()
