"""Claims of section 8: which metrics to watch, by the names that the engine exports."""
from __future__ import annotations

from kvlab.claims._base import Claim
from kvlab.claims._results import Results
from kvlab.claims._serving import by_release, name_judge
from kvlab.lang import Text

SECTION = 8


def _metrics(*written: str):
    """Evidence on metric names as they are written, and with the colon that vLLM puts after its prefix."""
    colon = [one.replace("_", ":", 1) for one in written]

    def evidence(results: Results):
        for name, wanted in (("written", written), ("colon", colon)):
            listed = ", ".join(wanted)
            yield from by_release(name, "metric", wanted, Text(listed, f"指标 {listed}"))
    return evidence


CLAIMS = (
    Claim("C63", Text("Running and waiting requests are vllm_num_requests_running and _waiting",
                      "运行中与排队的请求数：vllm_num_requests_running、vllm_num_requests_waiting"),
          "vllm_num_requests_running / _waiting",
          _metrics("vllm_num_requests_running", "vllm_num_requests_waiting"),
          name_judge(Text("write vllm:num_requests_running and vllm:num_requests_waiting",
                          "应写 vllm:num_requests_running 与 vllm:num_requests_waiting"))),
    Claim("C64", Text("How full the KV cache is: vllm_gpu_cache_usage_perc",
                      "KV Cache 使用率：vllm_gpu_cache_usage_perc"),
          "vllm_gpu_cache_usage_perc", _metrics("vllm_gpu_cache_usage_perc"),
          name_judge(Text("write vllm:kv_cache_usage_perc", "应写 vllm:kv_cache_usage_perc"))),
    Claim("C65", Text("Evictions from the cache: vllm_num_cache_evictions", "缓存驱逐次数：vllm_num_cache_evictions"),
          "vllm_num_cache_evictions", _metrics("vllm_num_cache_evictions"),
          name_judge(Text("watch rate(vllm:num_preemptions_total[5m])", "应看 rate(vllm:num_preemptions_total[5m])"))),
    Claim("C66", Text("Mean generation throughput: vllm_avg_generation_throughput",
                      "平均生成吞吐：vllm_avg_generation_throughput"),
          "vllm_avg_generation_throughput", _metrics("vllm_avg_generation_throughput"),
          name_judge(Text("use rate(vllm:generation_tokens_total[1m]); a gauge with the longer name "
                          "vllm:avg_generation_throughput_toks_per_s was last in 0.6.6",
                          "应写 rate(vllm:generation_tokens_total[1m])；名字更长的 "
                          "vllm:avg_generation_throughput_toks_per_s 最后见于 0.6.6"))),
)
