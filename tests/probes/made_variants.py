"""Variants made inside a test: classes of this process, so that a test can watch what they do."""
from kvlab.attention import Comparison, least_cost, trial
from kvlab.attention.naive import Naive
from kvlab.kv.cache import Layout
from kvlab.shapes import AttentionShape, Workload

SMALL = Workload.decode(AttentionShape(4, 2, 16), kv_len=64)


def made(name, call=None, prepare=None):
    """A variant whose calls are call(honest call, inputs), or which plans by prepare(trial, inputs)."""
    class Made:
        def why_not(self, trial):
            return None

        def prepare(self, trial, inputs):
            if prepare is not None:
                return prepare(trial, inputs)
            honest = Naive().prepare(trial, inputs)
            return lambda: call(honest, inputs)

        def cost(self, trial, cache_bytes=0):
            return least_cost(trial)
    Made.name, Made.__qualname__ = name, f"made.{name}"              # a dot: known in this process only
    return Made


def honest(name="honest"):
    return made(name, lambda call, inputs: call())


def compare(*variants, workload=SMALL, **options):
    """The comparison of these variants, all on the contiguous layout."""
    return Comparison(tuple(trial(v, workload, layout=Layout(), **options) for v in variants))


def of(rows, metric, variant=None):
    """The rows of a metric, of one variant if named."""
    return [r for r in rows if r["metric"] == metric and (variant is None or r["variant"].endswith(variant))]
