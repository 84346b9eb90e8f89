"""Which requests compute in the next step of an engine, and whose blocks are taken when memory runs out.

One step, as vLLM's V1 scheduler does it: running requests first, each one token (or the next chunk of its prompt), then
waiting ones while the token budget, the sequences and the blocks last. Where a running request finds no block, the last
one is preempted: its blocks are freed, it waits at the front and computes all its tokens again. Nothing is truncated.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py; worst_case: TensorRT-LLM's GUARANTEED_NO_EVICT; shortest_prefill:
SGLang 0.5.23, managers/schedule_policy.py. Here written anew.
"""
from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvlab.kv.block_pool import BlockPool
from kvlab.kv.prefix import chain_of_pieces
from kvlab.serving.request import Request, Served
from kvlab.serving.step_time import Batch
from kvlab.shapes import positive

POLICIES = ("fcfs", "priority", "short_first", "shortest_prefill")
ADMISSIONS = ("full_prompt", "first_chunk", "worst_case")
BATCHINGS = ("continuous", "static")
SHORT_BY = ("prompt", "most")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How an engine fills its steps. Tokens and sequences are counts, times seconds.

    policy: order of the waiting. fcfs; priority (smallest Request.priority first); short_first (requests below
    short_threshold tokens first); shortest_prefill. short_by: what is compared with the threshold: the prompt, or
    `most`, the prompt and all that may be generated, which needs an honest max_tokens.
    aging_s: None = a waiting request never gains on another. short_first: score = (1 + waited ÷ aging_s), times
    short_weight if it is short; highest first. priority: aging_s seconds of waiting count as one priority;
    shortest_prefill: as short_threshold tokens.
    admission: full_prompt (a request is admitted when its whole prompt has blocks), first_chunk (the tokens of this
    step), worst_case (its prompt and all it may generate, set aside until it ends: no preemption ever).
    watermark: share of the pool's blocks that stay free when a request is admitted.
    chunked_prefill: a prompt longer than the budget left is computed in pieces; without, it waits for a step with room.
    batching: continuous, or static: a batch is filled once, with worst_case blocks; who has finished stays in it as
    padding until the last has, and only then others are admitted.
    prefix_caching: full blocks are found again by their chained hash, as long as no other tokens took the block.
    max_model_len: longest prompt and output; longer prompts are rejected, longer outputs cut there. None = no limit.
    """
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    admission: str = "full_prompt"
    batching: str = "continuous"
    chunked_prefill: bool = True
    prefix_caching: bool = False
    watermark: float = 0.0
    aging_s: float | None = None
    short_threshold: int = 512
    short_weight: float = 2.0
    short_by: str = "prompt"
    max_model_len: int | None = None

    def __post_init__(self):
        positive(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
                 short_threshold=self.short_threshold)
        for name, allowed in (("policy", POLICIES), ("admission", ADMISSIONS), ("batching", BATCHINGS),
                              ("short_by", SHORT_BY)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}")
        if self.max_model_len is not None:
            positive(max_model_len=self.max_model_len)
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark!r} must be a share of the pool, from 0 to below 1")
        if self.aging_s is not None and not self.aging_s > 0:
            raise ValueError(f"aging_s={self.aging_s!r} must be above 0 seconds, or None for no aging")
        if not self.short_weight >= 1:
            raise ValueError(f"short_weight={self.short_weight!r} must be at least 1")


class Live:
    """A request that waits or runs: what the engine knows of it."""
    __slots__ = ("served", "serial", "key", "short", "table", "room", "computed", "known", "left", "hashes", "kept")

    def __init__(self, served: Served, serial: int, output_tokens: int):
        self.served, self.serial = served, serial
        self.key, self.short = (), False
        self.table: list[int] = []              # its blocks
        self.room = 0                           # tokens that they hold
        self.computed = 0                       # tokens whose K and V lie in them
        self.known = served.request.prompt_tokens                  # tokens of the prompt and those generated
        self.left = output_tokens               # tokens still to be generated
        self.hashes: list[int] = []             # of its full blocks, as far as they were asked for
        self.kept = 0                           # blocks that the pool remembers


@dataclass(slots=True)
class Step:
    """One step: what it computes, and what happened while it was put together. Lists hold requests.

    first: those that get their first token when it ends; ended: their last. resumed: admitted again after a preemption.
    generated: tokens that all get.
    """
    batch: Batch = field(default_factory=Batch)
    generated: int = 0
    admitted: list[Live] = field(default_factory=list)
    resumed: list[Live] = field(default_factory=list)
    preempted: list[Live] = field(default_factory=list)
    first: list[Live] = field(default_factory=list)
    ended: list[Live] = field(default_factory=list)


class Scheduler:
    """Requests waiting for and running on one engine over one block pool. The clock is the caller's.

    submit a request when it arrives, ask for the next step with schedule(now), and call finish(step) when it has
    taken its time. Counters: preemptions; queried_tokens and cached_tokens, the prompt tokens looked up in the prefix
    cache and found there at first admission (who comes back after a preemption is not counted, as in vLLM).
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config, self.pool = config, pool
        self.running: list[Live] = []
        self.preemptions = self.queried_tokens = self.cached_tokens = 0
        self._heaps: tuple[list, list] = ([], [])               # the waiting: short ones (if the policy asks), others
        self._reserved = 0                                      # blocks set aside by worst_case
        self._worst = config.admission == "worst_case" or config.batching == "static"
        self._watermark = int(config.watermark * pool.num_blocks)
        self._padding: list[Live] = []                          # static batches: who has finished and is still in it
        self._serial = 0

    @property
    def waiting(self) -> int:
        return len(self._heaps[0]) + len(self._heaps[1])

    def submit(self, served: Served) -> Live | None:
        """Queue a request; None, with served.rejected set, where it could never be served."""
        request, limit = served.request, self.config.max_model_len
        output = request.output_tokens
        if limit is not None and request.prompt_tokens >= limit:
            served.rejected = (f"its prompt of {request.prompt_tokens:,} tokens leaves no room within max_model_len="
                               f"{limit:,}")
            return None
        if limit is not None:
            output = min(output, limit - request.prompt_tokens)
        most = self._most(request) if self._worst else request.prompt_tokens + output
        if not self.config.chunked_prefill and most > self.config.max_num_batched_tokens:
            served.rejected = (f"its {most:,} tokens do not fit in one step of "
                               f"{self.config.max_num_batched_tokens:,}, and chunked_prefill is off")
            return None
        needed, usable = self.pool.blocks_for(most), self.pool.num_blocks - 1 - self._watermark
        if needed > usable:
            served.rejected = (f"it needs {needed:,} blocks ({most:,} tokens in blocks of {self.pool.block_size}), and "
                               f"the pool has {usable:,}; give it more blocks, or the request fewer tokens")
            return None
        live = Live(served, self._serial, output)
        self._serial += 1
        if self.config.prefix_caching and request.prefix:
            live.hashes = chain_of_pieces(request.prefix, request.piece_tokens, self.pool.block_size)
        self._ordered(live)
        self._wait(live)
        return live

    def schedule(self, now: float) -> Step:
        """Put the next step together and give it its blocks; its batch is empty where nothing can run."""
        step, config = Step(), self.config
        budget = self._run(step, config.max_num_batched_tokens)
        if self._padding:
            padding = len(self._padding)
            step.batch.decode_seqs += padding
            step.batch.sequences += padding
            step.batch.kv_tokens += sum(live.known for live in self._padding)
        elif not step.preempted and not (config.batching == "static" and self.running):
            self._admit(step, budget, now)
        return step

    def finish(self, step: Step) -> None:
        """The step is over: whoever got a last token leaves, and gives its blocks up."""
        if not step.ended:
            return
        gone = set(step.ended)
        self.running = [live for live in self.running if live not in gone]
        if self.config.batching == "static":
            self._padding += step.ended
            if self.running:
                return
            step.ended, self._padding = self._padding, []
        for live in step.ended:
            self._leave(live)

    def _run(self, step: Step, budget: int) -> int:
        """Running requests, in their order; returns what is left of the budget. The simulator's hot loop."""
        running, remember, block_size = self.running, self.config.prefix_caching, self.pool.block_size
        batch = step.batch
        kv_tokens = decode_seqs = position = 0
        while position < len(running) and budget > 0:
            live = running[position]
            computed = live.computed
            need = live.known - computed
            if need > budget:
                need = budget
            end = computed + need
            if end > live.room and not self._grow(step, live, end):
                break                                           # it was preempted itself: nobody is left behind it
            position += 1
            live.computed = end
            budget -= need
            kv_tokens += end
            if need == 1:
                decode_seqs += 1
            else:
                batch.prefill_tokens += need
                batch.prefill_pairs += need * (computed + end + 1) // 2
            if end == live.known:
                self._emit(step, live)
            if remember and end // block_size > live.kept:
                self._remember(live, end)
        batch.kv_tokens += kv_tokens
        batch.decode_seqs += decode_seqs
        batch.sequences += position
        return budget

    def _emit(self, step: Step, live: Live) -> None:
        """The step gives the request a token."""
        live.known += 1
        live.left -= 1
        step.generated += 1
        if live.served.first_token_s is None:
            step.first.append(live)
        if not live.left:
            step.ended.append(live)

    def _grow(self, step: Step, live: Live, tokens: int) -> bool:
        """Blocks for so many tokens, taken from the last of the running if need be; False if that was the request.

        The running are kept in the order in which they would be spared, so that a victim has not computed in this step.
        """
        pool = self.pool
        count = pool.blocks_for(tokens) - len(live.table)
        while count > pool.free_blocks:
            victim = self.running.pop()
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is live:
                return False
        live.table += pool.take(count)
        live.room = len(live.table) * pool.block_size
        return True

    def _preempt(self, live: Live) -> None:
        self.preemptions += 1
        live.served.preemptions += 1
        self.pool.release(live.table)
        live.table, live.room, live.computed, live.kept = [], 0, 0, 0
        self._wait(live)

    def _admit(self, step: Step, budget: int, now: float) -> None:
        """Waiting requests, while tokens, sequences and blocks last. A static batch is filled whatever the budget."""
        config, pool, static = self.config, self.pool, self.config.batching == "static"
        while (budget > 0 or static) and len(self.running) < config.max_num_seqs:
            heap = self._next(now)
            if not heap:
                return
            live = heap[0][-1]
            found = self._found(live)
            computed = len(found) * pool.block_size
            need = live.known - computed
            if need > budget:
                if not (config.chunked_prefill or static):
                    return
                need = budget
            end = computed + need
            if not self._has_room(live, found, end):
                return
            heappop(heap)
            pool.share(found)
            live.table = found + pool.take(pool.blocks_for(end) - len(found))
            live.room, live.computed, live.kept = len(live.table) * pool.block_size, end, len(found)
            budget -= need
            self._join(step, live, computed, need)

    def _join(self, step: Step, live: Live, computed: int, need: int) -> None:
        """The request runs from this step on, and computes need tokens beyond those that were found."""
        served, batch = live.served, step.batch
        if served.preemptions:
            step.resumed.append(live)
        else:
            step.admitted.append(live)
            served.cached_tokens = computed
            if self.config.prefix_caching:
                self.queried_tokens += served.request.prompt_tokens
                self.cached_tokens += computed
        if self._worst:
            self._reserved += self._worst_blocks(live)
        if self.config.policy == "priority":
            insort(self.running, live, key=lambda one: one.key)
        else:
            self.running.append(live)
        end = computed + need
        batch.sequences += need > 0
        batch.kv_tokens += end if need else 0
        batch.prefill_tokens += need
        batch.prefill_pairs += need * (computed + end + 1) // 2
        if need and end == live.known:
            self._emit(step, live)
        if self.config.prefix_caching:
            self._remember(live, end)

    def _has_room(self, live: Live, found: list[int], end: int) -> bool:
        """Whether the request may be admitted, by the rule of admission."""
        pool = self.pool
        if self._worst:
            return self._reserved + self._worst_blocks(live) <= pool.num_blocks - 1 - self._watermark
        goal = live.known if self.config.admission == "full_prompt" else end
        unused = sum(pool.ref_count(block) == 0 for block in found)      # free, but no longer so once they are shared
        return pool.blocks_for(goal) - len(found) <= pool.free_blocks - unused - self._watermark

    def _found(self, live: Live) -> list[int]:
        """Blocks of the request's leading tokens that the pool still holds; at least one token is left to compute."""
        if not self.config.prefix_caching or not (live.hashes or live.served.preemptions):
            return []
        return self.pool.cached(self._hash(live, k) for k in range((live.known - 1) // self.pool.block_size))

    def _remember(self, live: Live, end: int) -> None:
        full = end // self.pool.block_size
        for k in range(live.kept, full):
            self.pool.remember(live.table[k], self._hash(live, k))
        live.kept = full

    @staticmethod
    def _hash(live: Live, k: int) -> int:
        """Of its k-th block: by what it has in common with others, else its own (negative, as no other hash is)."""
        return live.hashes[k] if k < len(live.hashes) else -1 - (live.serial << 24 | k)

    def _worst_blocks(self, live: Live) -> int:
        return self.pool.blocks_for(self._most(live.served.request))

    def _most(self, request: Request) -> int:
        return min(request.most_tokens, self.config.max_model_len or request.most_tokens)

    def _leave(self, live: Live) -> None:
        self.pool.release(live.table)
        if self._worst:
            self._reserved -= self._worst_blocks(live)

    def _ordered(self, live: Live) -> None:
        """Give a request its place among the waiting: a key that stays the same while it waits."""
        config, request = self.config, live.served.request
        arrived = (request.arrival_s, live.serial)
        aged = 0.0 if config.aging_s is None else request.arrival_s / config.aging_s
        if config.policy == "priority":
            live.key = (request.priority + aged, *arrived)
        elif config.policy == "shortest_prefill":
            live.key = (request.prompt_tokens / config.short_threshold + aged, *arrived)
        else:
            live.key = arrived
        if config.policy == "short_first":
            tokens = request.prompt_tokens if config.short_by == "prompt" else request.most_tokens
            live.short = tokens < config.short_threshold

    def _wait(self, live: Live) -> None:
        heappush(self._heaps[0 if live.short else 1], (*live.key, live))

    def _next(self, now: float) -> list:
        """The heap whose head is served next; empty where nobody waits."""
        short, others = self._heaps
        aging = self.config.aging_s
        if not (short and others):
            return short or others
        if aging is None:
            return short
        score_short, score_other = (1 + (now - heap[0][0]) / aging for heap in (short, others))
        return short if self.config.short_weight * score_short >= score_other else others
