"""ncu's table, read so that it gives the full number or a sentence, and never a wrong number."""
import pytest
from fake_ncu import PERMISSION, table, unit
from hypothesis import given
from hypothesis import strategies as st

from kvlab.probes._ncu_csv import Unreadable, kernels, number, refused, summed, unknown, weighted

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
DRAM = {READ: "byte", WRITE: "byte"}
A, B = "a" * 12, "0123456789ab"
BANNER = "==PROF== Connected to process 4711 (/usr/bin/python3)\n"
counts = st.lists(st.tuples(st.sampled_from((A, B, None)), st.integers(0, 10**13), st.integers(0, 10**13)), max_size=6)


def of(*rows, units=("byte", "byte"), metrics=DRAM, **options):
    return table([(case_id, list(values)) for case_id, *values in rows], list(metrics), list(units), **options)


@given(counts, st.sampled_from(("{}", "{:,}", "{:.2f}", "{:,.6f}")))
def test_sums_are_those_of_the_kernels_of_each_range(rows, written):
    found = kernels(BANNER + of(*[(c, written.format(r), written.format(w)) for c, r, w in rows]), DRAM)
    for case_id in (A, B):
        own = [(r, w) for c, r, w in rows if c == case_id]
        assert (case_id in found) == bool(own)
        if own:
            assert summed(found[case_id], READ) == sum(r for r, _ in own)
            assert summed(found[case_id], WRITE) == sum(w for _, w in own)
            assert len(found[case_id]) == len(own)


@given(counts.filter(bool), st.data())
def test_a_cut_anywhere_gives_the_full_number_or_a_reason(rows, data):
    whole = (BANNER + of(*[(c, f"{r:,}", f"{w:,}") for c, r, w in rows])).encode()
    at = data.draw(st.integers(0, len(whole)))
    for kept in (whole[:at], whole[at:]):
        try:
            found = kernels(kept.decode(errors="replace"), DRAM)
        except Unreadable as why:
            assert "ncu" in str(why)
        else:
            assert found == kernels(whole.decode(), DRAM)


def test_every_cut_of_one_table():
    whole = BANNER + of((A, "1,024", "7"), (B, "99", "3"), (A, "10", "1"))
    full, read = kernels(whole, DRAM), 0
    for at in range(len(whole)):
        try:
            assert kernels(whole[:at], DRAM) == full
            read += 1
        except Unreadable:
            pass
    assert 0 < read < 150                                            # the last row alone may be cut


def test_a_trials_own_kernel_of_the_last_ones_name_is_not_taken_for_it():
    text = of((A, "10", "1"), (A, "20", "2")).replace("flash_fwd_kernel<1, 2>", "spin_kernel")
    end = text.index('"2","4711"')
    for at in range(text.index('"1","4711"'), end + 1):
        with pytest.raises(Unreadable, match="cut"):
            kernels(text[:at], DRAM)
    assert summed(kernels(text, DRAM)[A], READ) == 30


def test_a_row_of_another_length_is_refused():
    text = of((A, "10", "1"), (A, "20", "2"))
    with pytest.raises(Unreadable, match="too few or too many cells"):
        kernels(text.replace('"20",', "", 1), DRAM)


def test_reads_and_writes_are_not_taken_for_each_other():
    (kernel,) = kernels(of((A, "1,024", "7")), DRAM)[A]
    assert kernel == {READ: 1024, WRITE: 7}


@pytest.mark.parametrize("text, unit, value", [
    ("0", "byte", 0), ("1,048,576", "byte", 2**20), ("2816.00", "byte", 2816), ("2816.000000", "byte", 2816),
    ("12.345", "%", 0.12345), ("1,000.5", "cycle", 1000.5), ("1e3", "cycle", 1000), ("20,000", "ns", 2e-5)])
def test_a_number_is_in_the_units_of_results(text, unit, value):
    assert number(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["n/a", "nan", "NaN", "inf", "-inf", "-1", "", "(!) n/a", "1.048.576", "1 048 576",
                                  "1\u202f048", "1\xa0048", "1,04,8", "12,34", "0x10", "158 (0: 158)", "1.5", "1.048",
                                  "1.000", "1_000", "٣"])
def test_what_is_not_clearly_a_whole_number_of_bytes_is_refused(text):
    with pytest.raises(Unreadable, match="ncu gave"):
        number(text, "byte")


@pytest.mark.parametrize("given", ["Kbyte", "Mbyte", "KB", "", "%", "cycle", "sector"])
def test_another_unit_is_never_taken_for_bytes(given):
    (kernel,) = kernels(of((A, "5", "7"), units=(given, "byte")), DRAM)[A]
    assert kernel[WRITE] == 7 and f"in {given!r} where --print-units base" in kernel[READ]
    with pytest.raises(Unreadable, match="update Nsight Compute"):
        summed([kernel], READ)


