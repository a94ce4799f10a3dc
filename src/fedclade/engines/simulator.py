"""The simulator: runs many clients at a time, in one process, on one CPU or GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedclade.core.federation import (
    Aggregator,
    ClientResults,
    Failure,
    ModelAssignment,
    SegmentSum,
    ServerUpdate,
)
from fedclade.core.output_metric import OutputMetric
from fedclade.core.program import AnyProgram, ChainedProgram
from fedclade.core.pytree import Tree, concatenate, nbytes, stack, tree_index
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.federated_dataset import Clients
from fedclade.engines.accumulator import Accumulator, check_sum, ordered_results
from fedclade.engines.base import Delivery, EvalRequest, Split, Traffic, checked_ids
from fedclade.engines.chunk_execution import ClientBatch, CompiledSteps, run_program
from fedclade.engines.client_state import ClientStateStore
from fedclade.engines.device import Precision, check_precision, pick_device, torch_settings
from fedclade.engines.device_dataset import DeviceDataset, Longest, datasets_of
from fedclade.engines.oom import OomRetry
from fedclade.engines.profiler import Profiler
from fedclade.engines.reply_validation import (
    EXAMPLES,
    LARGEST,
    UNSUMMABLE,
    out_of_range_segment,
    rejection_reason,
    rows_out_of_range,
    spec_of,
    too_large_to_add,
)
from fedclade.engines.shared_evaluation import evaluate_shared, is_worthwhile
from fedclade.engines.worker_threads import ThreadPool, cores, keep_freed_memory
from fedclade.errors import InvalidInputError, require_int
from fedclade.programs.evaluation import evaluate_metrics, evaluate_outputs

Faults: TypeAlias = Callable[[int, int, Tree], Tree | None]
"""(key, client, reply) -> the reply that arrives, or None if none arrives. For experiments with
absent and malicious clients.
"""
T = TypeVar("T")
R = TypeVar("R")

# The bytes of the weights of a chunk. On the CPU small stacks that stay in the cache are faster
# than large ones (measured with the MLP of 784-200-62: 4 to 10 clients). On CUDA it is a share of
# the device's total memory, not of its free memory, so that runs are reproducible.
_CPU_CHUNK_BYTES = 7 * 2**20
_CUDA_CHUNK_SHARE = 0.1
# The same for the inputs of a batch of all clients of a chunk: activations need several times that.
_CPU_BATCH_BYTES = 64 * 2**20
_CUDA_BATCH_SHARE = 0.02
# With fewer clients the sums of a chunk are larger than its replies.
_CLIENTS_IN_A_CHUNK_SUM = 4
# Larger states of clients are not compared to see whether clients predict with the same model.
_MOST_STATE_COMPARED = 16 * 1024


@dataclass
class Collected:
    """The results of a call of `map` so far.

    Outputs of all clients are in tensors that are allocated once. A small tensor for each chunk,
    between the large ones that come and go, would fragment the memory: with 100,000 clients it grew
    by gigabytes.

    Args:
        is_accepted: (clients,) whether the reply of each client of the call counts.
        total: the sums, if the call has some.
        failures: the clients without a valid reply.
    """

    is_accepted: Tensor
    total: Accumulator | None
    failures: list[Failure] = field(default_factory=list)
    _outputs: Tree | None = None

    def reserve(self, reply: Tree) -> None:
        """Allocate the memory for `add` of replies like this one."""
        if self._outputs is None:
            clients = len(self.is_accepted)
            self._outputs = {
                name: value.new_empty(clients, *value.shape[1:])
                for name, value in self._kept(reply).items()
            }

    def add(self, places: Tensor, reply: Tree) -> None:
        """Add the replies of the clients at these places. `reserve` was called before."""
        assert self._outputs is not None
        for name, value in self._kept(reply).items():
            self._outputs[name][places.to(value.device)] = value
        self.is_accepted[places] = True

    def _kept(self, reply: Tree) -> Tree:
        """The outputs that are not summed."""
        summed = self.total.keys(reply) if self.total is not None else ()
        return {name: value for name, value in reply.items() if name not in summed}

    @property
    def places(self) -> Tensor:
        """The places of the clients that replied, in the call's `ids`."""
        return torch.nonzero(self.is_accepted).flatten()

    @property
    def outputs(self) -> Tree:
        """The outputs of the clients that replied."""
        outputs = self._outputs or {}
        return outputs if self.is_accepted.all() else tree_index(outputs, self.places)


