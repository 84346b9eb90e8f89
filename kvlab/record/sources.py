"""Which runs and files of results are meant, each looked at before it is read: they may be anybody's.

Only manifests and the footers of Parquet files are understood here, so that a thousand runs are found within a second
(a file's checksum takes 0.4 s per GB).
"""
from __future__ import annotations

import errno
import glob
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvlab.record import seal
from kvlab.record._places import is_url
from kvlab.record.environment import Manifest, opened_file
from kvlab.record.export import StoreError
from kvlab.record.migrate import ADDED, check_schema_version
from kvlab.record.reading import COLUMNS
from kvlab.record.remote import fetched
from kvlab.record.store import find_run

REFERENCE = "reference"                                     # the word for the runs that ship with kvlab
FILES = (".parquet", ".csv", ".jsonl")
_TYPES = {"string": ("BYTE_ARRAY", ("STRING",)), "Int64": ("INT64", ("NONE", "INT")), "float64": ("DOUBLE", ("NONE",))}
_ROWS_PER_BYTE = 8                                          # a reading takes a bit at least, however well it is packed


class Source(NamedTuple):
    """Where the readings of a run or of a file of results are.

    path: the run directory, or the file. manifest: of a run. readings: the file to read, without links. rows: of
    Parquet, as its footer has it; None where the file must be read to know. lacks: columns that a later schema version
    added. named: it was asked for itself, so that it may not be left out.
    """
    path: Path
    manifest: Manifest | None
    readings: Path
    rows: int | None = None
    lacks: tuple[str, ...] = ()
    named: bool = False


class Bad(NamedTuple):
    """A run or file that was found and cannot be read, and why, in one sentence."""
    path: Path
    why: str


def sources(stores: tuple[Path | str, ...], profiles: Path | str = "profiles") -> Iterator[Source | Bad]:
    """What the stores name, each run and file once.

    Those without a manifest of their own may hold several runs. A store is a run (directory or id), a folder that holds
    <study>/<run> or runs, a .parquet, .csv or .jsonl file, a pattern such as "old/*.parquet", the word "reference", or
    the URL of a run or of one file.
    What was found in a folder or by a pattern and cannot be read is Bad; what was named itself raises ValueError,
    StoreError or KeyError.
    """
    seen: set[Path] = set()
    look = _Footers()
    for store in stores:
        pattern = _pattern(str(store))
        for path, within in _meant(str(store), Path(profiles)):
            try:
                place = path.resolve()
                if within is not None and not place.is_relative_to(within):
                    raise ValueError(f"{path} leads out of {within}; name the run itself to read it")
                found = _run(path, place, look) if place.is_dir() else _file(path, place, look, str(store) == REFERENCE)
                if found.readings in seen:
                    continue
                seen.add(found.readings)
            except (ValueError, OSError, RecursionError) as error:
                why = _sentence(error, path)
                if within is None and not pattern:
                    raise error if isinstance(error, StoreError) else ValueError(why) from None
                yield Bad(path, why)
            else:
                yield found._replace(named=within is None and not pattern)


def _meant(store: str, profiles: Path) -> Iterator[tuple[Path, Path | None]]:
    """(run directory or file, the folder that it was found in: None where it was named)."""
    path = Path(store)
    if store == REFERENCE:
        from kvlab.catalog import data_dir
        yield from ((file, None) for file in sorted((data_dir() / "reference").glob("*.parquet")))
    elif is_url(store):
        yield fetched(store), None
    elif path.is_dir() and not _is_run(path):
        found = {file.parent for name in ("manifest.json", "readings.jsonl", "readings.parquet")
                 for pattern in (f"*/{name}", f"*/*/{name}") for file in path.glob(pattern)}
        if not found:
            raise StoreError(errno.ENOENT, f"{path} holds no runs; give a folder with <study>/<run> in it, such as the "
                                           "profiles that kvlab run writes, a run directory or a file of results")
        folder = path.resolve()
        yield from ((run, folder) for run in sorted(found, key=lambda one: (one.name, one)))
    elif path.exists() or path.is_symlink():
        yield path, None
    elif _pattern(store):
        names = sorted(glob.glob(store, recursive=True))
        kept = [Path(name) for name in names if Path(name).suffix in FILES or _is_run(Path(name))]
        if not kept:
            raise StoreError(errno.ENOENT, f"no run and no file of results has a name like {store}")
        yield from ((name, None) for name in kept)
    elif path.suffix in FILES or len(path.parts) > 1:
        raise StoreError(errno.ENOENT, f"there are no results at {path}; give a run directory, a folder of runs, or a "
                                       ".parquet, .csv or .jsonl file")
    elif store == str(profiles):
        raise StoreError(errno.ENOENT, f"there is no folder {store} with runs here; kvlab run memory_wall makes one, "
                                       f"and the word {REFERENCE} stands for the runs that ship with kvlab")
    else:
        yield find_run(store, profiles), None


