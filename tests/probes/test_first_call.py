"""What a first call takes is the variant's own: nothing that the watch itself needs is imported on its clock."""
import subprocess
import sys

SCRIPT = """
import sys
from dataclasses import dataclass
import kvlab
from kvlab.attention.naive import Naive

@dataclass(frozen=True)
class Looks(Naive):
    name = "looks"
    def prepare(self, trial, inputs):
        before = set(sys.modules)
        call = super().prepare(trial, inputs)
        def looked():
            output = call()
            new.append(sorted(name for name in set(sys.modules) - before if name.startswith("torch.")))
            return output
        return looked

new = []
workload = kvlab.Workload.decode(kvlab.AttentionShape(4, 2, 16), kv_len=8)
table = kvlab.measure(Looks(), workload, probes=["kernel_error", "first_call"])
row = table[table["metric"] == "first_call_s"].iloc[0]
assert row["kind"] == "measured" and row["value"] > 0 and row["n"] == 1 and row["method"] == "timer:wall"
print(new[0])
"""


def test_the_first_variant_of_a_process_pays_for_no_import_of_the_watch():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
