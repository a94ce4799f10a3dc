"""What a node lets the server do. The server may be hostile; the policy is on the node's disk."""

from __future__ import annotations

import fcntl
import json
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fedclade.core.program import AnyProgram, ChainedProgram
from fedclade.errors import FedcladeError, require, require_int
from fedclade.io import atomic

_SIGNATURE_MODULES = (
    "programs.class_prior.class_statistics",
    "programs.data_subspace.",
    "programs.encoder_signature.",
    "programs.error_rates.",
    "programs.gradient_signature.",
    "programs.latent_descriptor.",
    "programs.own_offset.mean_features",
    "programs.pca_centroid_signature.",
)
_NO_SIGNATURE = "programs.encoder_signature.autoencode"  # training, whose weights are no signature
# Programs that send a choice, losses or nothing.
_NO_MODEL = (
    "programs.class_prior.keep_class_offset",
    "programs.evaluation.evaluate_losses",
    "programs.model_selection.choose",
)


class RefusedError(FedcladeError):
    """A message that a node refuses. Its text has nothing of the node's data, so it may be sent."""


@dataclass(frozen=True)
class NodePolicy:
    """The limits that a node sets to the server. Without a limit of its own, a node has these.

    Args:
        apps: the SHA-256 hashes of the Flower apps that the node runs; empty for the app on the
            node's own disk only.
        methods: the methods that the node takes part in; empty for all.
        max_epochs: the most passes over a client's data in one message.
        max_seconds: the most seconds of computation for one message.
        max_looks: the most looks at the node's data: messages that train, and evaluations. All runs
            count together; 0 for no limit.
        max_signatures: the most messages that ask for signatures; 0 for no limit.
        max_disk_mib: the most MiB of client state and final models on the node's disk.
        min_noise: the least standard deviation of the noise in signatures, in units of the
            sensitivity; above 0, signatures without noise are refused.
        trusted_keys: the public keys (Ed25519) of all nodes, as 64 hexadecimal digits, for secure
            sums; empty to trust the keys that the server sends first.
        min_group: the least number of clients in a secure sum; above 0, nothing of a program leaves
            the node except in such sums, but for signatures, losses and the choice of a model. 0:
            the server decides.
    """

    apps: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    max_epochs: int = 1000
    max_seconds: float = 24 * 3600.0
    max_looks: int = 0
    max_signatures: int = 0
    max_disk_mib: int = 10 * 1024
    min_noise: float = 0.0
    trusted_keys: tuple[str, ...] = ()
    min_group: int = 0

    def __post_init__(self) -> None:
        for app in self.apps:
            is_hash = len(app) == 64 and set(app) <= set("0123456789abcdef")
            require(is_hash, "policy.apps", app, "must be 64 digits of a SHA-256 hash")
        for key in self.trusted_keys:
            is_key = len(key) == 64 and set(key) <= set("0123456789abcdef")
            require(is_key, "policy.trusted_keys", key, "must be 64 digits of a public key")
        require_int("policy.max_epochs", self.max_epochs, 1)
        require_int("policy.max_disk_mib", self.max_disk_mib, 1)
        require_int("policy.max_looks", self.max_looks, 0, note="0 for no limit")
        require_int("policy.max_signatures", self.max_signatures, 0, note="0 for no limit")
        require_int("policy.min_group", self.min_group, 0, note="0: the server decides")
        require(
            0 < self.max_seconds < 1e9, "policy.max_seconds", self.max_seconds, "must be above 0"
        )
        require(
            0 <= self.min_noise < math.inf, "policy.min_noise", self.min_noise, "must be at least 0"
        )

    def check_method(self, method: str) -> None:
        """Refuse a method that the node does not take part in."""
        if self.methods and method not in self.methods:
            raise RefusedError(
                f"method.name = {method!r}: this node takes part in"
                f" {', '.join(self.methods)} only (policy.methods).",
                "policy.methods",
            )

    def check_program(self, program: AnyProgram, longest: int) -> None:
        """Refuse a program that reads the data more often than the node allows.

        Args:
            program: the program.
            longest: the most training samples of a client of the node.
        """
        passes = _passes(program, longest)
        if passes > self.max_epochs:
            raise RefusedError(
                f"program '{program.name}': {passes:g} passes over the data; this node allows"
                f" {self.max_epochs} (policy.max_epochs).",
                "policy.max_epochs",
            )

    def check_noise(self, description: object) -> bool:
        """Refuse signatures with too little noise. Returns whether the program, or a program in its
        arguments, sends a signature.

        Args:
            description: the program as in `core.program_serialization`.
        """
        if isinstance(description, Mapping):
            own, inner = self._check_signature(description), list(description.values())
        else:
            own, inner = False, description if isinstance(description, list) else []
        found = [self.check_noise(value) for value in inner]
        return own or any(found)

    def check_in_clear(self, description: Mapping[Any, Any], is_empty: bool = False) -> None:
        """Refuse to send outputs of a program that are not in a secure sum.

        Args:
            description: the program as in `core.program_serialization`.
            is_empty: whether all its outputs are in a secure sum.
        """
        name = str(description.get("make", ""))
        is_known = name.startswith(_SIGNATURE_MODULES) and name != _NO_SIGNATURE
        if self.min_group and not (is_empty or is_known or name in _NO_MODEL):
            raise RefusedError(
                f"program '{name}': this node sends its outputs in secure sums only"
                " (policy.min_group). Set privacy.secure_sum = true.",
                "policy.min_group",
            )

    def check_group(self, min_clients: object) -> None:
        """Refuse a secure sum that may have too few clients.

        Args:
            min_clients: the least number of clients that the server allows.
        """
        if not (isinstance(min_clients, int) and min_clients >= self.min_group):
            raise RefusedError(
                f"privacy.min_group = {min_clients!r}: this node wants at least {self.min_group}"
                " clients in a sum (policy.min_group).",
                "policy.min_group",
            )

    def _check_signature(self, description: Mapping[Any, Any]) -> bool:
        name = str(description.get("make", ""))
        if not name.startswith(_SIGNATURE_MODULES) or name == _NO_SIGNATURE:
            return False
        arguments = description.get("with")
        noise = arguments.get("noise", 0.0) if isinstance(arguments, Mapping) else 0.0
        # Also false for nan.
        if self.min_noise and not (
            isinstance(noise, int | float) and self.min_noise <= noise < math.inf
        ):
            raise RefusedError(
                f"program '{name}': its noise is below that of this node, {self.min_noise:g}"
                " (policy.min_noise). Set a smaller method.signature_epsilon.",
                "policy.min_noise",
            )
        return True


