"""What public traces of requests look like, and how one of their lines becomes a time and a request's fields.

Every number a line needs is checked here; the sentence of a refusal says what stood there and what is allowed.
"""
from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from kvlab.catalog._files import too_dense
from kvlab.registry import no_such
from kvlab.serving._trace_lines import BadLine
from kvlab.serving.request import Request

MOST_TOKENS = 10**8             # of one prompt or answer; the longest context of a model known is 10⁷
MOST_COLUMNS = 1000
MOONCAKE_PIECE = 512            # tokens per hash id
_OWN = {field.name for field in fields(Request)}
_OWN_NEEDED = ("id", "arrival_s", "prompt_tokens", "output_tokens")
Record = dict[str, object]


@dataclass(frozen=True)
class Format:
    """A format of traces. needs: columns or keys that its first line must have.

    parse: record -> (time in seconds on the trace's own clock, fields of Request); None where the line is a request
    that failed in the trace itself. from_zero: times count from the first request; else they stand as given.
    """
    name: str
    text: str                                               # "csv" or "jsonl"
    needs: tuple[str, ...]
    parse: Callable[[Record], tuple[float, dict] | None]
    from_zero: bool = True


def _azure(record: Record):
    return _clock(record, "TIMESTAMP"), dict(prompt_tokens=_tokens(record, "ContextTokens"),
                                             output_tokens=_tokens(record, "GeneratedTokens"))


def _burstgpt(record: Record):
    time = _seconds(record, "Timestamp")
    if _whole(record, "Response tokens") == 0:
        return None
    return time, dict(prompt_tokens=_tokens(record, "Request tokens"), output_tokens=_tokens(record, "Response tokens"))


