"""The loop over batches: one program on the clients of one chunk, all in the same step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.func import vmap

from fedclade.core import rng
from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch
from fedclade.core.packed_tree import packed_like
from fedclade.core.program import (
    AnyProgram,
    ChainedProgram,
    Program,
    StackStep,
    Step,
    is_natively_batched,
)
from fedclade.core.pytree import Tree, concatenate, stack, tree_index, tree_map
from fedclade.engines.cuda_graphs import CudaGraphCache, copy_into
from fedclade.engines.device_dataset import BatchReader, DeviceDataset, active_counts
from fedclade.engines.fx_tracing import TraceCache
from fedclade.errors import InvalidInputError, VectorizationError


class CompiledSteps:
    """What was made of programs to run them faster, for as long as a federation lasts."""

    def __init__(self) -> None:
        self.captures, self.traces = CudaGraphCache(), TraceCache()


@dataclass(frozen=True)
class ClientBatch:
    """The clients of one chunk: what each reads, who it is (both on the CPU), and what it starts
    from.
    """

    pool: DeviceDataset
    part: Tensor
    client: Tensor
    params: Tree
    memory: Tree

    def __getitem__(self, order: Tensor) -> ClientBatch:
        there = order.to(self.pool.device)
        return ClientBatch(
            self.pool,
            self.part[order],
            self.client[order],
            tree_index(self.params, there),
            tree_index(self.memory, there),
        )


def run_program(
    program: AnyProgram, lanes: ClientBatch, broadcast: Tree, key: int, runs: CompiledSteps
) -> tuple[Tree, Tree | None]:
    """The program's replies for these lanes, and the memory they want kept (None: unchanged). What
    lanes start from may be overwritten.
    """
    try:
        if isinstance(program, ChainedProgram):
            return _chained(program, lanes, broadcast, key, runs)
        device = lanes.pool.device
        settings = {
            name: torch.full((), value, dtype=torch.float32, device=device)
            for name, value in program.hyperparams.items()
        }
        program = replace(program, batches=_fitting(program.batches, lanes.pool))
        taken = sorted(settings.keys() & broadcast.keys())
        if taken:
            raise InvalidInputError(
                f"model: its parameter '{taken[0]}' has the name of a setting of the program"
                f" '{program.name}'; rename it."
            )
        key = rng.fold_in(key, *program.rng_streams)
        broadcast = {**settings, **broadcast}
        if not program.vectorised:
            return _one_by_one(program, lanes, broadcast, key)
        return _by_falling_size(program, lanes, broadcast, key, runs)
    except RuntimeError as error:
        plain = _in_plain_words(error, program)
        if plain is None:
            raise
        raise plain from error


def _chained(
    program: ChainedProgram, lanes: ClientBatch, broadcast: Tree, key: int, runs: CompiledSteps
) -> tuple[Tree, Tree | None]:
    first = replace(
        lanes, params=tree_map(torch.clone, lanes.params)
    )  # the link asks for it once more
    reply, memory = run_program(program.first, first, broadcast, key, runs)
    params, told = vmap(program.connect, in_dims=(None, 0, 0))(broadcast, lanes.params, reply)
    lanes = replace(lanes, params=params, memory=lanes.memory if memory is None else memory)
    reply, later = run_program(program.second, lanes, {}, key, runs)
    return {**told, **reply}, memory if later is None else later


def _fitting(batches: Batches, pool: DeviceDataset) -> Batches:
    """No larger than the largest client: a batch of everything costs no more padding than it
    must.
    """
    return replace(batches, size=min(batches.size, pool.longest))


def _by_falling_size(
    program: Program, lanes: ClientBatch, broadcast: Tree, key: int, runs: CompiledSteps
) -> tuple[Tree, Tree | None]:
    """Put the lanes into the order that `_vectorised` needs, and its results back into theirs."""
    sizes = lanes.pool.sizes[lanes.part]
    if all(first >= second for first, second in pairwise(sizes.tolist())):  # as `map` asks it
        return _vectorised(program, lanes, broadcast, key, runs)
    order = sizes.argsort(descending=True, stable=True)
    reply, memory = _vectorised(program, lanes[order], broadcast, key, runs)
    back = order.argsort().to(lanes.pool.device)
    return tree_index(reply, back), tree_index(memory, back) if memory is not None else None


def _vectorised(
    program: Program, lanes: ClientBatch, broadcast: Tree, key: int, runs: CompiledSteps
) -> tuple[Tree, Tree | None]:
    """All lanes in one step at a time. Lanes are sorted by falling size: those with steps left are
    a prefix, which only shrinks.
    """
    const, carry = _started(program, lanes, broadcast)
    reading = BatchReader(lanes.pool, program.batches, lanes.part, lanes.client, key)
    after = runs.captures.run(program.step, reading, broadcast, const, carry)
    if after is None:
        after = _stepped(
            program.step,
            reading,
            broadcast,
            const,
            _owned(carry, broadcast, const, lanes.memory),
            runs.traces,
        )
    return _finished(program, lanes, broadcast, const, after)


def _started(program: Program, lanes: ClientBatch, broadcast: Tree) -> tuple[Tree, Tree]:
    if is_natively_batched(program.start):
        return program.start(broadcast, lanes.params, lanes.memory)

    # The client's number goes along unused: vmap needs a batched input even where a program starts
    # from nothing of its own.
    def start(params: Tree, memory: Tree, client: Tensor) -> tuple[Tree, Tree]:
        return program.start(broadcast, params, memory)

    const, carry = vmap(start)(lanes.params, lanes.memory, lanes.client.to(lanes.pool.device))
    return const, carry


def _finished(
    program: Program, lanes: ClientBatch, broadcast: Tree, const: Tree, carry: Tree
) -> tuple[Tree, Tree | None]:
    if is_natively_batched(program.finish):
        return program.finish(broadcast, const, carry)
    keeps_memory = True

    def finish(const: Tree, carry: Tree, client: Tensor) -> tuple[Tree, Tree]:
        nonlocal keeps_memory
        reply, memory = program.finish(broadcast, const, carry)
        keeps_memory = memory is not None
        return reply, memory or {}

    reply, memory = vmap(finish)(const, carry, lanes.client.to(lanes.pool.device))
    return reply, memory if keeps_memory else None


def _owned(carry: Tree, *others: Tree) -> Tree:
    """The carry in memory that nothing else uses: a step may write into it."""
    if any(value.device.type == "cuda" for value in carry.values()):
        room = packed_like(carry)  # as a graph has it: kernels are chosen by how their operands lie
        copy_into(room, carry)
        return room
    used = {value.untyped_storage().data_ptr() for tree in others for value in tree.values()}
    return {
        name: value.clone() if value.untyped_storage().data_ptr() in used else value.contiguous()
        for name, value in carry.items()
    }


def _stepped(
    step: Step, reading: BatchReader, broadcast: Tree, const: Tree, carry: Tree, traces: TraceCache
) -> Tree:
    """The carries after all steps, one after another."""
    pool, counts = reading.pool, reading.counts
    with pool.clock.phase("plan"):
        reads = list(zip(*(value.unbind() for value in reading.steps()), strict=True))
    done: list[Tree] = []
    alive = number = 0
    with pool.clock.phase("steps"):
        for left, same in groupby(active_counts(counts)):
            if number:
                done.append(tree_index(carry, slice(left, alive)))
                carry, const = tree_index(carry, slice(left)), tree_index(const, slice(left))
            alive, steps = left, len(list(same))
            run: StackStep | None = None
            for now in reads[number : number + steps]:
                batch = pool.batch(
                    *(now if alive == len(counts) else (value[:alive] for value in now))
                )
                run = run or traces.step(step, steps, broadcast, const, carry, batch)
                carry = run(broadcast, const, carry, batch)
            number += steps
    pool.clock.count(sum(counts), sum(counts))
    return concatenate([carry, *reversed(done)])


def _one_by_one(
    program: Program, lanes: ClientBatch, broadcast: Tree, key: int
) -> tuple[Tree, Tree | None]:
    """Programs that use numpy or scikit-learn: a plain loop, on batches without padding."""
    replies: list[Tree] = []
    memories: list[Tree | None] = []
    for lane in range(len(lanes.client)):
        one = slice(lane, lane + 1)
        const, carry = program.start(
            broadcast,
            tree_index(lanes.params, torch.tensor(lane)),
            tree_index(lanes.memory, torch.tensor(lane)),
        )
        reading = BatchReader(lanes.pool, program.batches, lanes.part[one], lanes.client[one], key)
        reads = reading.steps()
        for now in range(reading.counts[0]):
            batch = lanes.pool.batch(*(value[now] for value in reads))
            real = batch.weight[0] > 0
            carry = program.step(
                broadcast,
                const,
                carry,
                Batch(batch.x[0][real], batch.y[0][real], batch.weight[0][real], batch.key[0]),
            )
        reply, memory = program.finish(broadcast, const, carry)
        replies.append(reply)
        memories.append(memory)
    if all(memory is None for memory in memories):
        return stack(replies), None
    # Who wrote nothing keeps what it had.
    kept = [
        tree_index(lanes.memory, torch.tensor(lane)) if memory is None else memory
        for lane, memory in enumerate(memories)
    ]
    return stack(replies), stack(kept)


def _in_plain_words(error: RuntimeError, program: AnyProgram) -> VectorizationError | None:
    text = str(error)
    if isinstance(error, VectorizationError):
        return None
    if "data-dependent" in text or ".item()" in text:
        return VectorizationError(
            f"program '{program.name}' branches on the values of a tensor (if, while, .item()), so"
            " clients cannot share a step: use torch.where, or declare it vectorised=False to have"
            " it run client by client."
        )
    if "randomness" in text:
        return VectorizationError(
            f"program '{program.name}' draws from torch's generator: take it from batch.key"
            " (core/rng.py)."
        )
    return None
