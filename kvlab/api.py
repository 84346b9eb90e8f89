"""The library's front door: `kvlab.measure`, `kvlab.run`, `kvlab.figure`, each returning a DataFrame or a file list."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.kv.cache import Layout
from kvlab.shapes import Workload

if TYPE_CHECKING:
    import pandas as pd


def measure(variant, workload: Workload, *, kv_format: str | None = None, layout: Layout | None = None,
            dtype: str | None = None, device: str = "cpu", threads: int = 1, seed: int = 0,
            data: Path | str = "gaussian", probes: Sequence[str] | None = None, also: Sequence[str] = (),
            tune: bool = True, artifacts: Path | str | None = None) -> pd.DataFrame:
    """One attention call under every probe, in this process: the result table of one case (`kvlab.wide` for one line).

    variant: a registry name, "file.py:Class", a class or an instance. kv_format, dtype default to fp32 on a CPU and
    bf16 on CUDA. data: "gaussian", "outlier", or captured tensors as "file:<sha256>" or the path of their file (see
    kvlab.capture). probes: names of `kvlab ls probes` (default all that do not run on request only); also: further
    ones, such as "torch_profile". tune: False keeps a kernel from choosing its configuration by measuring. artifacts: a
    folder for samples/ and traces/, which rows name in `artifact`. Wrong names raise KeyError, wrong sizes ValueError;
    what fails while it runs is a row with status failed or oom.
    """
    from kvlab.attention import Comparison, trial
    from kvlab.record.export import made_folder
    from kvlab.record.reading import table
    from kvlab.studies._run import Job, untuned
    one = Comparison((trial(variant, workload, kv_format=kv_format, layout=layout, dtype=dtype, device=device,
                            threads=threads, seed=seed, data=data),))
    folder = None if artifacts is None else made_folder(Path(artifacts))
    job = Job(artifacts=folder, probes=None if probes is None else tuple(probes), also=tuple(also))
    return table(job(one if tune else untuned(one)))


def size(model, kv_len: int, batch_size: int = 1, kv_format="bf16", tp: int = 1):
    """KV cache of batch_size sequences of kv_len tokens each: `kvlab.size("Qwen/Qwen2-72B", 32768).kv_bytes`.

    model: a ModelSpec, or what `kvlab size` takes (a catalogue id, a file). Returns and refuses what
    kvlab.kv.sizing.size does.
    """
    from kvlab.catalog.resolve import model as resolved
    from kvlab.kv.sizing import size as size_of
    return size_of(resolved(str(model)) if isinstance(model, str | Path) else model, kv_len, batch_size, kv_format, tp)


def run(study: str, *, size: str | None = None, device: str | None = None, out: Path | str = "profiles",
        resume: Path | str | None = None, variants: Iterable | None = None, model: str | None = None,
        also: Sequence[str] = (), tune: bool = True, engine: str | None = None, address: str | None = None,
        each=None, progress: bool = True) -> pd.DataFrame:
    """Run a study in a worker process, or on a cluster, and return its table; `.attrs["run"]` is the run directory.

    The parameters are those of `kvlab run`; variants may also be classes or instances, also=("torch_profile",) is
    --trace, tune=False is --no-tune, and `each` maps the study's cases some other way (see kvlab.studies._run).
    """
    from kvlab.studies._run import run as run_study
    store = run_study(study, size=size, device=device, out=out, resume=resume, variants=variants, model=model,
                      also=also, tune=tune, engine=engine, address=address, each=each, progress=progress)
    table = store.table()
    table.attrs["run"] = str(store.path)
    return table


def findings(table: pd.DataFrame) -> pd.DataFrame:
    """What a study's result table says, in words: name, sentence, value, unit, interval and kind, one line each."""
    import pandas as pd

    from kvlab.studies._run import Finding, studies
    names = [name for name in table["study"].unique() if hasattr(studies[name], "findings")]
    found = [finding for name in names for finding in studies[name].findings(table[table["study"] == name])]
    return pd.DataFrame(found, columns=Finding._fields)


def reference(study: str) -> Path:
    """The verified results of a study that ship with kvlab; KeyError where it ships none."""
    from kvlab.catalog import data_dir
    from kvlab.registry import no_such
    shipped = {path.stem: path for path in (data_dir() / "reference").glob("*.parquet")}
    if study not in shipped:
        raise no_such("reference run", study, shipped)
    return shipped[study]


def ledger(runs: Iterable[Path | str] = (), *, ids: Iterable[str] = (), section: int | None = None) -> pd.DataFrame:
    """The article's claims with their verdicts, one line each, in English and Chinese (columns that end in _zh).

    runs: results to judge in place of the shipped ones of their studies (directories, ids, files). ids: claims such as
    "C03". section: of the article, 1 … 8. Columns value, unit, low, high and n are the headline's; kind is the weakest
    of the evidence that decided; evidence lists all of it.
    """
    import pandas as pd

    from kvlab.claims import as_row
    from kvlab.claims import ledger as judge_all
    from kvlab.claims._results import Results, runs_of
    found = judge_all(Results(runs_of(map(str, runs))), ids=ids, section=section)
    return pd.DataFrame([as_row(one) for one in found], dtype=object)          # None stays None: there is no number


def figure(name: str, run: pd.DataFrame | Path | str | None = None, *, out: Path | str | None = None,
           formats: Sequence[str] = ("png", "pdf"), venue: str | None = None, columns: int = 1, lang: str = "en"):
    """Draw a figure from stored rows; returns the matplotlib Figure, or with `out` the files written.

    run: a result table, a run directory or a file of results (default: the reference run shipped with kvlab). venue:
    neurips, icml, iclr, acl, ieee, acm or slides, over so many of its columns; the footer is then a caption's text.
    lang: en, or zh for labels in Chinese.
    """
    from kvlab.figures import make, save
    if out is None:
        return make(name, run, venue=venue, columns=columns, lang=lang)
    return save(name, run, Path(out), formats, venue=venue, columns=columns, lang=lang)
