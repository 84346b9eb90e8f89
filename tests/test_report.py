"""The report: one page that needs nothing else, says what is missing and why, and cannot be made to run anything."""
import dataclasses
from html.parser import HTMLParser

import pytest

from kvlab.record.environment import Manifest, VariantSource
from kvlab.record.reading import Reading, failed, missing
from kvlab.record.store import RunStore, StoreError
from kvlab.report import write_report

EVIL = "<script>alert(1)</script>"
QUOTED = '"><img src=x onerror=alert(1)>'


def rows(comparison, variant, n, value):
    """A prefill case: memory measured, power missing, and for one variant an error."""
    context = dict(comparison_id=comparison, case_id=f"{comparison}-{variant}", phase="prefill", variant=variant,
                   q_len=n, kv_len=n, batch_size=1, num_q_heads=4, group_ratio=4, head_dim=128, replica=0, device="cpu",
                   dtype="fp32", model=EVIL)
    readings = [Reading("peak_extra_bytes", value, "B", "measured", low=value - 2**20, high=value + 2**20, n=1,
                        hardware=f"A CPU {EVIL}"),
                missing("power", "W", f"LibraryNotFound: {EVIL}", source="nvml"),
                failed("kernel_error", "ratio", f"RuntimeError: {QUOTED}") if variant == QUOTED else
                Reading("kernel_error", 3e-7, "ratio", "measured")]
    return [{**context, **dataclasses.asdict(r)} for r in readings]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    manifest = Manifest(study="memory_wall", run_id="20261129T181422Z-8a68e5", argv=["kvlab", "run", EVIL],
                        size="smoke", device="cpu", variants=[VariantSource(ref=EVIL, sha256="a" * 64)],
                        models=[EVIL], seeds=[0],
                        environment={"cpu": f"A CPU {EVIL}", "gpus": [], "caches_bytes": {"L3": 33554432}})
    store = RunStore.create(tmp_path_factory.mktemp("runs"), "memory_wall", manifest)
    for n in (512, 1024, 2048):
        store.append(f"p{n}", [row for variant, bytes_each in ((EVIL, 3000), (QUOTED, 9000), ("sdpa", 4000))
                               for row in rows(f"p{n}", variant, n, float(bytes_each * n))])
    store.close()
    return store


@pytest.fixture(scope="module")
def page(store):
    return write_report(store.path).read_text(encoding="utf-8")


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "every element is closed in order"

    def handle_data(self, data):
        self.texts.append(data)


def test_hostile_text_stays_text(page):
    found = Elements(page)
    assert "<script" not in page and "<img src=x" not in page and not found.open
    assert set(found.tags) <= {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li",
                               "figure", "img", "figcaption", "b", "div", "table", "thead", "tbody", "tr", "th", "td",
                               "span", "small", "wbr"}
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "href"]
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 10 and EVIL in "".join(found.texts)
    assert any(value.startswith("default-src 'none'") for name, value in found.attributes if name == "content")


def test_nothing_is_loaded_from_elsewhere(page):
    sources = [value for name, value in Elements(page).attributes if name == "src"]
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,iVBOR")
    assert "http://" not in page and "https://" not in page and "url(" not in page


def test_it_says_what_was_run_found_and_drawn(page, store):
    text = "".join(Elements(page).texts)
    for part in ("memory_wall, run 20261129T181422Z-8a68e5", "Is decoding limited by memory", "kvlab run", "smoke",
                 "SHA-256 aaaaaaaaaaaa", store.manifest.created_utc, '{"L3": 33554432}',
                 "Prefill memory of sdpa grows as n^1.00", "attention_memory. Bytes that a prefill call takes",
                 "Not drawn: figure memory_wall needs intensity", "Not drawn: figure decode_time needs latency_s"):
        assert part in text, part


def test_the_table_has_every_value_with_interval_and_kind(page):
    text = "".join(Elements(page).texts)
    assert "7.81 MiB[6.81 MiB, 8.81 MiB]" in text, "4000 B × 2048"
    assert "3e-07" in text and "peak_extra_bytes measured" in text
    assert page.count('<td class="number">') == 9 + 6, "memory of nine cases, error of the six that did not fail"


def test_the_absent_are_grouped_with_their_reasons(page):
    (section,) = [part for part in page.split("<h2>") if part.startswith("What is missing")]
    lines = section.split("<tr>")[2:]
    assert len(lines) == 2
    assert "missing</td><td>LibraryNotFound: &lt;script&gt;" in lines[0] and "<td>nvml</td>" in lines[0]
    assert "<td>9</td>" in lines[0]
    assert "failed</td><td>RuntimeError: &quot;&gt;&lt;img" in lines[1] and "<td>3</td>" in lines[1]
    assert "kernel_error" in lines[1] and "power" not in lines[1]


