"""What the ceilings allow for this call, and how near it came. Runs nothing: every number here is modelled."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention import ideal_traffic
from kvlab.probes._base import Bench, room_on
from kvlab.probes._traffic import AMPLIFICATION, amplifications
from kvlab.record.reading import Reading, missing


@dataclass(frozen=True)
class Roofline:
    """Bytes and flops that the call needs at least, and its place under the measured ceilings.

    ideal_bytes and useful_flops do not depend on the variant; hbm_bytes and executed_flops are the variant's own
    cost model. Source: Williams, Waterman, Patterson 2009 (doi 10.1145/1498765.1498785).
    """
    name: ClassVar[str] = "roofline"
    metrics: ClassVar[dict[str, str]] = {
        "ideal_bytes": "B", "useful_flops": "flop", "intensity": "flop/B", "executed_flops": "flop",
        "hbm_read_bytes": "B", "hbm_write_bytes": "B", "hbm_bytes": "B", **AMPLIFICATION,
        "roof_latency": "s", "ridge": "flop/B", "attainable_flops_share": "ratio",
        "effective_bandwidth": "B/s", "bandwidth_share": "ratio", "useful_flops_rate": "flop/s", "flops_share": "ratio"}
    needs: ClassVar[tuple[str, ...]] = ("ceilings", "timer")
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        for trial in list(bench.trials):
            with bench.on(trial):
                for reading in [*self._needed(trial), *self._reached(bench, trial)]:
                    yield trial, reading

    def _model(self, metric, value, formula, **more) -> Reading:
        return Reading(metric, value, self.metrics[metric], "modelled", method=f"formula:{formula}", source=self.name,
                       **more)

    def _needed(self, trial):
        """What the call must move and compute: from the shapes alone."""
        cache = room_on(trial.device)[1]
        ideal = ideal_traffic(trial.workload, trial.format, trial.itemsize)
        cost = trial.variant.load().cost(trial, cache)
        total = ideal.read_bytes + ideal.write_bytes
        yield self._model("ideal_bytes", total, "q + unique visible K/V + output, once")
        yield self._model("useful_flops", ideal.executed_flops, "2·Hq·(Dk+Dv)·visible pairs")
        yield self._model("intensity", ideal.executed_flops / total, "useful_flops ÷ ideal_bytes")
        yield self._model("executed_flops", cost.executed_flops, "variant.cost")
        free = f"behind a cache of {cache:,} bytes that forgets what was used longest ago"
        yield self._model("hbm_read_bytes", cost.read_bytes, "variant.cost", note=free)
        yield self._model("hbm_write_bytes", cost.write_bytes, "variant.cost", note=free)
        yield self._model("hbm_bytes", cost.read_bytes + cost.write_bytes, "variant.cost", note=free)
        yield from amplifications(ideal, total=cost.read_bytes + cost.write_bytes, read=cost.read_bytes,
                                  cache_bytes=cache, kind="modelled", source=self.name,
                                  method="formula:variant.cost ÷ ideal")

    def _reached(self, bench, trial):
        """The same against the ceilings and the time that were measured beside it."""
        read, matmul = bench.reading(None, "read_ceiling"), bench.reading(None, "matmul_ceiling")
        took = bench.reading(trial, "latency_s")
        names = ("roof_latency", "ridge", "attainable_flops_share", "effective_bandwidth", "bandwidth_share",
                 "useful_flops_rate", "flops_share")
        if read is None or matmul is None:
            return [missing(n, self.metrics[n], "no ceilings were measured; add the probe ceilings", source=self.name)
                    for n in names]
        ideal = ideal_traffic(trial.workload, trial.format, trial.itemsize)
        total, flops = ideal.read_bytes + ideal.write_bytes, ideal.executed_flops
        ridge = matmul.value / read.value
        found = [self._model("roof_latency", max(total / read.value, flops / matmul.value),
                             "max(bytes ÷ read, flops ÷ matmul)"),
                 self._model("ridge", ridge, "matmul_ceiling ÷ read_ceiling"),
                 self._model("attainable_flops_share", min(1.0, flops / total / ridge), "min(1, intensity ÷ ridge)",
                             denominator="matmul_ceiling")]
        if took is None:
            return found + [missing(n, self.metrics[n], "no time was measured; add the probe timer", source=self.name)
                            for n in names[3:]]
        for metric, amount, ceiling in (("effective_bandwidth", total, None), ("bandwidth_share", total, read),
                                        ("useful_flops_rate", flops, None), ("flops_share", flops, matmul)):
            of, most, least = (ceiling.value, ceiling.high, ceiling.low) if ceiling else (1.0, 1.0, 1.0)
            ends = {} if None in (took.low, least) else dict(low=amount / took.high / most,
                                                             high=amount / took.low / least)
            found.append(self._model(metric, amount / took.value / of, "ideal amount ÷ measured time", n=took.n,
                                     cache_state=took.cache_state, denominator=ceiling.metric if ceiling else "",
                                     **ends))
        return found
