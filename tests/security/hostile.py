"""What strangers may have written into names, notes and files, and runs that are full of it."""
import dataclasses
import json

from kvlab.record.environment import Manifest, VariantSource
from kvlab.record.reading import COLUMNS, Reading, failed, missing, table
from kvlab.record.store import RunStore

# each sets window.hacked or asks a server, if it is taken for markup or a link
MARKUP = ('<img src=x onerror="window.hacked=1">', "</script><script>window.hacked=1</script>",
          "\"><svg onload='window.hacked=1'>", "</td></table></style><iframe src=http://127.0.0.1:9/leak>",
          "<a href='javascript:window.hacked=1'>x</a>", "&quot;&lt;script&gt;window.hacked=1&lt;/script&gt;",
          "<style>@import 'http://127.0.0.1:9/leak'</style>", "-->\n<script>window.hacked=1</script><!--",
          "]]><script>window.hacked=1</script>", "{{constructor.constructor('window.hacked=1')()}}")
BIDI = "user\u202e\u2066// begin admin\u2069"
TERMINAL = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b1A\r\x08 [bold]markup[/bold] [link=http://127.0.0.1:9/leak]x[/link]"
LATEX = "\\input{/etc/passwd}\\write18{id}\n\\input{/etc/passwd}\r\\immediate\\write18{id}%}{^^5cinput{/etc/passwd}"
FORMULAS = ("=cmd|'/C calc'!A0", "+1+cmd|'/C calc'!A0", "-2+3+cmd|'/C calc'!A0", "@SUM(1+9)*cmd|'/C calc'!A0",
            "\t=1+1", "'=HYPERLINK(\"http://127.0.0.1:9/leak\")")
ALL = " ".join(MARKUP) + BIDI + TERMINAL + LATEX


def rows(case, text, value):
    """A measured latency, a number of a metric with that name, one that is missing and one that failed."""
    context = dict(comparison_id=case, case_id=case, phase="decode", kv_len=1024, q_len=1, batch_size=1,
                   **{name: text for name in ("variant", "device", "dtype", "kv_format", "format_path", "page_order",
                                              "model", "data", "case")})
    about = dict(hardware=text, source=text, method=text, cache_state=text, denominator=text, scope="call")
    readings = [Reading("latency_s", value, "s", "measured", low=value * 0.9, high=value * 1.1, n=9, note=text,
                        **about),
                Reading(f"m {text}", value, f"u {text}", "modelled", note=text, **about),
                missing("power", "W", text, **about), failed("kernel_error", "ratio", text, **about)]
    return [{**context, **dataclasses.asdict(reading)} for reading in readings]


def run(folder, text=ALL, study="memory_wall", values=(1e-3,), **manifest):
    """A closed run whose every text is `text`."""
    one = Manifest(study=study, argv=["kvlab", text], size=text, device=text, models=[text], seeds=[0],
                   variants=[VariantSource(ref=text, sha256="a" * 64)], environment={"cpu": text, text: [text]},
                   **manifest)
    store = RunStore.create(folder, study, one)
    for number, value in enumerate(values):
        store.append(f"c{number}", rows(f"c{number}", text, value))
    store.close()
    return store.path


def any_table(**columns):
    """A result table whose text columns hold whatever is given: no rule of kvlab's own was asked."""
    made = table(rows("c0", "sdpa", 1e-3))
    for name, text in columns.items():
        made[name] = made[name].astype("string").where(made["value"].isna(), text) if name == "kind" else text
    return made.astype(COLUMNS)


def as_parquet(frame, path):
    """The table as a file of today's schema version, written without kvlab."""
    import pyarrow
    import pyarrow.parquet

    from kvlab.record.reading import SCHEMA_VERSION
    arrow = pyarrow.Table.from_pandas(frame, preserve_index=False)
    arrow = arrow.replace_schema_metadata({**arrow.schema.metadata, "kvlab.units": json.dumps({}),
                                           "kvlab.schema_version": str(SCHEMA_VERSION)})
    pyarrow.parquet.write_table(arrow, path)
    return path