def _mooncake(record: Record):
    prompt, pieces = _tokens(record, "input_length"), _pieces(record.get("hash_ids", []), "hash_ids")
    whole = -(-prompt // MOONCAKE_PIECE)
    if pieces and len(pieces) != whole:
        raise ValueError(f"has {len(pieces):,} hash_ids for input_length {prompt:,}; it takes {whole:,}, one for every "
                         f"{MOONCAKE_PIECE} tokens begun")
    return _seconds(record, "timestamp") / 1000, dict(
        prompt_tokens=prompt, output_tokens=_tokens(record, "output_length"), prefix=pieces,
        piece_tokens=MOONCAKE_PIECE)


def _engine_run(record: Record):
    return _seconds(record, "arrival_time"), dict(
        id=_name(record, "request_id"), prompt_tokens=_tokens(record, "input_toks"),
        output_tokens=_tokens(record, "output_toks"))


def _kvlab(record: Record):
    for name in record:
        if name not in _OWN:
            raise no_such("field of a request", name, _OWN)
    found = dict(record, id=_name(record, "id"), prompt_tokens=_tokens(record, "prompt_tokens"),
                 output_tokens=_tokens(record, "output_tokens"), prefix=_pieces(record.get("prefix", []), "prefix"))
    for name in {"piece_tokens", "max_tokens"} & set(record) - ({"max_tokens"} if record.get("max_tokens") is None
                                                                else set()):
        found[name] = _tokens(record, name)
    if "priority" in record:
        found["priority"] = _whole(record, "priority", least=-2**31)
    most = -(-found["prompt_tokens"] // found.get("piece_tokens", 512))
    if len(found["prefix"]) > most:
        raise ValueError(f"has {len(found['prefix']):,} pieces in prefix; its prompt has room for {most:,}")
    return _seconds(found, "arrival_s"), found


FORMATS = {f.name: f for f in (
    # Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md; the 2024 files have the same columns.
    Format("azure", "csv", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    # Source: HPMLL/BurstGPT README, "Schema"; BurstGPT_3 has Session ID and Elapsed time as well.
    Format("burstgpt", "csv", ("Timestamp", "Request tokens", "Response tokens"), _burstgpt),
    # Source: kvcache-ai/Mooncake, FAST25-release/traces; timestamp in ms, hash_ids of 512 tokens each.
    Format("mooncake", "jsonl", ("timestamp", "input_length", "output_length"), _mooncake),
    # Source: casys-kaist/LLMServingSim, bench/examples/*/requests.jsonl (runs of vLLM).
    Format("engine_run", "jsonl", ("arrival_time", "input_toks", "output_toks"), _engine_run),
    Format("kvlab", "jsonl", _OWN_NEEDED, _kvlab, from_zero=False),
)}


def detect(first: str, name: str | None, where: str) -> tuple[Format, list[str] | None]:
    """The format of a trace by its first line, and the columns if it is CSV. name: insist on that format.

    Refused: a name unknown (KeyError), a first line that is of no format, or not of that one (ValueError).
    """
    if name is not None and name not in FORMATS:
        raise no_such("format of traces", name, FORMATS)
    try:
        keys = list(json_object(first)) if first.startswith("{") else _cells(first)
    except ValueError as error:
        raise ValueError(f"{where}: the first line {error}; {_allowed()}") from error
    for one in [FORMATS[name]] if name else FORMATS.values():
        if set(one.needs) <= set(keys) and first.startswith("{") == (one.text == "jsonl"):
            if one.text == "csv" and len(set(keys)) < len(keys):
                raise ValueError(f"{where}: the header names a column twice; give every column its own name")
            return one, keys if one.text == "csv" else None
    raise ValueError(f"{where} begins with {', '.join(keys)!r:.200}, which is no {name or 'known'} trace; {_allowed()}")


def record(text: str, columns: list[str] | None) -> Record:
    """One line as field -> value; CSV values are text."""
    if columns is None:
        return json_object(text)
    cells = _cells(text)
    if len(cells) != len(columns):
        raise ValueError(f"has {len(cells)} values for {len(columns)} columns")
    return dict(zip(columns, cells, strict=True))


def json_object(text: str | BadLine) -> Record:
    """One JSON object. Refused (ValueError): a line that could not be read, anything else, NaN, infinities, absurdly
    long numbers or deep nesting."""
    if isinstance(text, BadLine):
        raise text
    if too_dense(text):
        raise ValueError("is nested too deeply, or holds little but empty lists and objects")
    try:
        found = json.loads(text, parse_constant=_no_constant, parse_int=_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("is no JSON object {…}")
    return found


def _allowed() -> str:
    return "kvlab reads " + "; ".join(f"{f.name} ({f.text}: {', '.join(f.needs)})" for f in FORMATS.values())


def _cells(text: str) -> list[str]:
    if text.count(",") > MOST_COLUMNS:
        raise ValueError(f"has more than {MOST_COLUMNS:,} values")
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise ValueError(f"is no line of CSV ({error})") from error


def _no_constant(word: str):
    raise ValueError(f"has {word}; a number must be finite")


def _int(digits: str) -> int:
    if len(digits) > 20:                                    # a sign and 19 digits, as nanoseconds since 1970 have
        raise ValueError(f"has a whole number of {len(digits):,} digits; 19 are the most")
    return int(digits)


def _got(record: Record, name: str):
    try:
        return record[name]
    except KeyError:
        raise ValueError(f"has no {name}") from None


def _tokens(record: Record, name: str) -> int:
    return _whole(record, name, least=1, most=MOST_TOKENS)


def _whole(record: Record, name: str, least: int = 0, most: int = MOST_TOKENS) -> int:
    got = value = _got(record, name)
    if isinstance(got, str) and got.isascii() and got.removeprefix("-").isdigit() and len(got) < 20:
        value = int(got)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"has {name} {got!r:.40}; it must be a whole number from {least:,} to {most:,}")
    return value


def _seconds(record: Record, name: str) -> float:
    got = _got(record, name)
    try:
        value = math.nan if isinstance(got, bool) else float(got)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < 1e15:                               # below: microseconds survive as a float
        raise ValueError(f"has {name} {got!r:.40}; it must be a finite number of at least 0")
    return value


def _clock(record: Record, name: str) -> float:
    """Seconds of a date and time; digits below a microsecond are dropped, and without a zone it counts as UTC."""
    got = str(_got(record, name))
    try:
        time = datetime.fromisoformat(got)
    except ValueError:
        raise ValueError(f"has {name} {got!r:.40}; it must be a time such as 2023-11-16 18:15:46.6805900") from None
    time = time if time.tzinfo else time.replace(tzinfo=UTC)
    return (time - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()


def _name(record: Record, name: str) -> str:
    got = _got(record, name)
    if not isinstance(got, str) or not 0 < len(got) <= 200:
        raise ValueError(f"has {name} {got!r:.40}; it must be text of 1 to 200 characters")
    return got


def _pieces(got: object, name: str) -> tuple[int, ...]:
    if not isinstance(got, list) or not all(type(piece) is int and -2**63 <= piece < 2**63 for piece in got):
        raise ValueError(f"has {name} {got!r:.40}; it must be a list of whole numbers of at most 64 bits")
    return tuple(got)
