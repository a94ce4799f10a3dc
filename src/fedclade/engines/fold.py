"""The loop over batches: one program on the clients of one chunk, all in the same step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap

from fedclade.client import keys
from fedclade.client.objective import Batch
from fedclade.client.plan import Batches, Plan, make_plan
from fedclade.client.programs import AnyProgram, Chain, Program
from fedclade.client.tree import Tree, concatenate, stack, take
from fedclade.data.clients import Parts
from fedclade.engines.batches import Steps, batch_of, living
from fedclade.engines.graphs import LEAST_STEPS, Captured, Captures, fits, shapes
from fedclade.errors import InvalidInput, NotVectorisable


class Pool:
    """Samples on the device as they came, and which of them each part holds."""

    def __init__(self, x: Tensor, y: Tensor, parts: Parts, device: torch.device) -> None:
        self.x, self.y = x.to(device), y.to(device)
        self.index, self.offsets = parts.index.to(device), parts.offsets.to(device)
        self.sizes = self.offsets.diff()
        self.longest = max(1, int(self.sizes.max())) if len(self.sizes) else 1
        self.captures = Captures()

    def steps(self, parts: Tensor, plan: Plan) -> Steps:
        """The plan of these parts, in rows of the pool."""
        return Steps(self.index[self.offsets[parts][:, None, None, None] + plan.position], plan.valid, plan.key)


@dataclass(frozen=True)
class Lanes:
    """The clients of one chunk: what each reads, who it is, and what it starts from."""

    pool: Pool
    part: Tensor
    client: Tensor
    mine: Tree
    memory: Tree


def fold(program: AnyProgram, lanes: Lanes, shared: Tree, key: int) -> tuple[Tree, Tree | None]:
    """The program's replies for these lanes, and the memory they want kept (None: unchanged)."""
    try:
        if isinstance(program, Chain):
            return _chained(program, lanes, shared, key)
        device = lanes.client.device
        settings = {name: torch.tensor(value, dtype=torch.float32, device=device) for name, value in program.settings.items()}
        program = replace(program, batches=_fitting(program.batches, lanes.pool))
        taken = sorted(settings.keys() & shared.keys())
        if taken:
            raise InvalidInput(f"model: its parameter '{taken[0]}' has the name of a setting of the program '{program.name}'; rename it.")
        client_keys = keys.client_keys(keys.fold(key, *program.streams), lanes.client)
        run = _by_falling_size if program.vectorised else _one_by_one
        return run(program, lanes, {**settings, **shared}, client_keys)
    except RuntimeError as error:
        plain = _in_plain_words(error, program)
        if plain is None:
            raise
        raise plain from error


def _chained(program: Chain, lanes: Lanes, shared: Tree, key: int) -> tuple[Tree, Tree | None]:
    reply, memory = fold(program.first, lanes, shared, key)
    mine, told = vmap(program.link, in_dims=(None, 0, 0))(shared, lanes.mine, reply)
    lanes = Lanes(lanes.pool, lanes.part, lanes.client, mine, lanes.memory if memory is None else memory)
    reply, later = fold(program.second, lanes, shared, key)
    return {**told, **reply}, memory if later is None else later


def _fitting(batches: Batches, pool: Pool) -> Batches:
    """No larger than the largest client: a batch of everything costs no more padding than it must."""
    return replace(batches, size=min(batches.size, pool.longest))


def _by_falling_size(program: Program, lanes: Lanes, shared: Tree, client_keys: Tensor) -> tuple[Tree, Tree | None]:
    """Put the lanes into the order that `_vectorised` needs, and its results back into theirs."""
    sizes = lanes.pool.sizes[lanes.part]
    if bool((sizes.diff() <= 0).all()):  # as `map` asks it
        return _vectorised(program, lanes, shared, make_plan(program.batches, sizes, client_keys))
    order = sizes.argsort(descending=True, stable=True)
    moved = Lanes(lanes.pool, lanes.part[order], lanes.client[order], take(lanes.mine, order), take(lanes.memory, order))
    reply, memory = _vectorised(program, moved, shared, make_plan(program.batches, sizes[order], client_keys[order]))
    back = order.argsort()
    return take(reply, back), take(memory, back) if memory is not None else None


