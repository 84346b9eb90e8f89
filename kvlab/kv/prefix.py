"""Names for prefixes: a hash per full block that stands for all tokens up to the block's end, and a cache built on it.

Two sequences share a block exactly if they are equal from their first token to the block's last one, so each hash
covers the one before it. Hashes are the same in every process. Works on token ids; never touches K and V.

Source: vLLM 0.32.0, vllm/v1/core/kv_cache_utils.py (hash_block_tokens) and kv_cache_manager.py (get_computed_blocks).
"""
from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from hashlib import sha256

from kvlab.kv.block_pool import BlockPool, OutOfBlocks
from kvlab.shapes import positive

ROOT = bytes(32)                            # the parent of a first block


def chain(tokens: Sequence[int], block_size: int, extra: object = None) -> list[bytes]:
    """One SHA-256 per full block of block_size tokens; what follows the last full block has none.

    extra: whatever besides tokens K and V depend on, or who may share them: a LoRA name, a cache salt, the hash of an
    image; any value that JSON can say. Raises ValueError for token ids that are not whole numbers.
    """
    positive(block_size=block_size)
    parent, hashes, pack = _root(extra), [], struct.Struct(f"<{block_size}q").pack
    try:
        for end in range(block_size, len(tokens) + 1, block_size):
            parent = sha256(parent + pack(*tokens[end - block_size:end])).digest()
            hashes.append(parent)
    except struct.error as why:
        raise ValueError(f"tokens must be whole numbers of at most 64 bits: {why}") from why
    return hashes


def chain_of_pieces(pieces: Sequence[int], piece_tokens: int, block_size: int, most: int | None = None) -> list[int]:
    """One hash per full block that pieces of piece_tokens tokens cover, for traces that give ids instead of tokens.

    Pieces with different ids have nothing in common, those with equal ids everything. A block that begins in one piece
    and ends in another depends on both. Mooncake's traces have pieces of 512 tokens. most: hashes of no more blocks
    than so many, for a prompt that ends before its last piece does.
    """
    positive(piece_tokens=piece_tokens, block_size=block_size)
    parent, pack = _root([piece_tokens, block_size]), struct.Struct("<q").pack
    hashes: list[int] = []
    first = 0
    try:
        for i, piece in enumerate(pieces, 1):
            parent = sha256(parent + pack(piece)).digest()
            last = i * piece_tokens // block_size           # blocks first … last - 1 end within this piece
            last = last if most is None else min(last, most)
            base = int.from_bytes(parent[:8], "little") << 32
            hashes += range(base + first, base + last)
            first = last
    except struct.error as why:
        raise ValueError(f"pieces must be whole numbers of at most 64 bits: {why}") from why
    return hashes


class PrefixCache:
    """Block tables for sequences of tokens from one pool, full blocks shared between equal beginnings.

    queries, hits: tokens of all sequences that were allocated, and those of them that were found, as vLLM counts
    them: a sequence found whole still computes its last block, since its last token's logits are needed.
    A block counts as found from the moment it is allocated, so its K and V must be computed before those of the next.
    """

    def __init__(self, pool: BlockPool):
        self.pool, self.queries, self.hits = pool, 0, 0

    def allocate(self, tokens: Sequence[int], extra: object = None) -> tuple[list[int], int]:
        """(block table, how many of the tokens are in it already).

        Raises OutOfBlocks and changes nothing.
        """
        pool = self.pool
        positive(tokens=len(tokens))
        hashes = chain(tokens, pool.block_size, extra)
        table = pool.cached(hashes[:(len(tokens) - 1) // pool.block_size])
        cached, fresh = len(table), pool.blocks_for(len(tokens)) - len(table)
        free = pool.free_blocks - sum(not pool.ref_count(block_id) for block_id in table)
        if fresh > free:
            raise OutOfBlocks(fresh, free)
        pool.share(table)
        table += pool.take(fresh)
        for block_id, block_hash in zip(table[cached:], hashes[cached:], strict=False):
            pool.remember(block_id, block_hash)
        self.queries += len(tokens)
        self.hits += cached * pool.block_size
        return table, cached * pool.block_size

    def append(self, table: list[int], tokens: Sequence[int], new_tokens: Sequence[int], extra: object = None,
               ) -> list[tuple[int, int]]:
        """Room for new_tokens behind the tokens that the table holds; blocks that become full are remembered.

        Returns what must be copied first, as BlockPool.append does.
        """
        copies = self.pool.append(table, len(tokens), len(new_tokens))
        size, held = self.pool.block_size, len(tokens) // self.pool.block_size
        if (len(tokens) + len(new_tokens)) // size > held:
            hashes = chain([*tokens, *new_tokens], size, extra)
            for block_id, block_hash in zip(table[held:], hashes[held:], strict=False):
                self.pool.remember(block_id, block_hash)
        return copies

    def free(self, table: Sequence[int]) -> None:
        """Give the table up; its full blocks are found until the pool hands them out again."""
        self.pool.free(table)


def _root(extra: object) -> bytes:
    if extra is None:
        return ROOT
    try:
        return sha256(json.dumps(extra, sort_keys=True).encode()).digest()
    except (TypeError, ValueError) as why:
        raise ValueError(f"extra={extra!r} must be a value that JSON can say: text, numbers, lists of them") from why
