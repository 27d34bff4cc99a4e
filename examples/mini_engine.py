"""A serving engine on `Attention`: block allocator, continuous batching, prefix sharing.

A step feeds decodes their next token and others a chunk of their prompt, in one batch. Full blocks
are known by all tokens up to their end: a prompt that begins alike reads them while they last.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch
from mini_model import Model

from attn_shared import CommonAttentionMetadata

__all__ = ["BlockPool", "Engine", "Request", "main"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, what followed it, and the blocks that hold the first `computed` tokens."""

    tokens: list[int]
    max_new: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    shared: int = 0  # tokens that another request had computed


class BlockPool:
    """Blocks with the number of their readers; idle ones keep their contents until needed."""

    def __init__(self, num_blocks: int) -> None:
        self.readers = [0] * num_blocks
        self.idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.block_of: dict[tuple[int, ...], int] = {}  # all tokens up to a block's end -> block
        self.prefix_of: dict[int, tuple[int, ...]] = {}

    def take(self, block: int | None = None) -> int:
        """Return a block with one more reader: this one, or the one idle for longest."""
        if block is None:
            block = next(iter(self.idle))
            self.block_of.pop(self.prefix_of.pop(block, ()), None)  # about to be overwritten
        self.idle.pop(block, None)
        self.readers[block] += 1
        return block

    def give(self, blocks: list[int]) -> None:
        """Take a reader off each; a request's last blocks are the first to be reused."""
        for block in reversed(blocks):
            self.readers[block] -= 1
            if not self.readers[block]:
                self.idle[block] = None

    def remember(self, prefix: tuple[int, ...], block: int) -> None:
        """Let others find a full block; of two alike the first is found."""
        if self.block_of.setdefault(prefix, block) == block:
            self.prefix_of[block] = prefix


class Engine:
    """Runs requests on a model: `add` them, and `step` while one is `running` or `waiting`."""

    def __init__(self, model: Model, num_blocks: int, step_tokens: int = 32) -> None:
        self.model, self.step_tokens, self.block_size = model, step_tokens, model.block_size
        self.caches = [layer.allocate(num_blocks) for layer in model.layers]
        self.pool = BlockPool(num_blocks)
        self.waiting, self.running = deque[Request](), list[Request]()

    def add(self, prompt: list[int], max_new: int) -> Request:
        """Queue a request; ValueError if it could never run."""
        request = Request(list(prompt), max_new)
        if not prompt or max_new < 1 or self._needed(request) > len(self.pool.readers):
            raise ValueError(f"{len(prompt)} + {max_new} tokens: none, or more than the cache has")
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Admit what fits, run one batch, and let finished requests go."""
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        budget, batch = self.step_tokens, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.computed):
            if count := min(len(request.tokens) - request.computed, budget):
                batch.append((request, count))
                budget -= count
        for (request, count), token in zip(batch, self._run(batch), strict=True):
            self._advance(request, count, token)

    def _needed(self, request: Request) -> int:
        return -(-(len(request.tokens) + request.max_new) // self.block_size)

    def _admit(self, request: Request) -> bool:
        """Give a request all blocks that it will need, shared ones first; False: not yet."""
        found = []
        for end in range(self.block_size, len(request.tokens), self.block_size):
            if tuple(request.tokens[:end]) not in self.pool.block_of:
                break
            found.append(self.pool.block_of[tuple(request.tokens[:end])])
        fresh = self._needed(request) - len(found)
        if fresh > len(self.pool.idle.keys() - found):
            return False
        request.blocks = [self.pool.take(block) for block in found]
        request.blocks += [self.pool.take() for _ in range(fresh)]
        request.computed = request.shared = len(found) * self.block_size
        return True

    def _run(self, batch: list[tuple[Request, int]]) -> list[int]:
        """Run one batch, and return the most likely token after each request's last."""
        width = max(len(r.blocks) for r, _ in batch)
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[count for _, count in batch],
            seq_lens=[r.computed + count for r, count in batch],
            block_table=torch.tensor([(r.blocks + [0] * width)[:width] for r, _ in batch]),
            block_size=self.block_size,
        )
        tokens = [t for r, count in batch for t in r.tokens[r.computed : r.computed + count]]
        logits = self.model(torch.tensor(tokens), self.caches, common)
        return list(map(int, logits[common.query_start_loc_cpu[1:].long() - 1].argmax(-1)))

    def _advance(self, request: Request, count: int, token: int) -> None:
        """Keep the token if it follows the last one; make full blocks known; end what is done."""
        begin, request.computed = request.computed, request.computed + count
        for index in range(begin // self.block_size, request.computed // self.block_size):
            prefix = tuple(request.tokens[: (index + 1) * self.block_size])
            self.pool.remember(prefix, request.blocks[index])
        if request.computed == len(request.tokens):
            request.tokens.append(token)
            request.max_new -= 1
        if not request.max_new:
            self.running.remove(request)
            self.pool.give(request.blocks)


def main() -> None:
    """Answer five requests, three of which begin alike; they come while others run."""
    engine, requests, prefix = Engine(Model(), num_blocks=64), list[Request](), list(range(1, 41))
    prompts = [[*prefix, 5], [7, 8, 9], [*prefix, 6], [*prefix, 5, 4], [3] * 70]
    while engine.running or len(requests) < len(prompts):
        if len(requests) < len(prompts):
            requests.append(engine.add(prompts[len(requests)], max_new=8))
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        print(f"{len(prompt):3} tokens, {request.shared:3} shared: {request.tokens[len(prompt) :]}")


if __name__ == "__main__":
    main()
