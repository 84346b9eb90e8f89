"""Names in Python source, by its syntax tree; source that does not parse is read as text. Nothing is ever run.

Keyword arguments are taken from calls of the engines' own classes. Where a file does not import the class, the call's
engine is left open; where it imports or defines another class of that name, the call is that other's.
"""
from __future__ import annotations

import ast
import re
import tokenize
import warnings
from collections import Counter
from dataclasses import replace
from io import StringIO

from kvlab.serving._lint_mention import CALLABLES, ENV, Mention, environment, moved
from kvlab.serving._lint_metrics import metrics
from kvlab.serving._lint_shell import arguments, commands

CALL = re.compile(r"(?<![\w.])((?:\w+\.)*)(" + "|".join(CALLABLES) + r")\(")
MAX_CALL = 8000
MAX_PARSED = 2**19              # characters: a tree takes some 200 times as many bytes
MAX_UNCLOSED = 100              # calls of a text that do not close or parse: each costs up to MAX_CALL
ROOTS = {"vllm": "vllm", "sglang": "sglang", "sgl": "sglang"}


def parsed(source: str) -> ast.Module | None:
    """The tree, or None for what is not Python (or is too long, or nests deeper than the parser goes)."""
    if len(source) > MAX_PARSED:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")             # Python's own, of `1and` or "\\d": they are the file's matter
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def imports(tree: ast.AST) -> dict[str, str]:
    """What each imported or defined name stands for: `LLM` -> `vllm.LLM`, or `other.LLM` for one made here."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update({a.asname or a.name: f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            found.update({a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                          for a in node.names})
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = f"other.{node.name}"
    return found


def python(source: str, line: int, known: dict[str, str] | None = None) -> list[Mention] | None:
    """All mentions in Python source whose first line has the number `line`; None if it does not parse.

    known: what names stand for from earlier parts of the same file (notebook cells, code blocks); added to.
    """
    tree = parsed(source)
    if tree is None:
        return None
    known = {} if known is None else known
    known.update(imports(tree))
    dicts = dictionaries(tree) if CALL.search(source) else {}
    reads = environment_reads(tree) if ENV.search(source) else set()
    found, skip = [], set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple)):
            words = [(getattr(item, "value", None) if isinstance(getattr(item, "value", None), str) else "?",
                      item.lineno) for item in node.elts]
            found += [moved(m, line) for m in arguments(words)]
        if isinstance(node, ast.Call):
            found += _keywords(node, known, line, dicts)
        if isinstance(node, ast.keyword) and node.arg:
            found += [m for m in environment(node.arg, line + node.value.lineno - 1) if m.name == node.arg]
        if isinstance(node, ast.JoinedStr):
            skip.update(id(part) for part in node.values)
            whole = "".join(str(getattr(part, "value", "?")) if isinstance(part, ast.Constant) else "?"
                            for part in node.values)
            found += commands(whole, line + node.lineno - 1)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            first = line + node.lineno - 1
            found += [replace(m, own=m.own or m.name in reads) for m in environment(node.value, first)]
            if id(node) not in skip:
                found += metrics(node.value, first) + commands(node.value, first)
            elif ":" in node.value:
                found += [m for m in metrics(node.value, first) if ":" in m.name]
    for first, text in comments(source):
        found += commands(text, line + first - 1) + metrics(text, line + first - 1)
    return found


def dictionaries(tree: ast.AST) -> dict[str, list[tuple[str, int]]]:
    """Keys, with their lines, of names that are bound once in a file, to a dict display or dict(…)."""
    bound, keys, more = Counter(), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += 1
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Name) and (given := _given(value)) is not None:
                keys[target.id] = given
            elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                more.append((target.value.id, target.slice))
    for name, key in more:
        if name in keys and isinstance(key, ast.Constant) and isinstance(key.value, str):
            keys[name].append((key.value, key.lineno))
    return {name: given for name, given in keys.items() if bound[name] == 1}


def _given(value: ast.expr) -> list[tuple[str, int]] | None:
    """The keys of a dict display or of dict(…), with their lines; None for anything else."""
    if isinstance(value, ast.Dict):
        return [(k.value, k.lineno) for k in value.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)]
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict":
        return [(keyword.arg, keyword.value.lineno) for keyword in value.keywords if keyword.arg]
    return None


def environment_reads(tree: ast.AST) -> set[str]:
    """Names that a file looks up: os.environ["X"], or the first argument of what does not set (getenv, a helper)."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            found.add(getattr(node.slice, "value", None))
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if not re.search("set|put|print|log|warn|error", called, re.I):
                found.add(getattr(node.args[0], "value", None))
    return {name for name in found if isinstance(name, str)}


