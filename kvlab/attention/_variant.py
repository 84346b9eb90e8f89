"""What a variant must answer, and how one is named in data, so that it is loaded where it is measured."""
from __future__ import annotations

import ast
import inspect
import os
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvlab.kv.cache import Layout
from kvlab.registry import Registry, load_file, no_such

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvlab.attention._base import Inputs, Trial


class Cost(NamedTuple):
    """What an algorithm must move to and from memory, and compute, at the least.

    Never a measurement.
    """
    read_bytes: int
    write_bytes: int
    executed_flops: int

    def plus(self, read: int = 0, write: int = 0, flops: int = 0) -> Cost:
        """The cost with that many bytes and flops more."""
        return Cost(self.read_bytes + read, self.write_bytes + write, self.executed_flops + flops)


class Variant(Protocol):
    """How attention is computed.

    A frozen dataclass in its own file; knobs are its fields.
    """
    name: str
    # optional: default_layout, a Layout; format_path(trial) -> "native" | "gathered" | "decoded", where a kernel
    # decodes itself or blocks are copied; ran(trial) -> str, which of several ways it takes here; a knob tune = True,
    # which --no-tune turns off;
    # compiles = True where each new kind of shape costs seconds, so that tests over many shapes leave it out

    def why_not(self, trial: Trial) -> str | None:
        """One sentence on why this cannot run, or None."""

    def prepare(self, trial: Trial, inputs: Inputs) -> Callable[[], Tensor]:
        """Plan outside the clock; the call returns the output of all query tokens, [sum of q_lens, Q, E].

        The call reads q and the cache when it is called and keeps nothing derived from them between calls.
        """

    def cost(self, trial: Trial, cache_bytes: int = 0) -> Cost:
        """What this algorithm must move and do at the least.

        In front of memory is a cache of cache_bytes that forgets what was used longest ago (LRU), filled with other
        data. What is used again is read again unless it and all that was touched in between fits. Every array that
        is written is written back once, an intermediate too.
        """


variants = Registry("attention variant", "kvlab.attention", attribute="name")
_local: dict[str, type] = {}        # classes that exist only in this process (a notebook cell), by name