NO_LIMITS = NodePolicy()


class LookCounter:
    """Counts the looks at a node's data, over all runs.

    Args:
        path: the file of the counts; None to count in memory. Whoever removes the file starts again
            at 0.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._counts = {"looks": 0, "signatures": 0}

    def add(self, policy: NodePolicy, looks: int, signatures: int) -> None:
        """Count these looks before they happen, or refuse them.

        Args:
            policy: the limits.
            looks: the number of looks.
            signatures: the number of signatures among them.
        """
        with self._locked():
            self._add(policy, looks, signatures)

    def _add(self, policy: NodePolicy, looks: int, signatures: int) -> None:
        counts = self._read()
        after = {
            "looks": counts["looks"] + looks,
            "signatures": counts["signatures"] + signatures,
        }
        limits = {"looks": policy.max_looks, "signatures": policy.max_signatures}
        for name, limit in limits.items():
            if limit and after[name] > limit and after[name] > counts[name]:
                raise RefusedError(
                    f"policy.max_{name} = {limit}: the server has had {counts[name]} {name} at this"
                    " node, over all runs.",
                    f"policy.max_{name}",
                )
        self._counts = after
        if self.path is not None:
            atomic.write_text(self.path, json.dumps(after))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A context in which no other process of this node counts."""
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.path.with_name(f"{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            yield

    def _read(self) -> dict[str, int]:
        if self.path is None:
            return self._counts
        if not self.path.exists():
            return {"looks": 0, "signatures": 0}
        try:
            counts = json.loads(self.path.read_text())
            return {name: int(counts[name]) for name in ("looks", "signatures")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FedcladeError(
                f"{self.path}: cannot be read ({error}). Remove it to count from 0.", str(self.path)
            ) from error


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context that ends with `RefusedError` after this time. Threads other than the main one have
    no limit: only the main thread gets signals.

    Args:
        seconds: the seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise RefusedError(
            f"policy.max_seconds = {seconds:g}: the computation takes longer than this node"
            " allows.",
            "policy.max_seconds",
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _passes(program: AnyProgram, longest: int) -> float:
    """How often a client's data are read."""
    if isinstance(program, ChainedProgram):
        return _passes(program.first, longest) + _passes(program.second, longest)
    batches = program.batches
    steps_of_a_pass = max(1, -(-longest // (min(batches.size, longest or 1) * batches.group)))
    return max(batches.epochs, batches.num_steps / steps_of_a_pass)
