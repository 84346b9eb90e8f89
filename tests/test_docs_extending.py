"""What docs/extending.md prints works as printed: a variant from a file, and a new file of each other kind."""
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from documents import ROOT, blocks, read

PRINTED = blocks(read("docs/extending.md"), "python")
FILES = {match[1]: code for code in PRINTED if (match := re.match(r"# (kvlab/\S+\.py)\n", code))}
SCRIPT = """
import json
from pathlib import Path
from kvlab.figures import save
from kvlab.kv.formats import kv_format
from kvlab.probes._base import probes
from kvlab.shapes import AttentionShape
from kvlab.studies._run import run, studies
store = run("page_order", size="smoke", out=Path("."), progress=False, each=lambda job, cases: map(job, cases))
table = store.table()
save("page_order", store.path, store.path / "figures")
told = table[table["metric"] == "time_per_token"]
print(json.dumps(dict(statuses=sorted(set(table["status"])), kinds=sorted(set(told["kind"])), rows=len(told),
                      formats=sorted(set(told["kv_format"])), orders=sorted(set(told["page_order"])),
                      inside=bool(((told["low"] <= told["value"]) & (told["value"] <= told["high"])).all()),
                      said=[found.sentence for found in studies["page_order"].findings(table)],
                      probe="token_time" in list(probes),
                      bytes=kv_format("fixed8").nbytes(10, AttentionShape(4, 2, 64)),
                      csv=(store.path / "figures" / "page_order.csv").read_text().count("time_per_token"),
                      png=(store.path / "figures" / "page_order.png").stat().st_size)))
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    (code,) = [code for code in PRINTED if code.startswith("# my.py")]
    path = tmp_path_factory.mktemp("printed") / "my.py"
    path.write_text(code, encoding="utf-8")
    return f"{path}:Mine"


def test_the_printed_variant_is_right_or_refuses_in_one_sentence(variant):
    """Every ninth cell of the matrix that `kvlab check` goes through."""
    from kvlab.attention import VariantRef
    from kvlab.attention._matrix import cells
    from kvlab.probes import measure
    from kvlab.probes.kernel_error import KernelError
    chosen = [one for _, one in cells(VariantRef.of(variant), device="cpu", dtypes=("fp32",))][::9]
    rows = [measure(one, (KernelError(),))[0] for one in chosen]
    statuses = [row["status"] for row in rows]
    assert statuses.count("ok") >= 10 and set(statuses) <= {"ok", "skipped"}, [row["error"] for row in rows]
    assert all(row["error"] for row in rows if row["status"] == "skipped")


def test_one_new_file_of_each_kind_is_found_and_works_with_the_others(tmp_path):
    assert {path.split("/")[1] for path in FILES} == {"probes", "kv", "studies", "figures"}
    shutil.copytree(ROOT / "kvlab", tmp_path / "kvlab", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "data").symlink_to(ROOT / "data")
    for path, code in FILES.items():
        assert not (tmp_path / path).exists(), path
        (tmp_path / path).write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["statuses"] == ["ok"] and found["kinds"] == ["measured"] and found["rows"] == 2 and found["inside"]
    assert found["formats"] == ["fixed8"] and found["orders"] == ["in_order", "random"] and found["probe"]
    assert found["bytes"] == 10 * 2 * 2 * 64
    assert len(found["said"]) == 2 and all("ns per cached token" in sentence for sentence in found["said"])
    assert found["csv"] == 2 and found["png"] > 5000
