"""The simulator: many clients at a time, in one process, on one CPU or GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedclade.core.federation import Aggregator, ClientResults, Failure, ModelAssignment, SegmentSum
from fedclade.core.program import AnyProgram, ChainedProgram
from fedclade.core.pytree import Tree, concatenate, nbytes, stack, tree_index
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import EvalRequest, Traffic
from fedclade.engines.client_loop import ClientBatch, CompiledSteps, run_program
from fedclade.engines.client_state import ClientStateStore
from fedclade.engines.device_dataset import DeviceDataset
from fedclade.engines.oom import OomRetry
from fedclade.engines.profiler import Profiler
from fedclade.engines.reply_validation import (
    EXAMPLES,
    NO_ANSWER,
    Accumulator,
    check_sum,
    in_order_asked,
    rejection_reason,
    rows_out_of_range,
    spec_of,
)
from fedclade.engines.thread_pool import ThreadPool, cores, keep_freed_memory
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.programs.evaluation import evaluate_metrics

Precision: TypeAlias = Literal["tf32", "float32"]
Faults: TypeAlias = Callable[[int, int, Tree], Tree | None]
"""(key, client, reply) -> the reply that arrives, or None where none does: to study absence and
poison.
"""

# What the weights of a chunk may take. On the CPU small stacks that stay in the cache beat large
# ones (measured with the MLP of 784-200-62: 4 to 10 clients); on CUDA a part of the device's
# memory, whatever is free on it just now, so that runs repeat.
_CPU_CHUNK_BYTES = 7 * 2**20
_CUDA_CHUNK_SHARE = 0.1


class Simulator:
    """A federation whose clients all live here.

    chunk: so many clients run in one step; `chunk=1` is the sequential reference. workers: threads
    that run chunks on the CPU, by default one for each core that the process may use. Neither
    changes a result of a linear model or an MLP. profile: time the phases of every call (`clock`).

    Clients are numbered from 0. `names` are the numbers from which their randomness is made: others
    where they are part of a larger federation.
    """

    name = "simulator"
    holds_clients = True
    aggregator: Aggregator = "mean"

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
    ) -> None:
        for name, value in (("chunk", chunk), ("threads", threads)):
            if value is not None:
                require_int(f"engine.{name}", value, 1)
        require(
            precision in ("tf32", "float32"),
            "engine.precision",
            precision,
            "must be 'tf32' or 'float32'",
        )
        self.device = pick_device(device)
        self.chunk, self.precision, self.faults = chunk, precision, faults
        self.traffic = Traffic()
        self.client_state = ClientStateStore({}, len(clients))
        self._failures: list[Failure] = []
        self._clients = clients
        self.names = torch.arange(len(clients))
        self.clock = Profiler(self.device, profile)
        self._train = DeviceDataset(clients.x, clients.y, clients.train, self.device, self.clock)
        self._test = DeviceDataset(
            clients.x_test, clients.y_test, clients.test, self.device, self.clock
        )
        self._runs = CompiledSteps()
        self._room = OomRetry(self.device, self._forget_runs)
        keep_freed_memory()
        self.workers = ThreadPool((threads or cores()) if self.device.type == "cpu" else 1)
        self._sizes = clients.sizes

    @property
    def sizes(self) -> Tensor:
        return self._sizes

    def client_metadata(self) -> ClientMetadata:
        return self._population

    @cached_property
    def _population(self) -> ClientMetadata:
        return ClientMetadata.of(self._clients)

    def refresh_membership(self) -> None:
        """All clients are here, always."""

    def push_final_models(
        self, rows: ModelAssignment, ids: Tensor, tune: AnyProgram | None = None, key: int = 0
    ) -> None:
        """The clients live here: what they are served is theirs."""

    def init_client_state(self, initial: Tree) -> None:
        """Give every client this memory to start from (a method's `memory0`)."""
        self.client_state = ClientStateStore(
            {name: value.to(self.device) for name, value in initial.items()}, len(self._sizes)
        )

    def models_of(
        self, rows: ModelAssignment, ids: Tensor, tune: AnyProgram | None = None, key: int = 0
    ) -> Tree:
        """The models themselves, a row for each of these clients, what is in their memory included;
        `tune` as in `Look`.
        """
        here = self._on_device(rows, len(ids))
        assert here is not None
        if tune is None or not len(ids):
            return here.gather(self.client_state.read(ids.to(self.device)))

        def run(chunks: Sequence[Tensor]) -> Iterator[Tree]:
            for place in chunks:
                client = ids[place]
                memory = self.client_state.read(client.to(self.device))
                lanes = ClientBatch(
                    self._train, client, self.names[client], here[place].gather(memory), memory
                )
                yield run_program(tune, lanes, {}, key, self._runs)[0]

        with self._settings():
            found = list(
                self._room.run_chunks(run, torch.arange(len(ids)), self._width(len(ids), here, {}))
            )
        return concatenate([params for _, params in found])

    def pop_failures(self) -> list[Failure]:
        """Who did not answer or was refused since this was last asked."""
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
        ids = self._checked(ids)
        per_client = self._on_device(per_client, len(ids))
        if reduce:
            check_sum(reduce, len(ids))
        total = Accumulator(reduce) if reduce else None
        broadcast = {name: value.to(self.device) for name, value in (broadcast or {}).items()}
        self.traffic.down += len(ids) * (nbytes(broadcast) + _row_bytes(per_client))

        kept: list[Tree] = []
        places: list[Tensor] = []
        failures: list[Failure] = []

        def lanes(chunks: Sequence[Tensor]) -> Iterator[ClientBatch]:
            for place in chunks:
                with self.clock.phase("models"):
                    client = ids[place]
                    memory = self.client_state.read(client.to(self.device))
                    params = per_client[place].gather(memory) if per_client else {}
                yield ClientBatch(self._train, client, self.names[client], params, memory)

        def work(lanes: ClientBatch) -> tuple[Tree, Tree | None]:
            return run_program(program, lanes, broadcast, key, self._runs)

        def run(chunks: Sequence[Tensor]) -> Iterator[None]:
            nonlocal total
            results = (
                map(work, lanes(chunks))
                if _uses_numpy(program)
                else self.workers.in_order(work, lanes(chunks))
            )
            for place in chunks:
                with self.clock.phase("clients"):
                    reply, written = next(results)
                # Memory may run out up to where a chunk is added up, and it is run again: nothing
                # is kept of it before.
                one = nbytes(reply) // max(1, len(place))
                # To look at replies is to wait for the device. Sums of all that was asked are
                # queued before; refusals are rare.
                trusting = total.copy() if total and self._queues(reduce) else None
                if trusting:
                    with self.clock.phase("sums"):
                        trusting.add(place, reply)
                with self.clock.phase("replies"):
                    good, reply, reasons = self._accept(
                        key, ids[place], reply, written or {}, reduce
                    )
                if written is not None:
                    self.client_state.make_room(ids[place].to(self.device))
                    written = tree_index(written, good.to(self.device)) if reasons else written
                # Last of what may fail: on the CPU sums are made in place.
                if total and (not trusting or reasons):
                    with self.clock.phase("sums"):
                        trusting = total.copy()
                        trusting.add(place[good], reply)
                if total and trusting:
                    total = trusting
                    added = total.keys(reply)
                    reply = {name: value for name, value in reply.items() if name not in added}
                if written is not None and len(good):
                    self.client_state.write(ids[place][good].to(self.device), written)
                failures.extend(reasons)
                # What was refused had been sent all the same.
                self.traffic.up += one * (
                    len(place) - sum(failure.reason == NO_ANSWER for failure in reasons)
                )
                kept.append(reply)
                places.append(place[good])
                del reply, written  # the next chunk needs the memory
                yield

        with self._settings():
            for _ in self._room.run_chunks(
                run, _by_size(self._train, ids), self._width(len(ids), per_client, broadcast)
            ):
                pass
        self._failures += failures
        return in_order_asked(ids, places, kept, total, failures)

    def evaluate(
        self, rows: ModelAssignment, ids: Tensor, looks: Sequence[EvalRequest], key: int = 0
    ) -> list[Tree]:
        return [self.measure(rows, ids, look, key) for look in looks]

    def measure(self, rows: ModelAssignment, ids: Tensor, look: EvalRequest, key: int = 0) -> Tree:
        """One look. Clients with one model and one test part are evaluated once."""
        part, tune, metrics = look.split, look.finetune, look.metrics
        ids = self._checked(ids)
        pool = self._train if part == "train" else self._test
        parts = ids if part == "train" else self._clients.test_part_id[ids]
        who = torch.nonzero(parts >= 0).flatten()
        rows, asked = rows[who], ids[who]
        alone = bool(rows.local_params) or tune is not None
        pairs = torch.stack([asked if alone else rows.model_ids.cpu(), parts[who]], 1)
        distinct, pair_of = torch.unique(pairs, dim=0, return_inverse=True)
        first = torch.full((len(distinct),), len(who), dtype=torch.int64)
        first = first.scatter_reduce_(0, pair_of, torch.arange(len(who)), "amin")

        device_rows = self._on_device(rows, len(who))
        assert device_rows is not None
        program = evaluate_metrics(look.model, tuple(metrics.items()))
        sums: dict[str, Tensor] = {}

        def lanes(chunks: Sequence[Tensor]) -> Iterator[tuple[ClientBatch, Tensor]]:
            for place in chunks:
                client = asked[first[place]]
                memory = self.client_state.read(client.to(self.device))
                yield (
                    ClientBatch(
                        pool,
                        distinct[place, 1],
                        self.names[client],
                        device_rows[first[place]].gather(memory),
                        memory,
                    ),
                    client,
                )

        def work(chunk: tuple[ClientBatch, Tensor]) -> Tree:
            lanes, client = chunk
            params = lanes.params
            if tune is not None:
                params, _ = run_program(
                    tune, replace(lanes, pool=self._train, part=client), {}, key, self._runs
                )
            return run_program(
                program, replace(lanes, params=params, memory={}), {}, key, self._runs
            )[0]

        def run(chunks: Sequence[Tensor]) -> Iterator[Tree]:
            return self.workers.in_order(work, lanes(chunks))

        with self._settings():
            width = self._width(len(distinct), device_rows, {})
            for place, reply in self._room.run_chunks(run, _by_size(pool, distinct[:, 1]), width):
                for name, value in reply.items():
                    sums.setdefault(name, torch.zeros(len(distinct), dtype=torch.float64))[
                        place
                    ] = value.cpu()
        result: Tree = {}
        for name in ("loss", *metrics):
            result[name] = torch.full((len(ids),), torch.nan, dtype=torch.float64)
            if len(who):
                result[name][who] = (sums[name] / sums["examples"])[pair_of]
        return result

    def _queues(self, reduce: SegmentSum | None) -> bool:
        return (
            self.device.type == "cuda"
            and self.faults is None
            and reduce is not None
            and not isinstance(reduce.segment_ids, str)
        )

    def _accept(
        self, key: int, ids: Tensor, reply: Tree, written: Tree, reduce: SegmentSum | None
    ) -> tuple[Tensor, Tree, list[Failure]]:
        """Places of the replies that are taken, those replies, and why the others are not."""
        reasons = dict.fromkeys(
            rows_out_of_range(written), "its memory is not finite, or absurdly large"
        )
        if self.faults is not None:
            reply, refused = self._tampered(key, ids, reply)
            reasons |= refused
        else:
            claims = (
                (reply[EXAMPLES].cpu() > self._sizes[ids]).nonzero().flatten().tolist()
                if EXAMPLES in reply
                else []
            )
            for place in [*rows_out_of_range(reply), *claims]:
                row = tree_index(reply, torch.tensor(place))
                reasons[place] = (
                    rejection_reason(row, spec_of(row), int(self._sizes[ids[place]]))
                    or "not finite"
                )
        if reduce is not None and isinstance(reduce.segment_ids, str):
            claimed = reply[reduce.segment_ids].flatten().tolist()
            reasons |= {
                place: f"chose row {row} of {reduce.num_segments}"
                for place, row in enumerate(claimed)
                if not 0 <= row < reduce.num_segments
            }
        if not reasons:
            return torch.arange(len(ids)), reply, []
        failures = [
            Failure(int(ids[place]), reason, reason != NO_ANSWER)
            for place, reason in reasons.items()
        ]
        taken = torch.tensor(
            [place for place in range(len(ids)) if place not in reasons], dtype=torch.int64
        )
        return taken, tree_index(reply, taken.to(self.device)), failures

    def _tampered(self, key: int, ids: Tensor, reply: Tree) -> tuple[Tree, dict[int, str]]:
        assert self.faults is not None
        spec = spec_of(tree_index(reply, torch.tensor(0)))
        reasons: dict[int, str] = {}
        rows: list[Tree] = []
        for place, client in enumerate(ids.tolist()):
            honest = tree_index(reply, torch.tensor(place))
            arrived = self.faults(key, client, dict(honest))
            reason = (
                NO_ANSWER
                if arrived is None
                else rejection_reason(arrived, spec, int(self._sizes[client]))
            )
            if reason is not None:
                reasons[place] = reason
            rows.append(honest if arrived is None or reason is not None else arrived)
        return stack(rows), reasons

    def _forget_runs(self) -> None:
        self._runs = CompiledSteps()

    def _width(self, clients: int, each: ModelAssignment | None, broadcast: Tree) -> int:
        """How many clients run at a time."""
        if self.chunk:
            return int(self.chunk)
        # What a lane trains: its row, or what it picks from what is sent to all.
        lane = max(
            _row_bytes(each), nbytes(broadcast), nbytes(self.client_state.initial), 16 * 1024
        )
        if self.device.type == "cuda":
            return max(
                1,
                int(torch.cuda.get_device_properties(self.device).total_memory * _CUDA_CHUNK_SHARE)
                // lane,
            )
        most = max(1, _CPU_CHUNK_BYTES // lane)
        # As many chunks for every worker, as far as clients go round.
        rounds = -(-clients // (most * self.workers.count))
        return max(1, -(-clients // (rounds * self.workers.count))) if clients else 1

    def _checked(self, ids: Tensor) -> Tensor:
        ids = torch.as_tensor(ids, dtype=torch.int64).cpu()
        asked = ids.tolist()
        if asked and not 0 <= min(asked) <= max(asked) < len(self._sizes):
            raise InvalidInputError(
                f"clients are numbered 0 to {len(self._sizes) - 1}; asked for {min(asked)} to"
                f" {max(asked)}."
            )
        if len(set(asked)) != len(asked):
            raise InvalidInputError("a client was asked twice in one call: ids must be distinct.")
        return ids

    def _on_device(self, each: ModelAssignment | None, count: int) -> ModelAssignment | None:
        if each is None:
            return None
        if len(each.model_ids) != count:
            raise InvalidInputError(f"each: {len(each.model_ids)} rows for {count} clients.")
        shared_rows = [
            value for name, value in each.models.items() if name not in each.local_params
        ]
        rows = len(shared_rows[0]) if shared_rows else 0
        if count and rows and (int(each.model_ids.min()) < 0 or int(each.model_ids.max()) >= rows):
            wrong = (
                int(each.model_ids.min())
                if int(each.model_ids.min()) < 0
                else int(each.model_ids.max())
            )
            raise InvalidInputError(
                f"each: row {wrong} of {rows} models; a client whose group is not known (-1) must"
                " be admitted first."
            )
        models = {name: value.to(self.device) for name, value in each.models.items()}
        return ModelAssignment(models, each.model_ids.cpu(), each.local_params)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Threads and arithmetic for the time of a call; the caller's own are put back."""
        threads, precision, cudnn = (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn,
        )
        before = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            fast = self.precision == "tf32"
            torch.set_float32_matmul_precision("high" if fast else "highest")
            # No choice of kernel by timing: it would make two runs differ.
            cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = fast, True, False
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
            cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def pick_device(device: str) -> torch.device:
    """`auto` takes CUDA where there is one."""
    device = str(device)  # a torch.device will do
    require(
        device in ("auto", "cpu", "cuda") or device.startswith("cuda:"),
        "device",
        device,
        "must be 'auto', 'cpu' or 'cuda'",
    )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInputError(
            "device = 'cuda': this torch sees no CUDA device; use device = 'cpu' or 'auto'."
        )
    return torch.device(device)


def _by_size(pool: DeviceDataset, parts: Tensor) -> Tensor:
    """Places by falling size, so that in a chunk those with steps left are a prefix, then by id.

    The order is the same for every chunk size, which keeps sums the same to the bit.
    """
    return torch.from_numpy(np.lexsort((parts.numpy(), -pool.sizes[parts].numpy())))


def _uses_numpy(program: AnyProgram) -> bool:
    """Whether any part of it runs client by client: numpy's and scikit-learn's threads are no
    business of several workers at once.
    """
    if isinstance(program, ChainedProgram):
        return _uses_numpy(program.first) or _uses_numpy(program.second)
    return not program.vectorised


def _row_bytes(each: ModelAssignment | None) -> int:
    """Bytes of the row that one client is sent."""
    if each is None:
        return 0
    return sum(
        math.prod(value.shape[1:]) * value.element_size()
        for name, value in each.models.items()
        if name not in each.local_params
    )
