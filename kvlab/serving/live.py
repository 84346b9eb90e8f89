"""A request inside an engine, and one step of that engine: what the scheduler and those who watch it share."""
from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.serving.request import Served
from kvlab.serving.step_time import Batch


class Live:
    """A request that waits or runs: what the engine knows of it."""
    __slots__ = ("served", "serial", "key", "table", "room", "computed", "prompt", "known", "goal", "left", "hashes",
                 "kept")

    def __init__(self, served: Served, serial: int, output_tokens: int):
        self.served, self.serial = served, serial
        self.key: tuple = ()                    # its place among the waiting, smallest first
        self.table: list[int] = []              # its blocks
        self.room = 0                           # tokens that they hold
        self.computed = 0                       # tokens whose K and V lie in them
        self.prompt = self.known = self.goal = served.request.prompt_tokens
        # known: tokens of the prompt and those generated; goal: how many of them it has to compute before it decodes
        self.left = output_tokens               # tokens still to be generated
        self.hashes: list[int] = []             # of its leading full blocks, which others may have too
        self.kept = 0                           # blocks that the pool remembers


@dataclass(slots=True)
class Step:
    """One step: what it computes, and what happened while it was put together. Lists hold requests.

    first: those that get their first token when it ends; ended: their last. resumed: admitted again after a preemption;
    caught_up: those that have computed again all they had, and get the next token.
    generated: tokens that all get. chunks: how many tokens a request computes, where that is not one.
    """
    batch: Batch = field(default_factory=Batch)
    generated: int = 0
    admitted: list[Live] = field(default_factory=list)
    resumed: list[Live] = field(default_factory=list)
    preempted: list[Live] = field(default_factory=list)
    first: list[Live] = field(default_factory=list)
    ended: list[Live] = field(default_factory=list)
    caught_up: list[Live] = field(default_factory=list)
    chunks: dict[Live, int] = field(default_factory=dict)
