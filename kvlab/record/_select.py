"""One SELECT that only reads, told from all else; what DuckDB says of it in one sentence; its types as tables here."""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

_NODES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_TABLE_FUNCTIONS = {"range", "generate_series", "unnest"}


def plain(kind):
    """DuckDB's sums of whole numbers are 128 bits wide, and 1.5 is a decimal: as tables here have them."""
    import pyarrow
    if pyarrow.types.is_decimal(kind):
        return pyarrow.int64() if kind.scale == 0 else pyarrow.float64()
    return kind


def only_reads(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Refuse what is not one SELECT over the tables: DuckDB's own parse of it is looked through.

    A SELECT may write, by COPY inside WITH, and a table function may run SQL that it is handed as text.
    """
    try:
        tree = json.loads(con.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0])
    except RecursionError:
        raise ValueError("the SQL is nested too deep") from None
    if tree.get("error"):
        said = " ".join(str(tree.get("error_message", "")).split())
        if "Only SELECT" in said:
            pivot = "; in place of PIVOT there is avg(value) FILTER (metric = 'latency_s')"
            raise ValueError(f"a query is one SELECT, and nothing else is run{pivot if 'pivot' in sql.lower() else ''}")
        raise ValueError(f"the SQL cannot be read: {said}{_place(tree, sql)}{_word(sql)}")
    if len(tree["statements"]) != 1:
        raise ValueError(f"a query is one SELECT, and here are {len(tree['statements'])} statements; ask one at a time")
    pending = [tree["statements"][0]]
    while pending:
        one = pending.pop()
        pending += [part for part in (one.values() if isinstance(one, dict) else one) if isinstance(part, dict | list)]
        kind = one.get("type") if isinstance(one, dict) else None
        if isinstance(kind, str) and kind.endswith("_NODE") and kind not in _NODES:
            raise ValueError(f"a query only reads, and this one has {kind.partition('_')[0]} in it")
        if kind == "TABLE_FUNCTION" and (name := one["function"].get("function_name")) not in _TABLE_FUNCTIONS:
            raise ValueError(f"a query is about readings and runs, and {name}(…) is neither; of functions that give "
                             f"tables there are {', '.join(sorted(_TABLE_FUNCTIONS))}")


def _place(tree: dict, sql: str) -> str:
    place = str(tree.get("position", ""))
    return f", at {sql[int(place):][:30]!r}" if place.isdecimal() and sql[int(place):].strip() else ""


def _word(sql: str) -> str:
    """A hint where a column whose name is a word of SQL stands without quotes."""
    words = re.findall(r"\w+", re.sub(r"'[^']*'|\"[^\"]*\"", "", sql.lower()))
    return '; the column case is written "case"' if "case" in words and "when" not in words else ""


def explained(error: Exception, readings: Iterable[str], runs: Iterable[str]) -> ValueError:
    """What DuckDB says of a query, as one sentence; of unknown names with those that there are."""
    import duckdb
    said = first(error)
    if isinstance(error, duckdb.OutOfMemoryException):
        return ValueError(f"the query needs more memory than it may have ({said}); give it more (--memory 4GiB), or "
                          "group and filter more")
    if isinstance(error, duckdb.BinderException | duckdb.CatalogException):
        said = said.replace("!", ".").replace("?", "")
        return ValueError(f"the SQL does not fit the tables: {said}; readings has {', '.join(readings)}; runs has "
                          f"{', '.join(runs)}")
    if isinstance(error, UnicodeDecodeError):
        said = "a file holds text that is none"
    return ValueError(f"the query failed: {said}")


def first(error: Exception) -> str:
    """The first lines of an error of DuckDB, without its copy of the SQL, its advice and its kind."""
    said = " ".join(str(error).partition("\nLINE ")[0].partition("\n\nPossible solutions")[0].split())
    kind, colon, rest = said.partition(" Error: ")
    return (rest if colon and len(kind) < 40 else said).rstrip(".!")
