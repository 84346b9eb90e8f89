"""Claims of section 7: which serving framework to choose. Nothing here was measured by kvlab: all is quoted."""
from __future__ import annotations

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, outdated, refuted, supported, untestable
from kvlab.claims._results import Results
from kvlab.claims._serving import cell_has
from kvlab.lang import Text

SECTION = 7
NODES = 10                      # the article: from so many nodes on
GAIN = (0.2, 0.4)               # the article: so much more throughput


def _ratio(results: Results, name: str, about: Text, above: str, below: str, less: float = 0.0) -> Evidence:
    """One quoted number over another, less 1 for a gain; with the sources of both."""
    one, other = results.quoted(above), results.quoted(below)
    sources = dict.fromkeys((one.source, other.source))
    return Evidence(name, about, one.value / other.value - less, "share" if less else "ratio", "quoted",
                    source="; ".join(sources))


def _vllm(results: Results):
    for name in ("sglang_transformers", "tgi_transformers", "vllm_transformers"):
        yield results.quoted(f"c59_{name}", name=name)
    yield cell_has("vLLM", "block_size", "tokens", "vllm_blocks", Text("vLLM keeps KV in blocks", "vLLM 以块存放 KV"))
    yield results.quoted("c59_vllm_mixes_steps", name="vllm_continuous")


def _vllm_best(found: Found) -> Verdict:
    if not (found["vllm_blocks"].value and found["vllm_continuous"].value):
        return refuted("vLLM lacks paged KV or continuous batching", "vLLM 缺少分页 KV 或连续批处理")
    if not found["vllm_transformers"].value:
        return refuted("vLLM has both techniques, and cannot run a model it has no code of its own for",
                       "两项技术都有，但 vLLM 跑不了没有自带实现的模型")
    peers = sum(found[name].value for name in ("sglang_transformers", "tgi_transformers"))
    if peers:
        return conditional("paged KV and continuous batching: yes; “best” support of Hugging Face models: its "
                           f"fallback on Transformers, all that was compared, is in {peers:.0f} other engines too",
                           "分页 KV 与连续批处理属实；“对 HuggingFace 模型支持最好”无从证实：这里只比较了回退到 "
                           f"Transformers 的能力，另有 {peers:.0f} 个引擎同样具备")
    return supported("it has both techniques, and alone falls back on Transformers",
                     "两项技术都有，且只有它能回退到 Transformers")


def _tgi(results: Results):
    yield cell_has("TGI", "status", "maintenance", "maintenance",
                   Text("TGI is in maintenance mode", "TGI 处于维护模式"))
    yield results.quoted("c60_tgi_flash_and_paged", name="flash_and_paged")
    yield results.quoted("c60_tgi_continuous", name="continuous")


def _tgi_stable(found: Found) -> Verdict:
    if not (found["flash_and_paged"].value and found["continuous"].value):
        return refuted("TGI lacks Flash Attention or continuous batching", "TGI 缺少 Flash Attention 或连续批处理")
    if found["maintenance"].value:
        return outdated("its techniques are as said (Paged Attention too), but it is in maintenance mode and its "
                        "README sends users to vLLM and SGLang",
                        "技术属实（还有 Paged Attention），但它已进入维护模式，README 推荐改用 vLLM 与 SGLang")
    return supported("it has both techniques and is being developed", "两项技术都有，且仍在开发")


def _triton(results: Results):
    yield _ratio(results, "ahead_at_50", Text("TensorRT-LLM's tokens/s ÷ vLLM's, 50 at a time, 70B, one H100",
                 "TensorRT-LLM 吞吐 ÷ vLLM 吞吐（50 并发，70B，一张 H100）"), "c62_trtllm_at_50", "c62_vllm_at_50")
    yield results.quoted("c61_vllm_ahead_when_full", name="vllm_ahead_when_full")
    yield _ratio(results, "start", Text("TensorRT-LLM's cold start ÷ vLLM's, 70B, one H100",
                 "TensorRT-LLM 冷启动时间 ÷ vLLM 冷启动时间（70B，一张 H100）"), "c61_trtllm_start", "c61_vllm_start")
    yield results.quoted("c61_trtllm_serves_itself", name="serves_itself")


