"""A folder is a registry: dropping a file in adds an entry, and an unknown name gets a near match and the list."""
from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import TypeAdapter


LONGEST = 100                   # characters of an unknown name that are repeated and compared: it may be a whole file


def no_such(what: str, name: str, known: Iterable[str]) -> KeyError:
    """The error for an unknown name: what was given, the nearest known ones, and all of them if they fit a line."""
    known, name = sorted(known), name if len(str(name)) <= LONGEST else f"{str(name)[:LONGEST]}…"
    if not known:
        return KeyError(f"no {what} named {name!r}; there is none here yet")
    begins = [k for k in known if str(name) and k.lower().startswith(str(name).lower())]
    near = begins[:3] or difflib.get_close_matches(str(name), known, 3, cutoff=0.5)
    near = near or [k for k in known if str(name) and str(name).lower() in k.lower()][:3]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if len(known) > 30:
        others = f" (or {', '.join(near[1:])})" if near[1:] else ""
        return KeyError(f"no {what} named {name!r}.{hint}{others} All {len(known)} names and aliases are listed by: "
                        f"kvlab ls {what.rpartition(' ')[2]}s")
    return KeyError(f"no {what} named {name!r}.{hint} Known: {', '.join(known)}")


class Registry:
    """The modules of a package whose names do not start with an underscore, loaded when asked for.

    attribute: the name inside each module that is the entry; None means the module itself is.
    """

    def __init__(self, what: str, package: str, attribute: str | None = None):
        self.what, self.package, self.attribute = what, package, attribute

    def names(self) -> list[str]:
        """Names by file, without importing the entries or their package."""
        package = importlib.util.find_spec(self.package)
        folders = package.submodule_search_locations if package else None
        return sorted(m.name for m in pkgutil.iter_modules(folders or []) if not m.name.startswith("_"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str):
        if name not in self.names():
            raise no_such(self.what, name, self.names())
        module = importlib.import_module(f"{self.package}.{name}")
        if self.attribute is None:
            return module
        return entry_of(module, self.attribute, name)


def entry_of(module: ModuleType, attribute: str, name: str):
    """The one class of the module whose `attribute` equals `name`."""
    found = [thing for thing in vars(module).values()
             if isinstance(thing, type) and thing.__module__ == module.__name__
             and getattr(thing, attribute, None) == name]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must define exactly one class with {attribute} = {name!r}, "
                        f"found {len(found)}")
    return found[0]


class _Source(importlib.machinery.SourceFileLoader):
    """Runs the text that is in the file now: a bytecode file beside it may be of an earlier text."""

    def get_code(self, fullname: str):
        return self.source_to_code(self.get_data(self.path), self.path)


def load_file(path: str | Path) -> ModuleType:
    """Import a Python file from outside the package, under a name of its own."""
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise KeyError(f"no Python file {str(path)!r}; give the path of a .py file, then ':' and the class in it")
    name = f"kvlab_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported: it gives no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module                          # dataclasses look their module up while it is being run
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def case_from(kind: str, fields: dict) -> Any:
    """A case from its class, which must be kvlab's own, and its fields as JSON gives them."""
    return _adapter(kind).validate_python(fields)


@cache
def _adapter(kind: str) -> TypeAdapter:
    """What checks the fields of a class: a millisecond to make, so once per class."""
    from pydantic import TypeAdapter
    module, _, name = kind.partition(":")
    if not module.startswith("kvlab."):
        raise ValueError(f"cases are kvlab's own classes, got {kind}")
    return TypeAdapter(getattr(importlib.import_module(module), name))