@dataclass(frozen=True)
class VariantRef:
    """How a variant is named in data: a registry name, "path/to/file.py:Class" or "cell:Class", and its knobs."""
    ref: str
    knobs: tuple[tuple[str, int | float | str | bool | None], ...] = ()

    @classmethod
    def of(cls, variant: VariantRef | Variant | str) -> VariantRef:
        """A reference to a name, a class or an instance; an unknown name raises KeyError with a near match."""
        if isinstance(variant, VariantRef):
            return variant
        if isinstance(variant, str):
            if ".py:" in variant:
                _class_in(variant)
                path, _, name = variant.rpartition(":")
                return cls(f"{_relative(path)}:{name}")
            if variant.endswith(".py"):
                raise KeyError(f"{variant!r} is a file; name the class in it: {variant}:Class")
            variants[variant]                           # raises for an unknown name, before anything is measured
            return cls(variant)
        kind = variant if isinstance(variant, type) else type(variant)
        knobs = () if kind is variant or not is_dataclass(variant) else tuple(
            (f.name, getattr(variant, f.name)) for f in fields(variant)
            if f.init and getattr(variant, f.name) != f.default)
        for knob, value in knobs:
            if not isinstance(value, int | float | str | bool | None):
                raise ValueError(f"{kind.__name__}({knob}={value!r}): a knob must be a number, a string, a bool or "
                                 "None, so that a row can be run again from its text")
        if kind.__module__.startswith("kvlab.attention."):
            return cls(kind.name, knobs)
        source = getattr(inspect.getmodule(kind), "__file__", None)
        if source and kind.__module__ != "__main__" and "." not in kind.__qualname__:
            return cls(f"{_relative(source)}:{kind.__qualname__}", knobs)
        _local[kind.__qualname__] = kind
        return cls(f"cell:{kind.__qualname__}", knobs)

    @property
    def in_process(self) -> bool:
        """Whether the class exists only in this process, so that no worker can load it."""
        return self.ref.startswith("cell:")

    @property
    def source_file(self) -> Path | None:
        return Path(self.ref.rpartition(":")[0]) if ".py:" in self.ref else None

    def load(self) -> Variant:
        """The variant itself.

        Runs the user's module where the reference names a file, anew when that file changed.
        """
        if self.in_process:
            return _made(self, _local[self.ref.removeprefix("cell:")])
        return _loaded(self, _state(self.source_file))

    @property
    def default_layout(self) -> Layout:
        """The layout that the variant's class names as default_layout, else contiguous.

        Runs none of a user's file.
        """
        if self.source_file is None:
            return getattr(self.load(), "default_layout", Layout())
        for line in _class_in(self.ref).body:
            targets = [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
            given = getattr(line, "value", None)
            if given is not None and any(getattr(t, "id", "") == "default_layout" for t in targets):
                try:
                    if not isinstance(given, ast.Call):
                        raise ValueError(f"got {ast.unparse(given)}")
                    return Layout(*map(ast.literal_eval, given.args),
                                  **{k.arg: ast.literal_eval(k.value) for k in given.keywords})
                except (ValueError, TypeError) as error:
                    raise ValueError(f"default_layout of {self.ref} must be a Layout of plain values: "
                                     f"{error}") from None
        return Layout()

    @property
    def label(self) -> str:
        """What tables and figures show: the variant's own name, with the knobs that were changed.

        Of a user's variant that takes a shipped one's name, its class's.
        """
        try:
            kind = _local[self.ref.removeprefix("cell:")] if self.in_process else None
            name = _name_of(self, kind, _state(self.source_file))
        except (KeyError, ValueError, OSError):             # a file that is no longer there, or no longer Python
            name = self.ref.rpartition(":")[2].rpartition(".")[2]
        return name + (f"({', '.join(f'{k}={v}' for k, v in self.knobs)})" if self.knobs else "")


def _state(file: Path | None) -> tuple:
    """What changes where another file stands under that name, which may be relative."""
    if file is None:
        return ()
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@cache
def _name_of(ref: VariantRef, kind: type | None, state: tuple) -> str:
    if ":" not in ref.ref:
        return ref.ref
    class_name, own = ref.ref.rpartition(":")[2].rpartition(".")[2], None
    if ref.in_process:
        own = getattr(kind, "name", None)
    else:
        for line in _class_in(ref.ref).body:
            target = line.target if isinstance(line, ast.AnnAssign) else (getattr(line, "targets", None) or [None])[0]
            if getattr(target, "id", "") == "name" and isinstance(line.value, ast.Constant):
                own = line.value.value
    return own if isinstance(own, str) and own and own not in variants.names() else class_name


@cache
def _loaded(ref: VariantRef, state: tuple) -> Variant:
    if not ref.source_file:
        return _made(ref, variants[ref.ref])
    module, name = load_file(ref.source_file), ref.ref.rpartition(":")[2]
    if not isinstance(getattr(module, name, None), type):
        raise KeyError(f"no class {name!r} in {ref.source_file}")
    return _made(ref, getattr(module, name))


def _made(ref: VariantRef, kind: type) -> Variant:
    variant = kind(**dict(ref.knobs))
    missing = [m for m in ("why_not", "prepare", "cost") if not callable(getattr(variant, m, None))]
    if missing or not isinstance(getattr(variant, "name", None), str):
        raise TypeError(f"{ref.ref} is not a variant: it needs a name and the methods why_not, prepare, cost "
                        f"(missing: {', '.join(missing) or 'name'})")
    return variant


def _class_in(ref: str) -> ast.ClassDef:
    """The class that "path.py:Class" names, read but not run: a user's file is only ever run by a worker."""
    path, _, name = ref.rpartition(":")
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), filename=path)
    except OSError as error:
        raise KeyError(f"cannot read {path!r} ({error.strerror}); give the path of a Python file, ':' and the class "
                       "in it") from None
    except SyntaxError as error:
        raise ValueError(f"{path} is not valid Python: {error}") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        raise no_such(f"class in {path}", name, classes)
    return classes[name]


def _relative(path: str) -> str:
    """The path from the current folder, so that rows and manifests name no folder of this machine."""
    try:
        return os.path.relpath(path)
    except ValueError:                                  # another drive (Windows)
        return path
