"""Numbers for people: the unit chosen, the digits shown, and what absent values look like."""
import pytest

from kvlab.units import GiB, KiB, MiB, display


@pytest.mark.parametrize("value, unit, text", [
    (1_342_177_280, "B", "1.25 GiB"),                           # the article's Qwen2-72B at 4096 tokens
    (GiB - MiB, "B", "1023 MiB"),
    (MiB, "B", "1 MiB"),
    (1536, "B", "1.5 KiB"),
    (KiB - 1, "B", "1023 B"),
    (-3 * GiB, "B", "-3 GiB"),
    (0, "B", "0 B"),
    (1.5, "s", "1.5 s"),
    (0.0123456, "s", "12.3 ms"),
    (4.2e-6, "s", "4.2 µs"),
    (7e-9, "s", "7 ns"),
    (4.8e12, "B/s", "4.8 TB/s"),
    (1e9, "B/s", "1 GB/s"),                                     # rates are decimal: GB is not GiB
    (123.4e9, "flop/s", "123 GFLOP/s"),
    (2e12, "flop", "2 TFLOP"),
    (0.98765, "ratio", "0.988"),
    (350.0, "W", "350 W"),
])
def test_display(value, unit, text):
    assert display(value, unit) == text


def test_absent_values_are_a_dash_and_never_a_number():
    assert display(None, "B") == display(float("nan"), "s") == display(None, "ratio") == "–"


def test_digits():
    assert display(1_342_177_280, "B", digits=2) == "1.2 GiB"
    assert display(0.123456, "ratio", digits=5) == "0.12346"