def test_the_kinds_are_explained(page):
    (section,) = [part for part in page.split("<h2>") if part.startswith("Kinds of numbers")]
    assert [kind for kind in ("measured", "simulated", "modelled", "quoted", "missing") if f">{kind}<" in section] == [
        "measured", "simulated", "modelled", "quoted", "missing"]


def test_a_metric_in_two_kinds_shows_both_and_a_column_of_several_kinds_marks_each_number(tmp_path):
    store = RunStore.create(tmp_path, "other", Manifest(study="other", environment={}))
    for i, kinds in enumerate((("measured", "modelled"), ("simulated",))):
        store.append(f"c{i}", [{"case_id": f"c{i}", "phase": "decode", "variant": f"v{i}",
                                **dataclasses.asdict(Reading("latency_s", 0.001 * (1 + i + j), "s", kind))}
                               for j, kind in enumerate(kinds)])
    (section,) = [part for part in write_report(store.path).read_text().split("<h2>") if part.startswith("Every case")]
    text = "".join(Elements(f"<p>{section.partition('</h2>')[2]}</p>").texts)
    assert text.strip().startswith("decode, calls") and "latency_s_modelled modelled" in text
    assert "1 ms measured" in text and "2 ms simulated" in text and text.count("2 ms") == 2


def test_where_it_is_written(store, tmp_path):
    assert write_report(store.path) == store.path / "report.html"
    assert write_report(store.path, tmp_path) == tmp_path / "report.html"
    assert write_report(str(store.path), tmp_path / "mine.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_a_run_of_an_unknown_study_and_one_without_readings_still_have_a_report(tmp_path):
    store = RunStore.create(tmp_path, "other", Manifest(study="other", environment={}))
    store.close()
    text = "".join(Elements(write_report(store.path).read_text(encoding="utf-8")).texts)
    assert "other, run" in text and "Nothing: every reading has a value." in text and "Findings" not in text
    store = RunStore.create(tmp_path, "memory_wall", Manifest(study="memory_wall", environment={}))
    text = "".join(Elements(write_report(store.path).read_text(encoding="utf-8")).texts)
    assert "Findings" in text and text.count("Not drawn: figure") == 3


def test_what_broke_while_reporting_is_said_in_its_place(store, tmp_path, monkeypatch):
    from kvlab.figures import attention_memory
    from kvlab.studies import memory_wall

    def broken(*_):
        raise RuntimeError(EVIL)
    monkeypatch.setattr(memory_wall, "findings", broken)
    monkeypatch.setattr(attention_memory, "draw", broken)
    page = write_report(store.path, tmp_path).read_text(encoding="utf-8")
    assert page.count("RuntimeError: &lt;script&gt;alert(1)") == 2 and "<script" not in page


def test_what_is_no_run_directory_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match="is about a run directory"):
        write_report(store.path / "readings.parquet")
    with pytest.raises(StoreError, match="no run directory"):
        write_report(tmp_path)
    with pytest.raises(StoreError, match="cannot write"):
        write_report(store.path, tmp_path / "no" / "such" / "folder.html")


def test_a_run_on_a_cluster_says_which_worker_gave_how_many_cases_and_on_what(tmp_path):
    store = RunStore.create(tmp_path, "soak", Manifest(study="soak", options={"engine": "ray"}, environment={}))
    for name, worker in (("a", "1f0000"), ("b", "1f0000"), ("c", "2e0000/gpu0")):
        store.append(name, [dict(worker=worker, **dataclasses.asdict(missing("power", "W", "none")))])
    store.met("1f0000", {"cpu": f"A CPU {EVIL}", "logical_cores": 4, "gpus": []})
    store.met("2e0000/gpu0", {"cpu": "B", "gpus": [{"name": "H200"}], "torch": "2.13.0"})
    store.close()
    texts = Elements(write_report(store.path).read_text()).texts
    at = texts.index("worker", texts.index("The workers"))
    said = [text for text in texts[at:] if text.strip()]
    assert ["1f0000", "2", f"A CPU {EVIL}", "4"] == said[7:11] and said[11:15] == ["2e0000/gpu0", "1", "H200", "B"]
    assert texts[texts.index("engine") + 1] == "ray"
    (store.path / "workers.json").write_text("{")
    assert "workers.json is damaged" in write_report(store.path).read_text()