def _vectorised(program: Program, lanes: Lanes, shared: Tree, plan: Plan) -> tuple[Tree, Tree | None]:
    """All lanes in one step at a time. Lanes are sorted by falling size: those with steps left are a prefix, which only shrinks."""
    keeps_memory = True

    def start(shared: Tree, mine: Tree, memory: Tree, client: Tensor) -> tuple[Tree, Tree]:
        return program.start(shared, mine, memory)

    def finish(shared: Tree, const: Tree, carry: Tree, client: Tensor) -> tuple[Tree, Tree]:
        nonlocal keeps_memory
        reply, memory = program.finish(shared, const, carry)
        keeps_memory = memory is not None
        return reply, memory or {}

    # The client's number goes along unused: vmap needs a batched input even where a program starts from nothing of its own.
    const, carry = vmap(start, in_dims=(None, 0, 0, 0))(shared, lanes.mine, lanes.memory, lanes.client)
    counts = program.batches.steps(lanes.pool.sizes[lanes.part]).tolist()
    reads = lanes.pool.steps(lanes.part, plan)
    after = _captured(program, lanes.pool, shared, const, carry, reads, counts)
    if after is None:
        after = _stepped(program, lanes.pool, shared, const, carry, reads, counts)
    reply, memory = vmap(finish, in_dims=(None, 0, 0, 0))(shared, const, after, lanes.client)
    return reply, memory if keeps_memory else None


def _stepped(program: Program, pool: Pool, shared: Tree, const: Tree, carry: Tree, reads: Steps, counts: list[int]) -> Tree:
    """The carries after all steps, one after another."""
    step = vmap(program.step, in_dims=(None, 0, 0, 0))
    done: list[Tree] = []
    alive = len(counts)
    for now, left in enumerate(living(counts)):
        if left < alive:
            done.append(take(carry, slice(left, alive)))
            carry, const, alive = take(carry, slice(left)), take(const, slice(left)), left
        carry = step(shared, const, carry, batch_of(pool.x, pool.y, *(value[:alive, now] for value in reads)))
    return concatenate([carry, *reversed(done)])


def _captured(program: Program, pool: Pool, shared: Tree, const: Tree, carry: Tree, reads: Steps, counts: list[int]) -> Tree | None:
    """The carries after all steps by way of CUDA graphs, or None where that is not possible or not worth while."""
    if pool.x.device.type != "cuda" or not counts or counts[0] < LEAST_STEPS or not fits(carry):
        return None
    most = int(program.batches.steps(torch.tensor(pool.longest)))
    what = (program.step, program.batches, len(counts), most, shapes(shared, const, carry))

    def make() -> Captured:
        room = Steps(*(value.new_zeros((len(counts), most, *value.shape[2:])) for value in reads))
        return Captured(program.step, pool.x, pool.y, shared, const, carry, room)

    captured = pool.captures.of(what, make)
    if captured is None:
        return None
    try:
        return captured.run(shared, const, carry, reads, counts)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        pool.captures.cannot(what)
        return None


def _one_by_one(program: Program, lanes: Lanes, shared: Tree, client_keys: Tensor) -> tuple[Tree, Tree | None]:
    """Programs that use numpy or scikit-learn: a plain loop, on batches without padding."""
    replies: list[Tree] = []
    memories: list[Tree | None] = []
    sizes = lanes.pool.sizes[lanes.part]
    for lane, count in enumerate(program.batches.steps(sizes).tolist()):
        one = slice(lane, lane + 1)
        const, carry = program.start(shared, take(lanes.mine, torch.tensor(lane)), take(lanes.memory, torch.tensor(lane)))
        plan = make_plan(program.batches, sizes[one], client_keys[one])
        reads = lanes.pool.steps(lanes.part[one], plan)
        for now in range(count):
            batch = batch_of(lanes.pool.x, lanes.pool.y, *(value[:, now] for value in reads))
            real = batch.weight[0] > 0
            carry = program.step(shared, const, carry, Batch(batch.x[0][real], batch.y[0][real], batch.weight[0][real], batch.key[0]))
        reply, memory = program.finish(shared, const, carry)
        replies.append(reply)
        memories.append(memory)
    if all(memory is None for memory in memories):
        return stack(replies), None
    # Who wrote nothing keeps what it had.
    kept = [take(lanes.memory, torch.tensor(lane)) if memory is None else memory for lane, memory in enumerate(memories)]
    return stack(replies), stack(kept)


def _in_plain_words(error: RuntimeError, program: AnyProgram) -> NotVectorisable | None:
    text = str(error)
    if isinstance(error, NotVectorisable):
        return None
    if "data-dependent" in text or ".item()" in text:
        return NotVectorisable(
            f"program '{program.name}' branches on the values of a tensor (if, while, .item()), so clients cannot share a step: "
            "use torch.where, or declare it vectorised=False to have it run client by client."
        )
    if "randomness" in text:
        return NotVectorisable(f"program '{program.name}' draws from torch's generator: take it from batch.key (client/keys.py).")
    return None