def _pattern(store: str) -> bool:
    return any(letter in store for letter in "*?[") and not Path(store).exists()


def _is_run(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def _run(path: Path, place: Path, look: _Footers) -> Source:
    """A run directory. No file of it may be a link: it could lead to any file of the machine."""
    manifest, closed, journal = (place / name for name in ("manifest.json", "readings.parquet", "readings.jsonl"))
    there = [file for file in (manifest, closed, journal) if _is_plain(file)]
    about = Manifest.read(path)
    if closed in there:
        return Source(path, about, closed, *look.at(closed))
    return Source(path, about, journal)


def _is_plain(file: Path) -> bool:
    """Whether there is such a file; ValueError where it is something else."""
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise ValueError(f"{file} is no plain file, and of a run nothing else is read; put a copy in its place")
    return True


def _file(path: Path, place: Path, look: _Footers, shipped: bool) -> Source:
    """A file of results; beside one that ships with kvlab lies the manifest of its run."""
    if path.suffix not in FILES or not path.is_file():
        raise ValueError(f"{path} is no result table; give a run directory or one of: {', '.join(FILES)}")
    if path.suffix != ".parquet":
        return Source(path, None, place)
    about = path.with_suffix(".json")
    manifest = Manifest.model_validate_json(about.read_bytes()) if shipped and about.exists() else None
    return Source(path, manifest, place, *look.at(place))


class _Footers:
    """What the footers of Parquet files promise, held against the result table; one schema is looked at once."""

    def __init__(self):
        self._known: list[tuple] = []                       # (schema, version, columns it lacks)

    def at(self, path: Path) -> tuple[int, tuple[str, ...]]:
        """(rows, columns that a later version added); ValueError says what is wrong with the file."""
        import pyarrow
        import pyarrow.parquet
        if any(letter in "*?[" or "\ud800" <= letter <= "\udfff" for letter in str(path)):
            raise ValueError(f"the path {path} has *, ? or [ in it, which a query takes for a pattern, or bytes "
                             "that are no text; rename it")
        try:
            with opened_file(path) as file:
                seal.check(file)
            footer = pyarrow.parquet.read_metadata(pyarrow.OSFile(str(path)))
            rows = sum(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            raise ValueError(f"{path} cannot be read as Parquet ({error}); in a run directory, delete it and the "
                             "journal is read instead") from None
        size = path.stat().st_size
        if rows != footer.num_rows or not 0 <= rows <= _ROWS_PER_BYTE * size:
            raise ValueError(f"{path} is damaged: it claims {footer.num_rows:,} readings ({rows:,} in its parts) in "
                             f"{size:,} bytes; in a run directory, delete it and the journal is read instead")
        version = (footer.metadata or {}).get(b"kvlab.schema_version", b"unknown").decode(errors="replace")
        number = check_schema_version(int(version) if version.isdecimal() and len(version) < 9 else version, str(path))
        for schema, known, lacks in self._known:
            if known == number and schema.equals(footer.schema):
                return rows, lacks
        lacks = _lacking(footer.schema, number, path)
        self._known.append((footer.schema, number, lacks))
        return rows, lacks


def _lacking(schema, version: int, path: Path) -> tuple[str, ...]:
    """The columns that versions after this one added; ValueError where others are missing, unknown or of odd types."""
    try:
        columns = {one.path: one for one in (schema.column(i) for i in range(len(schema)))}
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: the name of a column is no text ({error})") from None
    later = tuple(name for since, added in ADDED.items() if since > version for name in added)
    wrong = [f"{name} {'is unknown' if name not in COLUMNS else 'is missing'}" for name in {**COLUMNS, **columns}
             if (name in columns) != (name in COLUMNS and name not in later)]
    for name, one in columns.items():
        if name in COLUMNS:
            physical, logical = _TYPES[COLUMNS[name]]
            if (one.physical_type != physical or one.logical_type.type not in logical or one.max_repetition_level
                    or one.max_definition_level > 1):
                wrong.append(f"{name} holds {one.physical_type} instead of {COLUMNS[name]}")
    if wrong or len(columns) != len(schema):
        raise ValueError(f"{path} is not the result table of this kvlab: {', '.join(wrong[:5]) or 'a column twice'}"
                         f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}; give a run directory, or a table "
                         "that kvlab wrote")
    return later


def _sentence(error: Exception, path: Path) -> str:
    if isinstance(error, RecursionError):
        return f"{path / 'manifest.json'} is damaged: it is nested too deep"
    if isinstance(error, OSError) and not isinstance(error, StoreError):
        return f"{path} cannot be read: {error.strerror or error}"
    return " ".join(str(error).split())
