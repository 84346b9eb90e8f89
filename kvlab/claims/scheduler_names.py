"""Claims of section 6: how the scheduler is set, by the names that the engine has."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, outdated, refuted, supported
from kvlab.claims._results import Results
from kvlab.claims._serving import by_release, cell_has, name_judge, row, times
from kvlab.lang import Text

SECTION = 6


def _policy_name(results: Results) -> Iterator[Evidence]:
    yield from by_release("written", "env", ("VLLM_SCHEDULER_POLICY",), Text(
        "the variable VLLM_SCHEDULER_POLICY", "环境变量 VLLM_SCHEDULER_POLICY"))
    yield from by_release("flag", "flag", ("--scheduling-policy",), Text(
        "the flag --scheduling-policy", "命令行参数 --scheduling-policy"))


def _tokens_name(results: Results) -> Iterator[Evidence]:
    yield from by_release("written", "env", ("VLLM_SCHEDULER_MAX_TOKENS",), Text(
        "the variable VLLM_SCHEDULER_MAX_TOKENS", "环境变量 VLLM_SCHEDULER_MAX_TOKENS"))
    yield from by_release("flag", "flag", ("--max-num-batched-tokens",), Text(
        "the flag --max-num-batched-tokens", "命令行参数 --max-num-batched-tokens"))
    for metric, name, en, zh in (("itl_p99_s_ratio", "gap", "p99 gap between tokens", "token 间隔 p99"),
                                 ("tokens_per_s_ratio", "tokens", "tokens/s", "吞吐")):
        yield row(results, "batching", "budget", metric, name, Text(
            f"{en} with a budget of 65,536 tokens ÷ with 512", f"{zh}：预算 65536 ÷ 预算 512"), x=65536.0)


def _big_budget(found: Found) -> Verdict:
    gap, tokens = found["gap"], found["tokens"]
    says = (f"65,536 tokens a step: p99 gap {times(gap)}, tokens/s {times(tokens)} of those with 512",
            f"每步 65536 token：间隔 p99 为预算 512 时的 {times(gap)}，吞吐为其 {times(tokens)}")
    if gap.above(1) is None:
        return inconclusive(*says, Text("kvlab run batching --size large", "以 --size large 运行 kvlab run batching"))
    return conditional(*says) if gap.above(1) else supported(*says)


def _fcfs(results: Results) -> Iterator[Evidence]:
    yield results.quoted("c55_fcfs_by_arrival", name="by_arrival")
    yield cell_has("vLLM", "policies", "fcfs (default)", "default",
                   Text("fcfs is vLLM's default", "fcfs 是 vLLM 的默认策略"))


def _first_come(found: Found) -> Verdict:
    if not found["by_arrival"].value:
        return refuted("vLLM's fcfs does not go by arrival", "vLLM 的 fcfs 不按到达顺序")
    if found["default"].value:
        return supported("fcfs goes by arrival, and is the default: nothing need be set",
                         "fcfs 按到达顺序，且是默认值，无需设置")
    return conditional("fcfs goes by arrival where it is asked for", "指定 fcfs 时按到达顺序")


def _priority(results: Results) -> Iterator[Evidence]:
    yield cell_has("vLLM", "policies", "priority", "built_in",
                   Text("vLLM has a policy “priority”", "vLLM 内置 priority 策略"))
    yield results.quoted("c56_priority_year", name="added")
    yield results.quoted("c56_vllm_year", name="published")
    yield from by_release("flag", "flag", ("--scheduling-policy",), Text(
        "the flag --scheduling-policy", "命令行参数 --scheduling-policy"))


def _own_scheduler(found: Found) -> Verdict:
    if not found["built_in"].value:
        return supported("vLLM has no policy “priority”", "vLLM 没有内置 priority 策略")
    if (year := found["added"].value) > found["published"].value:
        return outdated(f"since {year:.0f} vLLM has --scheduling-policy priority; each request carries its number",
                        f"自 {year:.0f} 年起用 --scheduling-policy priority，并在请求中给出优先级数值即可")
    return refuted("vLLM has always had a policy “priority”", "vLLM 一直内置 priority 策略")


CLAIMS = (
    Claim("C53", Text("The scheduling policy is set with VLLM_SCHEDULER_POLICY",
                      "用 VLLM_SCHEDULER_POLICY 设置调度策略"), "VLLM_SCHEDULER_POLICY=fcfs", _policy_name,
          name_judge(Text("set --scheduling-policy", "应使用 --scheduling-policy"))),
    Claim("C54", Text("The tokens of one step are set to 65,536 with VLLM_SCHEDULER_MAX_TOKENS",
                      "用 VLLM_SCHEDULER_MAX_TOKENS 把单步 token 数设为 65536"),
          "VLLM_SCHEDULER_MAX_TOKENS=65536", _tokens_name,
          name_judge(Text("set --max-num-batched-tokens", "应使用 --max-num-batched-tokens"), _big_budget),
          ("batching",), "batching_limits"),
    Claim("C55", Text("fcfs: first come, first served", "fcfs：先来先服务"), "fcfs", _fcfs, _first_come,
          command="kvlab ls engines"),
    Claim("C56", Text("Priority scheduling takes a scheduler of one's own", "优先级调度需要自定义 Scheduler"),
          "custom Scheduler", _priority, _own_scheduler, command="kvlab ls engines"),
)