def comments(source: str) -> list[tuple[int, str]]:
    """Comments with their lines, neighbours joined."""
    found: list[tuple[int, str]] = []
    try:
        for token in tokenize.generate_tokens(StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                text, at = token.string.lstrip("# "), token.start[0]
                if found and found[-1][0] + found[-1][1].count("\n") + 1 == at:
                    found[-1] = (found[-1][0], f"{found[-1][1]}\n{text}")
                else:
                    found.append((at, text))
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def _keywords(node: ast.Call, known: dict[str, str], line: int, dicts: dict[str, list[tuple[str, int]]] | None = None
              ) -> list[Mention]:
    """Keyword arguments of a call, if what is called is one of the engines' classes."""
    parts, func = [], node.func
    while isinstance(func, ast.Attribute):
        parts.append(func.attr)
        func = func.value
    if not isinstance(func, ast.Name):
        return []
    name = parts[0] if parts else func.id
    stands = known.get(func.id, "")
    if not parts and stands:
        name = stands.rpartition(".")[2]
    if name not in CALLABLES:
        return []
    expected, scope = CALLABLES[name]
    if not parts and not stands:
        engine = "" if expected == "vllm" else "other"                  # `Engine` alone may be anybody's
    else:
        engine = ROOTS.get((stands or func.id).lstrip(".").split(".")[0], "other")
    if engine not in ("", expected) or "multimodal_gen" in stands:          # SGLang's other engine, for images
        engine = "other"
    given = [(keyword.arg, keyword.value.lineno) for keyword in node.keywords if keyword.arg]
    for keyword in node.keywords:
        if keyword.arg is None:
            given += _given(keyword.value) or (dicts or {}).get(getattr(keyword.value, "id", ""), [])
    return [Mention("kwarg", arg, line + at - 1, engine, (scope,)) for arg, at in given]


def calls_in_text(text: str, line: int, known: dict[str, str]) -> list[Mention]:
    """Keyword arguments of the engines' classes in prose and in code that does not parse as a whole."""
    found = []
    known.update({name: module + "." + name for module, names in
                  re.findall(r"^[ \t]*from[ \t]+(vllm|sglang|tensorrt_llm)[\w.]*[ \t]+import[ \t]+([\w, ]+)",
                             text, re.M)
                  for name in map(str.strip, names.split(","))})
    unclosed, at, seen, read = 0, line, 0, 0
    for match in CALL.finditer(text):
        if match.start() < read:                             # inside a call that was read whole
            continue
        if re.search(r"\b(?:class|def)\s+$", text[max(0, match.start() - 20):match.start()]):
            continue
        body = _balanced(text[match.end() - 1:match.end() - 1 + MAX_CALL])
        at, seen = at + text.count("\n", seen, match.start()), match.start()
        told = re.sub(r"(?<![=\s])(\s*)\.\.\.", r"\1**_", body)         # what is left out
        tree = body and parsed(match[1] + match[2] + told)
        if not tree or not tree.body or not isinstance(tree.body[0], ast.Expr):
            unclosed += 1
            if unclosed > MAX_UNCLOSED:
                break
            continue
        read = match.end() - 1 + len(body)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found += _keywords(node, known, at)
    return found


def _balanced(text: str) -> str:
    """From an opening bracket to the one that closes it, "" if none does; strings and comments are passed over."""
    depth, quote, comment = 0, "", False
    for mark in re.finditer(r"[\"'#()\[\]{}\n]", text):
        char = mark.group()
        if char == "\n":
            quote, comment = "", False
        elif comment:
            continue
        elif quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#":
            comment = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return text[:mark.end()]
    return ""
