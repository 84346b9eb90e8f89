"""Which requests compute in the next step of an engine, and whose blocks are taken when memory runs out.

One step, as vLLM's V1 scheduler does it: running requests first, each one token (or the next chunk of its prompt), then
waiting ones while the token budget, the sequences and the blocks last. Where a running request finds no block, the last
one that was admitted is preempted (under `priority` the least urgent): its blocks are freed, it waits again in its old
place and computes all its tokens anew. Nothing is truncated, and nobody is admitted in a step that preempted.

With fcfs and priority, full_prompt and first_chunk, every step is vLLM's, block ids included, as long as it schedules
synchronously: its asynchronous scheduling plans a step before the one before it has ended, so that who has finished
keeps blocks and place for one step more.
Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py and kv_cache_manager.py; worst_case: TensorRT-LLM's
GUARANTEED_NO_EVICT; shortest_prefill: SGLang 0.5.23, managers/schedule_policy.py, which subtracts what is cached and
caps the chunk of a long prompt while shorter ones wait. Here written anew.
"""
from __future__ import annotations

from heapq import heappop, heappush

from kvlab.kv.block_pool import BlockPool
from kvlab.kv.prefix import chain_of_pieces
from kvlab.serving.live import Live, Step
from kvlab.serving.request import Request, Served
from kvlab.serving.scheduler_config import SchedulerConfig