class _ChunkResult(NamedTuple):
    """The replies of a chunk, what it writes to the clients' state, and its sums or None."""

    reply: Tree
    written: Tree | None
    chunk_sum: Accumulator | None


class Simulator:
    """A federation whose clients are all in this process. It runs many clients in one step.

    For a linear model or an MLP, results depend neither on `chunk` nor on `threads`.

    Clients are numbered from 0. Their randomness is derived from the attribute `names`. If these
    clients are a part of a larger federation, `names` has their numbers there.

    Args:
        clients: the clients' data.
        device: "cpu", "cuda" or "auto" (CUDA if there is a CUDA device).
        chunk: how many clients run in one step; None chooses by memory, 1 is the sequential
            reference.
        precision: "tf32" or "float32", the precision of matrix products on CUDA; "bf16" for models
            that compute in bfloat16 (`Objective`), on CUDA or a CPU with instructions for it.
        threads: how many threads run chunks on the CPU; None for one thread for each core that the
            process may use.
        faults: (key, client, reply) -> the reply that arrives, or None if none arrives. For
            experiments with absent and malicious clients.
        profile: whether to time the phases of every call, in the attribute `clock`.
        state_folder: where the clients' state is stored; None for memory.
        longest: the largest parts of the federation to which these clients belong; None if these
            are all.

    Example:
        >>> import fedclade as fc
        >>> clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4)
        >>> fed = fc.Simulator(clients, chunk=2, threads=1)
        >>> len(fed.sizes)
        4
    """

    name = "simulator"
    holds_clients = has_secure_sums = True
    aggregator: Aggregator = "mean"
    server_update = ServerUpdate()

    def __init__(
        self,
        clients: Clients,
        *,
        device: str = "cpu",
        chunk: int | None = None,
        precision: Precision = "tf32",
        threads: int | None = None,
        faults: Faults | None = None,
        profile: bool = False,
        state_folder: Path | None = None,
        longest: Longest | None = None,
    ) -> None:
        for name, value in (("chunk", chunk), ("threads", threads)):
            if value is not None:
                require_int(f"engine.{name}", value, 1)
        self.device = pick_device(device)
        check_precision(precision, self.device)
        self.chunk, self.precision, self.faults = chunk, precision, faults
        self.traffic = Traffic()
        self.client_state = ClientStateStore({}, len(clients))
        self._failures: list[Failure] = []
        self._clients = clients
        self.names = torch.arange(len(clients))
        self.clock = Profiler(self.device, profile)
        self._train, self._test, self._validation = datasets_of(
            clients, self.device, self.clock, longest
        )
        self._state_folder = state_folder
        self._compiled = CompiledSteps()
        self._oom_retry = OomRetry(self.device, self._clear_compiled)
        keep_freed_memory()
        self.workers = ThreadPool((threads or cores()) if self.device.type == "cpu" else 1)
        self._sizes = clients.sizes
        self.begin_round(0)

    @property
    def sizes(self) -> Tensor:
        """(clients,) the number of training examples of each client."""
        return self._sizes

    def client_metadata(self) -> ClientMetadata:
        """The metadata of all clients."""
        return self._metadata

    def refresh_membership(self) -> None:
        """Do nothing: all clients are always present."""

    def begin_round(self, round_number: int) -> None:
        """From now on, every client uses the data that it has in this round."""
        clients, later = self._clients, self._clients.later
        everyone, metadata = torch.arange(len(clients)), clients.metadata
        self._parts_of, self._test_parts_of, self._metadata = (
            everyone,
            clients.test_part_id,
            metadata,
        )
        if later is None:
            return
        changed = later.have_changed(round_number)
        self._parts_of = torch.where(changed, everyone + len(clients), everyone)
        self._test_parts_of = torch.where(changed, later.test_part_id, clients.test_part_id)
        if clients.groups is not None and later.groups is not None:
            groups = torch.where(changed, later.groups, clients.groups)
            self._metadata = replace(metadata, groups=groups)

    def push_final_models(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> None:
        """Do nothing: the clients are in this process."""

    def init_client_state(self, initial: Tree, version: int | None = None) -> None:
        """Give every client this initial state.

        Args:
            initial: the state of one client, as of a method's `initial_client_state`.
            version: the committed version in the state's folder to start from; None for none.
        """
        on_device = {name: value.to(self.device) for name, value in initial.items()}
        self.client_state = ClientStateStore(
            on_device, len(self._sizes), self._state_folder, version
        )

    def pop_failures(self) -> list[Failure]:
        """The clients that did not answer or were rejected since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        broadcast: Tree | None = None,
        per_client: ModelAssignment | None = None,
        key: int,
        reduce: SegmentSum | None = None,
    ) -> ClientResults:
        """Run the program on these clients' training data.

        Args:
            program: the program.
            ids: the clients, each at most once.
            broadcast: a tree that every client receives.
            per_client: the model that each client receives.
            key: the randomness of this call. Two calls in one round need different keys unless
                their programs have different names.
            reduce: sum outputs instead of returning them.
        """
        ids = checked_ids(ids, len(self._sizes))
        collected = self.collect(
            program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=reduce
        )
        self._failures += collected.failures
        return ordered_results(
            ids, [collected.places], [collected.outputs], collected.total, collected.failures
        )

    def collect(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        broadcast: Tree | None,
        per_client: ModelAssignment | None,
        key: int,
        reduce: SegmentSum | None,
    ) -> Collected:
        """Do the work of `map`, and return what other simulators' results can be added to.

        Args:
            program: the program.
            ids: the clients, each at most once.
            broadcast: a tree that every client receives.
            per_client: the model that each client receives.
            key: the randomness of this call.
            reduce: sum outputs instead of returning them.
        """
        assignment = self._on_device(per_client, len(ids)) if per_client is not None else None
        if reduce:
            check_sum(reduce, len(ids))
        shared = {name: value.to(self.device) for name, value in (broadcast or {}).items()}
        self.traffic.down += len(ids) * (nbytes(shared) + _row_bytes(assignment))
        nobody = torch.zeros(len(ids), dtype=torch.bool)
        collected = Collected(nobody, Accumulator(reduce) if reduce else None)

        def load(places: Tensor) -> tuple[Tensor, ClientBatch]:
            rows = assignment[places] if assignment is not None else None
            parts = self._parts_of[ids[places]]
            return places, self._client_batch(self._train, parts, ids[places], rows)

        def compute(loaded: tuple[Tensor, ClientBatch]) -> _ChunkResult:
            places, clients = loaded
            reply, written = run_program(program, clients, shared, key, self._compiled)
            return _ChunkResult(reply, written, self._chunk_sum(reduce, places, reply))

        self._run_chunks(
            _by_size(self._train, self._parts_of[ids]),
            self._width(len(ids), assignment, shared, program, self._train),
            load,
            compute,
            lambda places, result: self._collect(collected, key, ids, places, result),
            parallel=not _uses_numpy(program),
        )
        return collected

    def evaluate(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        requests: Sequence[EvalRequest],
        key: int = 0,
        deliver: Delivery | None = None,
    ) -> list[Tree]:
        """For each request the mean loss and metrics of each client's model on the client's own
        data: tensors of shape (len(ids),), NaN for clients without such data.

        Args:
            assignment: the model of each client.
            ids: the clients, each at most once.
            requests: the evaluations.
            key: the randomness of fine-tuning.
            deliver: without effect: the clients are in this process.
        """
        return [self._evaluate_one(assignment, ids, request, key) for request in requests]

    def _evaluate_one(
        self, assignment: ModelAssignment, ids: Tensor, request: EvalRequest, key: int
    ) -> Tree:
        """Evaluate one request. Clients that predict with the same model on the same test part
        share one evaluation.
        """
        ids = checked_ids(ids, len(self._sizes))
        finetune = request.finetune
        dataset, parts = self._parts(request.split, ids)
        with_data = torch.nonzero(parts >= 0).flatten()
        evaluated = ids[with_data]
        assignment = self._on_device(assignment[with_data], len(with_data))
        personal = bool(assignment.local_params) or finetune is not None
        pairs = torch.stack([self._alike(assignment, evaluated, finetune), parts[with_data]], 1)
        distinct, pair_of = torch.unique(pairs, dim=0, return_inverse=True)
        first = torch.full((len(distinct),), len(with_data), dtype=torch.int64)
        first = first.scatter_reduce_(0, pair_of, torch.arange(len(with_data)), "amin")
        over_outputs = {
            name: metric
            for name, metric in request.metrics.items()
            if isinstance(metric, OutputMetric)
        }
        per_example = {
            name: metric
            for name, metric in request.metrics.items()
            if not isinstance(metric, OutputMetric)
        }
        program = evaluate_metrics(request.model, tuple(per_example.items()))
        outputs_program = evaluate_outputs(request.model, tuple(over_outputs.items()))
        values: dict[str, Tensor] = {}

        def load(places: Tensor) -> tuple[ClientBatch, Tensor]:
            clients = evaluated[first[places]]
            rows = assignment[first[places]]
            batch = self._client_batch(dataset, distinct[places, 1], clients, rows)
            return batch, self._parts_of[clients]

        def compute_shared(places: Tensor) -> Tree:
            return evaluate_shared(
                request.model,
                per_example,
                dataset,
                distinct[places, 1],
                assignment.models,
                distinct[places, 0],
            )

        def compute(loaded: tuple[ClientBatch, Tensor]) -> Tree:
            clients, train_parts = loaded
            params = clients.params
            if finetune is not None:
                training = replace(clients, dataset=self._train, part_ids=train_parts)
                params, _ = run_program(finetune, training, {}, key, self._compiled)
            tested = replace(clients, params=params, client_state={})
            reply: Tree = {}
            if over_outputs:
                reply = run_program(outputs_program, tested, {}, key, self._compiled)[0]
            return reply | run_program(program, tested, {}, key, self._compiled)[0]

        def collect(places: Tensor, reply: Tree) -> None:
            for name, value in reply.items():
                all_values = values.setdefault(
                    name, torch.zeros(len(distinct), dtype=torch.float64)
                )
                all_values[places] = value.cpu()

        order = _by_size(dataset, distinct[:, 1])
        width = self._width(len(distinct), assignment, {}, program, dataset)
        if not personal and not over_outputs and is_worthwhile(self.device, distinct[:, 0]):
            self._run_chunks(order, width, lambda places: places, compute_shared, collect)
        else:
            parallel = all(metric.is_thread_safe for metric in over_outputs.values()) and not (
                finetune is not None and _uses_numpy(finetune)
            )
            self._run_chunks(order, width, load, compute, collect, parallel)
        result: Tree = {}
        for name in ("loss", *request.metrics):
            result[name] = torch.full((len(ids),), torch.nan, dtype=torch.float64)
            if len(with_data):
                value = values[name]
                mean = value if name in over_outputs else value / values["examples"]
                result[name][with_data] = mean[pair_of]
        return result

    def _alike(
        self, assignment: ModelAssignment, ids: Tensor, finetune: AnyProgram | None
    ) -> Tensor:
        """A number for each client; clients with the same number predict with the same model.

        Args:
            assignment: the model of each client.
            ids: the clients.
            finetune: see `EvalRequest`. If it reads no sample, it depends on the model and the
                client's state alone.
        """
        if assignment.local_params or (finetune is not None and _reads_samples(finetune)):
            return ids
        if finetune is None:
            return assignment.model_ids
        if nbytes(self.client_state.initial) > _MOST_STATE_COMPARED:
            return ids
        state = self.client_state.read(ids.to(self.device))
        rows = [
            value.reshape(len(ids), math.prod(value.shape[1:])).double().cpu()
            for value in state.values()
        ]
        together = torch.cat([assignment.model_ids[:, None].double(), *rows], 1)
        numbers: Tensor = torch.unique(together, dim=0, return_inverse=True)[1]
        return numbers

    def _parts(self, split: Split, ids: Tensor) -> tuple[DeviceDataset, Tensor]:
        """The samples of a split, and the part of each client; -1 where it has none."""
        if split == "train":
            return self._train, self._parts_of[ids]
        if split == "test":
            return self._test, self._test_parts_of[ids]
        if self._validation is None:
            return self._train, torch.full_like(ids, -1)
        parts = self._parts_of[ids]
        return self._validation, torch.where(self._validation.sizes[parts] > 0, parts, -1)

    def models_of(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> Tree:
        """The models of these clients, one row for each, with the parameters that are in their
        client state.

        Args:
            assignment: the model of each client.
            ids: the clients.
            finetune: a program that trains a copy of each model first, as in `EvalRequest`.
            key: the randomness of `finetune`.
        """
        assignment = self._on_device(assignment, len(ids))
        if finetune is None or not len(ids):
            return assignment.gather(self.client_state.read(ids.to(self.device)))
        models: list[Tree] = []
        with self.clock.whole("final models"):
            self._run_chunks(
                torch.arange(len(ids)),
                self._width(len(ids), assignment, {}, finetune, self._train),
                lambda places: self._client_batch(
                    self._train, self._parts_of[ids[places]], ids[places], assignment[places]
                ),
                lambda clients: run_program(finetune, clients, {}, key, self._compiled)[0],
                lambda places, params: models.append(params),
                parallel=not _uses_numpy(finetune),
            )
        return concatenate(models)

    def _client_batch(
        self,
        dataset: DeviceDataset,
        part_ids: Tensor,
        clients: Tensor,
        assignment: ModelAssignment | None,
    ) -> ClientBatch:
        with self.clock.phase("models"):
            state = self.client_state.read(clients.to(self.device))
            params = assignment.gather(state) if assignment is not None else {}
        return ClientBatch(dataset, part_ids, self.names[clients], params, state)

    def _run_chunks(
        self,
        order: Tensor,
        width: int,
        load: Callable[[Tensor], T],
        compute: Callable[[T], R],
        collect: Callable[[Tensor, R], None],
        parallel: bool = True,
    ) -> None:
        """Split `order` into chunks; load, compute and collect each.

        If memory runs out in one of the three functions, the chunks that were not collected run
        again with fewer clients. So `collect` must store nothing of a chunk before its last step
        that can fail.

        Args:
            order: the places of the clients.
            width: the number of places in a chunk, while memory suffices.
            load: reads the input of a chunk, in this thread.
            compute: runs a chunk, in a worker thread.
            collect: stores the result of a chunk, in this thread.
            parallel: whether to use worker threads.
        """

        def run(chunks: Sequence[Tensor]) -> Iterator[None]:
            loaded = map(load, chunks)
            results = self.workers.in_order(compute, loaded) if parallel else map(compute, loaded)
            for places in chunks:
                with self.clock.phase("clients"):
                    result = next(results)
                collect(places, result)
                del result  # the next chunk needs the memory
                yield

        with torch_settings(self.device, self.precision):
            for _ in self._oom_retry.run_chunks(run, order, width):
                pass

    def _chunk_sum(
        self, reduce: SegmentSum | None, places: Tensor, reply: Tree
    ) -> Accumulator | None:
        """The sums of a chunk before its replies are checked, or None if they are formed later.

        They are formed here because this is a worker thread, and because on CUDA the check of the
        replies waits for the device. They are formed again if a reply is rejected, which is rare.
        """
        if reduce is None or self.faults is not None or isinstance(reduce.segment_ids, str):
            return None
        if self.device.type == "cpu" and len(places) < _CLIENTS_IN_A_CHUNK_SUM:
            return None
        with self.clock.phase("subtotals"):
            return Accumulator.of_chunk(reduce, places, reply)

    def _collect(
        self, collected: Collected, key: int, ids: Tensor, places: Tensor, result: _ChunkResult
    ) -> None:
        """Check the replies of a chunk, add them up, and store its client state.

        Memory may run out until the chunk is added up. Nothing of it is stored before that, so no
        client counts twice.
        """
        total, (reply, written, chunk_sum) = collected.total, result
        reduce = total.reduce if total is not None else None
        bytes_each = nbytes(reply) // max(1, len(places))
        with self.clock.phase("replies"):
            unsummable = self._unsummable(total, places, len(ids), reply)
            accepted, reply, failures = self._accept(
                key, ids[places], reply, written or {}, reduce, unsummable
            )
        if written is not None:
            self.client_state.reserve(ids[places].to(self.device))
            written = tree_index(written, accepted.to(self.device)) if failures else written
        collected.reserve(reply)
        if total is not None:
            # The last step that can fail.
            with self.clock.phase("sums"):
                if chunk_sum is not None and not failures:
                    total.merge(chunk_sum)
                else:
                    total.add(places[accepted], reply)
        if written is not None and len(accepted):
            self.client_state.write(ids[places][accepted].to(self.device), written)
        collected.add(places[accepted], reply)
        collected.failures.extend(failures)
        # Rejected replies were sent too.
        sent = len(places) - sum(not failure.rejected for failure in failures)
        self.traffic.up += bytes_each * sent

    @staticmethod
    def _unsummable(
        total: Accumulator | None, places: Tensor, clients: int, reply: Tree
    ) -> list[int]:
        """The rows of a chunk that a secure sum cannot hold."""
        if total is None or not total.reduce.min_clients:
            return []
        weights = total.reduce.weights[places].double().cpu().reshape(len(places), -1).amax(1)
        summed = {name: reply[name] for name in total.keys(reply)}
        return too_large_to_add(summed, weights, clients)

    def _accept(
        self,
        key: int,
        ids: Tensor,
        reply: Tree,
        written: Tree,
        reduce: SegmentSum | None,
        unsummable: Sequence[int] = (),
    ) -> tuple[Tensor, Tree, list[Failure]]:
        """The places of the accepted replies, these replies, and the failures of the others."""
        reasons = dict.fromkeys(
            rows_out_of_range(written),
            f"its client state has a number that is not finite or larger than {LARGEST:.0e}",
        )
        reasons |= dict.fromkeys(unsummable, UNSUMMABLE)
        absent: set[int] = set()
        if self.faults is not None:
            reply, fault_reasons, absent = self._apply_faults(self.faults, key, ids, reply)
            reasons |= fault_reasons
        else:
            too_many_examples = (
                (reply[EXAMPLES].cpu() > self._sizes[ids]).nonzero().flatten().tolist()
                if EXAMPLES in reply
                else []
            )
            for place in [*rows_out_of_range(reply), *too_many_examples]:
                row = tree_index(reply, torch.tensor(place))
                reasons[place] = (
                    rejection_reason(row, spec_of(row), int(self._sizes[ids[place]]))
                    or "not finite"
                )
        if reduce is not None and isinstance(reduce.segment_ids, str):
            segments = reply[reduce.segment_ids].flatten().tolist()
            for place, segment in enumerate(segments):
                reason = out_of_range_segment(segment, reduce.num_segments)
                if reason is not None:
                    reasons[place] = reason
                    absent.discard(place)
        if not reasons:
            return torch.arange(len(ids)), reply, []
        failures = [
            Failure(int(ids[place]), reason, rejected=place not in absent)
            for place, reason in reasons.items()
        ]
        accepted = torch.tensor(
            [place for place in range(len(ids)) if place not in reasons], dtype=torch.int64
        )
        return accepted, tree_index(reply, accepted.to(self.device)), failures

    def _apply_faults(
        self, faults: Faults, key: int, ids: Tensor, reply: Tree
    ) -> tuple[Tree, dict[int, str], set[int]]:
        """The replies that arrive, the reason for each place whose reply is not valid, and the
        places of absent clients. A reply that is not valid is replaced by the original one.
        """
        spec = spec_of(tree_index(reply, torch.tensor(0)))
        reasons: dict[int, str] = {}
        absent: set[int] = set()
        rows: list[Tree] = []
        for place, client in enumerate(ids.tolist()):
            original = tree_index(reply, torch.tensor(place))
            arrived = faults(key, client, dict(original))
            if arrived is None:
                absent.add(place)
                reasons[place] = "no answer"
            elif reason := rejection_reason(arrived, spec, int(self._sizes[client])):
                reasons[place] = reason
            rows.append(original if arrived is None or place in reasons else arrived)
        return stack(rows), reasons, absent

    def _clear_compiled(self) -> None:
        self._compiled = CompiledSteps()

    def _width(
        self,
        clients: int,
        assignment: ModelAssignment | None,
        broadcast: Tree,
        program: AnyProgram,
        dataset: DeviceDataset,
    ) -> int:
        """How many clients run in one step, by the bytes of their weights and of their batches."""
        if self.chunk:
            return int(self.chunk)
        # A client trains its row, or a model of the broadcast.
        client_bytes = max(
            _row_bytes(assignment), nbytes(broadcast), nbytes(self.client_state.initial), 16 * 1024
        )
        batch_bytes = max(1, _batch_samples(program, dataset.longest) * dataset.sample_bytes)
        if self.device.type == "cuda":
            total_memory = torch.cuda.get_device_properties(self.device).total_memory
            by_weights = int(total_memory * _CUDA_CHUNK_SHARE) // client_bytes
            return max(1, min(by_weights, int(total_memory * _CUDA_BATCH_SHARE) // batch_bytes))
        largest = max(1, min(_CPU_CHUNK_BYTES // client_bytes, _CPU_BATCH_BYTES // batch_bytes))
        # If possible, every worker gets the same number of chunks.
        rounds = -(-clients // (largest * self.workers.count))
        return max(1, -(-clients // (rounds * self.workers.count))) if clients else 1

    def _on_device(self, assignment: ModelAssignment, clients: int) -> ModelAssignment:
        model_ids = assignment.model_ids.cpu()
        if len(model_ids) != clients:
            raise InvalidInputError(
                f"per_client.model_ids: there are {len(model_ids)} rows for {clients} clients; give"
                " one for each client.",
                "per_client.model_ids",
            )
        stacks = [
            value
            for name, value in assignment.models.items()
            if name not in assignment.local_params
        ]
        models = len(stacks[0]) if stacks else 0
        if clients and models:
            lowest, highest = int(model_ids.min()), int(model_ids.max())
            if lowest < 0 or highest >= models:
                raise InvalidInputError(
                    f"per_client.model_ids = {lowest if lowest < 0 else highest}: must be 0 to"
                    f" {models - 1}. If the group of a client is not known (-1), assign the client"
                    " first (Method.add_clients).",
                    "per_client.model_ids",
                )
        on_device = {name: value.to(self.device) for name, value in assignment.models.items()}
        return ModelAssignment(on_device, model_ids, assignment.local_params)


def _by_size(dataset: DeviceDataset, parts: Tensor) -> Tensor:
    """Places sorted by descending size, then by part, so that the active clients of a chunk are a
    prefix.
    """
    return torch.from_numpy(np.lexsort((parts.numpy(), -dataset.sizes[parts].numpy())))


def _uses_numpy(program: AnyProgram) -> bool:
    """Whether a part of the program runs client by client: programs that use numpy or scikit-learn
    must not run concurrently in worker threads.
    """
    if isinstance(program, ChainedProgram):
        return _uses_numpy(program.first) or _uses_numpy(program.second)
    return not program.vectorized


def _reads_samples(program: AnyProgram) -> bool:
    if isinstance(program, ChainedProgram):
        return _reads_samples(program.first) or _reads_samples(program.second)
    return program.batches.part != "none"


def _batch_samples(program: AnyProgram, longest: int) -> int:
    """The samples of a client in one step; `longest` is the number of samples of the largest."""
    if isinstance(program, ChainedProgram):
        return max(_batch_samples(each, longest) for each in (program.first, program.second))
    return program.batches.group * min(program.batches.size, longest)


def _row_bytes(assignment: ModelAssignment | None) -> int:
    """The bytes of the row that is sent to one client."""
    if assignment is None:
        return 0
    return sum(
        math.prod(value.shape[1:]) * value.element_size()
        for name, value in assignment.models.items()
        if name not in assignment.local_params
    )