def test_older_words_for_the_same_unit_count():
    time = "gpu__time_duration.sum"
    for word in ("ns", "nsecond"):
        (kernel,) = kernels(of((A, "1,500"), units=(word,), metrics=[time]), {time: "ns"})[A]
        assert kernel[time] == pytest.approx(1.5e-6)


def test_one_kernel_without_a_number_leaves_no_sum_of_the_others():
    found = kernels(of((A, "10", "1"), (A, "n/a", "1")), DRAM)[A]
    assert summed(found, WRITE) == 2
    with pytest.raises(Unreadable, match="'n/a' instead of a number"):
        summed(found, READ)


def test_a_column_that_ncu_left_out_is_said():
    (kernel,) = kernels(of((A, "10"), units=("byte",), metrics=[READ]), DRAM)[A]
    assert kernel == {READ: 10, WRITE: f"ncu printed no column {WRITE}"}


def test_only_kernels_in_a_range_of_kvlab_are_a_trials_and_the_last_is_nobodys():
    found = kernels(of((None, "5", "5"), (A, "10", "1"), (None, "6", "6")), DRAM)
    assert set(found) == {"", A} and summed(found[A], READ) == 10 and summed(found[""], READ) == 11
    assert kernels(of(), DRAM) == {}


def test_a_range_is_found_in_whichever_column_it_stands():
    text = of((A, "10", "1")).replace(f"kvlab-{A}", "elsewhere").replace('"(132, 1, 1)"', f'"0:kvlab-{A}/x"', 1)
    assert set(kernels(text, DRAM)) == {A}


def test_a_kernel_in_two_ranges_is_nobodys():
    text = of((A, "10", "1")).replace(f"kvlab-{A}", f"kvlab-{A} kvlab-{B}")
    with pytest.raises(Unreadable, match="2 of kvlab's ranges"):
        kernels(text, DRAM)


@pytest.mark.parametrize("log, why", [
    ("", "printed no table"), (BANNER, "printed no table"), ("==WARNING== No kernels were profiled.\n", "No kernels"),
    ('"ID","Kernel Name"\n', "no row of units"), ('"ID","Kernel Name"\n"0","k"\n', "no row of units"),
    ('"ID","x"\n"",""\n"0","\x00' + "y" * 200_000, "no CSV")])
def test_what_is_no_table_says_what_it_is(log, why):
    with pytest.raises(Unreadable, match=why):
        kernels(log, DRAM)


def test_messages_after_and_within_the_table_are_no_rows():
    lines = of((A, "10", "1")).splitlines()
    text = "\n".join([*lines[:3], "==WARNING== something", *lines[3:], "==PROF== Disconnected from process 4711"])
    assert summed(kernels(text, DRAM)[A], READ) == 10


def test_means_weigh_kernels_by_their_time():
    metrics = {"gpu__time_duration.sum": "ns", "sm__cycles_active.avg": "cycle", "sm__cycles_elapsed.max": "cycle",
               "lts__t_sector_hit_rate.pct": "%"}
    units = [unit(m) for m in metrics]
    assert units == list(metrics.values())
    found = kernels(of((A, "3,000", "90", "100", "80"), (A, "1,000", "10", "100", "40"), units=units, metrics=metrics),
                    metrics)[A]
    time, active, elapsed, hit = metrics
    assert weighted(found, hit, time) == pytest.approx(0.7)          # (3 × 80 % + 40 %) / 4
    assert weighted(found, active, time, elapsed) == pytest.approx(0.7)
    for zero in (time, elapsed):
        with pytest.raises(Unreadable, match="gave 0 for " + zero):
            weighted([{**kernel, zero: 0.0} for kernel in found], active, time, elapsed)


def test_ncus_refusals_come_with_a_remedy_and_names_of_kernels_are_none():
    assert "NVreg_RestrictProfilingToAdminUsers=0" in refused(BANNER + PERMISSION)
    assert refused(of((A, "1", "1")).replace("flash", "concurrently")) == "" == refused(BANNER)


def test_metrics_that_ncu_does_not_know_are_told_apart():
    both = (READ, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")
    assert unknown(f"==ERROR== Failed to find metric {both[1]}\n", both) == [both[1]]
    assert unknown("==ERROR== Failed to access the following 1 metrics: sm__pipe_tensor_cycles_active.avg\n",
                   both) == [both[1]]
    assert unknown(of((A, "1", "1")) + "==ERROR== other\n", both) == []