class Scheduler:
    """Requests waiting for and running on one engine over one block pool.

    The clock is the caller's. submit a request when it arrives, ask for the next step with schedule(), and call
    finish(step) when it has taken its time. Counters: preemptions; queried_tokens and cached_tokens, the prompt
    tokens looked up in the prefix cache and found there at first admission (who comes back after a preemption is not
    counted, as in vLLM).
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config, self.pool = config, pool
        self.running: list[Live] = []
        self.preemptions = self.queried_tokens = self.cached_tokens = 0
        self._waiting: list[tuple] = []                         # a heap of keys, each with its request behind it
        self._reserved = 0                                      # blocks set aside by worst_case
        self._worst = config.admission == "worst_case" or config.batching == "static"
        self._watermark = int(config.watermark * pool.num_blocks)
        self._padding: list[Live] = []                          # static batches: who has finished and is still in it
        self._serial = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

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
        needed, usable = self.pool.blocks_for(most), self.pool.num_blocks - 1
        if needed > usable:
            served.rejected = (f"it needs {needed:,} blocks ({most:,} tokens in blocks of {self.pool.block_size}), and "
                               f"the pool has {usable:,}; give it more blocks, or the request fewer tokens")
            return None
        live = Live(served, self._serial, output)
        self._serial += 1
        if self.config.prefix_caching and request.prefix:
            whole = request.prompt_tokens // self.pool.block_size       # the last piece may reach beyond the prompt
            live.hashes = chain_of_pieces(request.prefix, request.piece_tokens, self.pool.block_size, whole)
        live.key = (self.config.rank(request), request.arrival_s, live.serial)
        self._wait(live)
        return live

    def schedule(self) -> Step:
        """Put the next step together and give it its blocks; its batch is empty where nothing can run."""
        step, config = Step(), self.config
        budget = self._run(step, config.max_num_batched_tokens)
        if self._padding:
            padding = len(self._padding)
            step.batch.decode_seqs += padding
            step.batch.sequences += padding
            step.batch.kv_tokens += sum(live.known for live in self._padding)
        elif not step.preempted and not (config.batching == "static" and self.running):
            self._admit(step, budget)
        return step

    def finish(self, step: Step) -> None:
        """The step is over: whoever got a last token leaves, and gives its blocks up."""
        if not step.ended:
            return
        leaving = step.ended
        gone = set(leaving)
        self.running = [live for live in self.running if live not in gone]
        if self.config.batching == "static":
            self._padding += leaving
            if self.running:
                return
            leaving, self._padding = self._padding, []
        for live in leaving:
            self._leave(live)

    def _run(self, step: Step, budget: int) -> int:
        """Running requests, in their order; returns what is left of the budget. The simulator's hot loop."""
        running, remember, block_size = self.running, self.config.prefix_caching, self.pool.block_size
        batch, ended = step.batch, step.ended
        kv_tokens = decode_seqs = generated = leaving = position = 0
        count = len(running)
        while position < count and budget > 0:
            live = running[position]
            if not live.left:                                   # async_scheduling: its last token is being computed
                position += 1
                leaving += 1
                continue
            known, computed = live.known, live.computed
            need = known - computed
            if need > budget:
                need = budget
            end = computed + need
            if end > live.room:
                while not self._grow(live, end):
                    at = self._least_urgent(step)
                    victim = running.pop(at)
                    if at < position:                           # it had computed in this step already
                        position -= 1
                        budget += 1
                        self._take_back(step, victim)
                    self._preempt(step, victim)
                    if victim is live:
                        break
                count = len(running)
                if end > live.room:
                    break                                       # nobody else was left to preempt
            position += 1
            live.computed = end
            budget -= need
            kv_tokens += end
            if need == 1:
                decode_seqs += 1
            else:
                step.chunks[live] = need
                batch.prefill_tokens += need
                batch.prefill_pairs += need * (computed + end + 1) // 2
            if end == known:                                    # it gets a token
                generated += 1
                live.known = known + 1
                live.left -= 1
                if known == live.goal:
                    (step.first if known == live.prompt else step.caught_up).append(live)
                if not live.left:
                    ended.append(live)
            if remember and end // block_size > live.kept:
                self._remember(live, end)
        batch.kv_tokens += kv_tokens
        batch.decode_seqs += decode_seqs
        batch.sequences += position - leaving
        step.generated += generated
        return budget

    def _grow(self, live: Live, tokens: int) -> bool:
        """Blocks for so many tokens; False if there are not as many."""
        pool = self.pool
        count = pool.blocks_for(tokens) - len(live.table)
        if count > pool.free_blocks:
            return False
        live.table += pool.take(count)
        live.room = len(live.table) * pool.block_size
        return True

    def _least_urgent(self, step: Step) -> int:
        """Whose turn it is to be preempted: a place among the running, those left out that end with the step before."""
        running = self.running
        places = [place for place, live in enumerate(running) if live.left or live in step.ended]
        return max(places, key=lambda place: running[place].key) if self.config.policy == "priority" else places[-1]

    def _take_back(self, step: Step, live: Live) -> None:
        """The step does not compute the request's next token after all.

        It was one token: whoever has more of its prompt to compute takes all the budget, so that nobody is let in, and
        so nobody runs, behind it.
        """
        batch = step.batch
        live.known -= 1
        live.left += 1
        step.generated -= 1
        if live.left == 1:
            step.ended.remove(live)
        batch.kv_tokens -= live.computed
        batch.decode_seqs -= 1

    def _preempt(self, step: Step, live: Live) -> None:
        self.preemptions += 1
        live.served.preemptions += 1
        self.pool.release(live.table)
        live.table, live.room, live.computed, live.kept = [], 0, 0, 0
        live.goal = live.known
        step.preempted.append(live)
        self._wait(live)

    def _admit(self, step: Step, budget: int) -> None:
        """Waiting requests, while tokens, sequences and blocks last. A static batch is filled whatever the budget."""
        config, pool, static = self.config, self.pool, self.config.batching == "static"
        while self._waiting and (budget > 0 or static) and len(self.running) < config.max_num_seqs:
            live = self._waiting[0][-1]
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
            heappop(self._waiting)
            pool.share(found)
            live.table = found + pool.take(pool.blocks_for(end) - len(found))
            live.room, live.computed, live.kept = len(live.table) * pool.block_size, end, len(found)
            budget -= need
            self._join(step, live, computed, need)

    def _join(self, step: Step, live: Live, computed: int, need: int) -> None:
        """The request runs from this step on, and computes need tokens beyond those that were found."""
        served, batch, end = live.served, step.batch, computed + need
        if served.preemptions:
            step.resumed.append(live)
        else:
            step.admitted.append(live)
            served.cached_tokens = computed
            if self.config.prefix_caching:
                self.queried_tokens += live.prompt
                self.cached_tokens += computed
        if self._worst:
            self._reserved += self._worst_blocks(live)
        self.running.append(live)
        if need:                                                # 0 in a static batch that is larger than the budget
            step.chunks[live] = need
            batch.sequences += 1
            batch.kv_tokens += end
            batch.prefill_tokens += need
            batch.prefill_pairs += need * (computed + end + 1) // 2
        if end == live.known:
            step.generated += 1
            live.known += 1
            live.left -= 1
            (step.first if end == live.prompt else step.caught_up).append(live)
            if not live.left:
                step.ended.append(live)
        if self.config.prefix_caching:
            self._remember(live, end)

    def _has_room(self, live: Live, found: list[int], end: int) -> bool:
        """Whether the request may be admitted, by the rule of admission."""
        pool = self.pool
        spared = self._watermark if self.running else 0
        if self._worst:
            return self._reserved + self._worst_blocks(live) <= pool.num_blocks - 1 - spared
        goal = live.known if self.config.admission == "full_prompt" else end
        unused = sum(pool.ref_count(block) == 0 for block in found)      # free, but no longer so once they are shared
        return pool.blocks_for(goal) - len(found) <= pool.free_blocks - unused - spared

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
        return live.hashes[k] if k < len(live.hashes) else -1 - (live.serial << 32 | k)

    def _worst_blocks(self, live: Live) -> int:
        return self.pool.blocks_for(self._most(live.served.request))

    def _most(self, request: Request) -> int:
        return min(request.most_tokens, self.config.max_model_len or request.most_tokens)

    def _leave(self, live: Live) -> None:
        self.pool.release(live.table)
        if self._worst:
            self._reserved -= self._worst_blocks(live)

    def _wait(self, live: Live) -> None:
        heappush(self._waiting, (*live.key, live))
