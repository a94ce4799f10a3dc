"""The loop over batches: runs one program on the clients of one chunk, step by step together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.func import vmap

from fedclade.core import rng
from fedclade.core.batching import Batches
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
    """The compiled forms of programs' steps: CUDA graphs and traces."""

    def __init__(self) -> None:
        self.cuda_graphs, self.traces = CudaGraphCache(), TraceCache()


@dataclass(frozen=True)
class ClientBatch:
    """The clients of one chunk.

    Args:
        dataset: the samples.
        part_ids: the part of the dataset that each client reads, on the CPU.
        client_ids: the number of each client, on the CPU.
        params: the model that each client starts from, one row for each.
        client_state: the state of each client, one row for each.
    """

    dataset: DeviceDataset
    part_ids: Tensor
    client_ids: Tensor
    params: Tree
    client_state: Tree

    def __getitem__(self, order: Tensor) -> ClientBatch:
        device_order = order.to(self.dataset.device)
        return ClientBatch(
            self.dataset,
            self.part_ids[order],
            self.client_ids[order],
            tree_index(self.params, device_order),
            tree_index(self.client_state, device_order),
        )


def run_program(
    program: AnyProgram, clients: ClientBatch, broadcast: Tree, key: int, compiled: CompiledSteps
) -> tuple[Tree, Tree | None]:
    """Run a program on the clients of a chunk.

    Args:
        program: the program.
        clients: the clients. Their tensors may be overwritten.
        broadcast: the tree that every client receives.
        key: the randomness of the call.
        compiled: the compiled steps of earlier calls.

    Returns:
        The replies of the clients, and their new client state; None if it is unchanged.
    """
    try:
        if isinstance(program, ChainedProgram):
            return _chained(program, clients, broadcast, key, compiled)
        device = clients.dataset.device
        hyperparams = {
            name: torch.full((), value, dtype=torch.float32, device=device)
            for name, value in program.hyperparams.items()
        }
        program = replace(program, batches=_limit_batch_size(program.batches, clients.dataset))
        clashes = sorted(hyperparams.keys() & broadcast.keys())
        if clashes:
            raise InvalidInputError(
                f"model: its parameter '{clashes[0]}' has the same name as a hyperparameter of the"
                f" program '{program.name}'. Rename the parameter.",
                "model",
            )
        key = rng.fold_in(key, *program.rng_streams)
        broadcast = {**hyperparams, **broadcast}
        if not program.vectorized:
            return _one_by_one(program, clients, broadcast, key)
        return _sorted_by_size(program, clients, broadcast, key, compiled)
    except RuntimeError as error:
        explained = _explain(error, program)
        if explained is None:
            raise
        raise explained from error


def _chained(
    program: ChainedProgram,
    clients: ClientBatch,
    broadcast: Tree,
    key: int,
    compiled: CompiledSteps,
) -> tuple[Tree, Tree | None]:
    # The first program may overwrite the starting models, and `connect` needs them.
    first = replace(clients, params=tree_map(torch.clone, clients.params))
    reply, state = run_program(program.first, first, broadcast, key, compiled)
    params, first_reply = vmap(program.connect, in_dims=(None, 0, 0))(
        broadcast, clients.params, reply
    )
    clients = replace(
        clients, params=params, client_state=clients.client_state if state is None else state
    )
    reply, second_state = run_program(program.second, clients, {}, key, compiled)
    return {**first_reply, **reply}, state if second_state is None else second_state


def _limit_batch_size(batches: Batches, dataset: DeviceDataset) -> Batches:
    """Batches no larger than the largest client, so that full batches have little padding."""
    return replace(batches, size=min(batches.size, dataset.longest))


def _sorted_by_size(
    program: Program, clients: ClientBatch, broadcast: Tree, key: int, compiled: CompiledSteps
) -> tuple[Tree, Tree | None]:
    """Sort the clients by size, run `_vectorized`, and restore the order in its results."""
    sizes = clients.dataset.sizes[clients.part_ids]
    if all(first >= second for first, second in pairwise(sizes.tolist())):  # `map` sorts them
        return _vectorized(program, clients, broadcast, key, compiled)
    order = sizes.argsort(descending=True, stable=True)
    reply, state = _vectorized(program, clients[order], broadcast, key, compiled)
    inverse = order.argsort().to(clients.dataset.device)
    return tree_index(reply, inverse), tree_index(state, inverse) if state is not None else None


def _vectorized(
    program: Program, clients: ClientBatch, broadcast: Tree, key: int, compiled: CompiledSteps
) -> tuple[Tree, Tree | None]:
    """All clients make each step together. They are sorted by descending size, so the active ones
    are a prefix, which only shrinks.
    """
    const, carry = _start(program, clients, broadcast)
    reader = BatchReader(
        clients.dataset, program.batches, clients.part_ids, clients.client_ids, key
    )
    after = compiled.cuda_graphs.run(program.step, reader, broadcast, const, carry)
    if after is None:
        after = _run_steps(
            program.step,
            reader,
            broadcast,
            const,
            _owned(carry, broadcast, const, clients.client_state),
            compiled.traces,
        )
    return _finish(program, clients, broadcast, const, after)