def _triton_highest(found: Found) -> Verdict:
    """Throughput stands for utilisation and the start for effort, of which no source gives a number."""
    ahead, behind, start = found["ahead_at_50"], found["vllm_ahead_when_full"], found["start"]
    alone = found["serves_itself"].value
    en = (f"the start, in place of effort, takes {start.value:.0f} × vLLM's time; throughput, in place of "
          f"utilisation, is {ahead.value:.2f} × vLLM's in one comparison and "
          f"{'below' if behind.value else 'not below'} it in another")
    zh = (f"以启动时间代替部署难度看，是 vLLM 的 {start.value:.0f} 倍；以吞吐代替利用率看，一项对比为 vLLM 的 "
          f"{ahead.value:.2f} 倍，另一项{'低于' if behind.value else '不低于'} vLLM")
    if alone:
        en += "; the engine is TensorRT-LLM, which serves without Triton too"
        zh += "；真正的引擎是 TensorRT-LLM，不用 Triton 也能提供服务"
    first, hard = ahead.value > 1 and not behind.value, start.value > 1
    if first and hard:
        return supported(en, zh)
    if ahead.value > 1 or hard:
        return conditional(en, zh)
    return refuted(en, zh)


def _ten_nodes(results: Results):
    yield _ratio(results, "gain", Text("TensorRT-LLM's throughput over vLLM's, 70B, 50 requests at a time",
                 "TensorRT-LLM 比 vLLM 多出的吞吐（70B，50 并发）"), "c62_trtllm_at_50", "c62_vllm_at_50", less=1.0)
    yield results.quoted("c62_nodes", name="nodes")


def _ten_nodes_gain(found: Found) -> Verdict:
    nodes, gain = found["nodes"], found["gain"]
    if nodes.value < NODES:
        return untestable(
            f"the comparison at hand has {nodes.value:.0f} node: {gain.value:+.1%} there says nothing of {NODES} "
            "nodes",
            f"手头的对比只有 {nodes.value:.0f} 个节点：其 {gain.value:+.1%} 说明不了 {NODES} 个节点的情形",
            Text(f"both engines on {NODES} nodes or more under the same requests, several runs each; then nodes "
                 "and tokens/s in data/facts.csv (c62_…)",
                 f"在不少于 {NODES} 个节点上用相同请求多次测两种引擎，再把节点数与吞吐写入 data/facts.csv（c62_…）"))
    says = f"{gain.value:+.1%} on {nodes.value:.0f} nodes", f"{nodes.value:.0f} 个节点上为 {gain.value:+.1%}"
    if GAIN[0] <= gain.value <= GAIN[1]:
        return supported(*says)
    return conditional(*says) if gain.value > 0 else refuted(*says)


CLAIMS = (
    Claim("C59", Text("vLLM: Paged Attention, continuous batching, the best support of Hugging Face models",
                      "vLLM：Paged Attention 加连续批处理，对 HuggingFace 模型支持最好"), "vLLM", _vllm, _vllm_best,
          command="kvlab ls engines"),
    Claim("C60", Text("TGI: Flash Attention, continuous batching, stable enough for enterprises",
                      "TGI：Flash Attention 加连续批处理，企业级稳定"), "TGI", _tgi, _tgi_stable,
          command="kvlab ls engines"),
    Claim("C61", Text("Triton with TensorRT-LLM uses the GPU best and is the hardest to set up",
                      "Triton（TensorRT-LLM）GPU 利用率最高，部署门槛也最高"), "Triton", _triton, _triton_highest),
    Claim("C62", Text("Beyond 10 nodes Triton with TensorRT-LLM has 20% to 40% more throughput",
                      "超过 10 个节点时 Triton + TensorRT-LLM 吞吐高 20%–40%"), "> 10 nodes: +20% … +40%", _ten_nodes,
          _ten_nodes_gain),
)