def _start(program: Program, clients: ClientBatch, broadcast: Tree) -> tuple[Tree, Tree]:
    if is_natively_batched(program.start):
        return program.start(broadcast, clients.params, clients.client_state)

    # The client's number is unused: vmap needs a batched input even if a program starts without
    # parameters and client state.
    def start(params: Tree, state: Tree, client: Tensor) -> tuple[Tree, Tree]:
        return program.start(broadcast, params, state)

    const, carry = vmap(start)(
        clients.params, clients.client_state, clients.client_ids.to(clients.dataset.device)
    )
    return const, carry


def _finish(
    program: Program, clients: ClientBatch, broadcast: Tree, const: Tree, carry: Tree
) -> tuple[Tree, Tree | None]:
    if is_natively_batched(program.finish):
        return program.finish(broadcast, const, carry)
    writes_state = True

    def finish(const: Tree, carry: Tree, client: Tensor) -> tuple[Tree, Tree]:
        nonlocal writes_state
        reply, state = program.finish(broadcast, const, carry)
        writes_state = state is not None
        return reply, state or {}

    reply, state = vmap(finish)(const, carry, clients.client_ids.to(clients.dataset.device))
    return reply, state if writes_state else None


def _owned(carry: Tree, *others: Tree) -> Tree:
    """The carry in tensors that nothing else uses, so that a step may write into them."""
    if any(value.device.type == "cuda" for value in carry.values()):
        # The same layout as in a CUDA graph: the choice of kernels depends on it.
        buffers = packed_like(carry)
        copy_into(buffers, carry)
        return buffers
    used = {value.untyped_storage().data_ptr() for tree in others for value in tree.values()}
    return {
        name: value.clone() if value.untyped_storage().data_ptr() in used else value.contiguous()
        for name, value in carry.items()
    }


def _run_steps(
    step: Step, reader: BatchReader, broadcast: Tree, const: Tree, carry: Tree, traces: TraceCache
) -> Tree:
    """The carries after all steps."""
    dataset, counts = reader.dataset, reader.counts
    with dataset.clock.phase("plan"):
        reads = list(zip(*(value.unbind() for value in reader.steps()), strict=True))
    finished: list[Tree] = []
    active, first = len(counts), 0
    with dataset.clock.phase("steps"):
        for remaining, group in groupby(active_counts(counts)):
            if remaining < active:
                finished.append(tree_index(carry, slice(remaining, active)))
                carry, const = (tree_index(tree, slice(remaining)) for tree in (carry, const))
            active, steps = remaining, len(list(group))
            run: StackStep | None = None
            for read in reads[first : first + steps]:
                batch = reader.batch(
                    *(read if active == len(counts) else (value[:active] for value in read))
                )
                run = run or traces.step(step, steps, broadcast, const, carry, batch)
                carry = run(broadcast, const, carry, batch)
            first += steps
    dataset.clock.count(sum(counts), sum(counts))
    return concatenate([carry, *reversed(finished)])


def _one_by_one(
    program: Program, clients: ClientBatch, broadcast: Tree, key: int
) -> tuple[Tree, Tree | None]:
    """A loop over clients, without padding: for programs that use numpy or scikit-learn."""
    replies: list[Tree] = []
    states: list[Tree | None] = []
    for row in range(len(clients.client_ids)):
        single = slice(row, row + 1)
        const, carry = program.start(
            broadcast,
            tree_index(clients.params, torch.tensor(row)),
            tree_index(clients.client_state, torch.tensor(row)),
        )
        reader = BatchReader(
            clients.dataset,
            program.batches,
            clients.part_ids[single],
            clients.client_ids[single],
            key,
        )
        reads = reader.steps()
        for step in range(reader.counts[0]):
            batch = reader.batch(*(value[step] for value in reads))
            carry = program.step(broadcast, const, carry, batch.of_client(0))
        reply, state = program.finish(broadcast, const, carry)
        replies.append(reply)
        states.append(state)
    if all(state is None for state in states):
        return stack(replies), None
    # A client that wrote nothing keeps its state.
    all_states = [
        tree_index(clients.client_state, torch.tensor(row)) if state is None else state
        for row, state in enumerate(states)
    ]
    return stack(replies), stack(all_states)


def _explain(error: RuntimeError, program: AnyProgram) -> VectorizationError | None:
    text = str(error)
    if isinstance(error, VectorizationError):
        return None
    if "data-dependent" in text or ".item()" in text:
        return VectorizationError(
            f"program '{program.name}': it branches on the values of a tensor (if, while, .item()),"
            " so clients cannot share a step. Use torch.where, or declare vectorized=False to run"
            " it client by client.",
            "program",
        )
    if "randomness" in text:
        return VectorizationError(
            f"program '{program.name}': it uses torch's random generator. Derive random numbers"
            " from batch.key (core/rng.py).",
            "program",
        )
    return None
