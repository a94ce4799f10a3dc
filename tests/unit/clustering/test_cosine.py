"""Cosine similarity, against a loop over pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedclade.clustering import cosine as cosine_module
from fedclade.clustering.cosine import cosine
from fedclade.errors import InvalidInputError


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_cosine_is_that_of_each_pair(
    clients: int, parameters: int, seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    updates = torch.randn(
        clients, parameters, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )
    updates *= torch.tensor(
        data.draw(
            st.lists(st.sampled_from([0.0, 1e-30, 1.0, 1e30]), min_size=clients, max_size=clients)
        )
    )[:, None]
    similarity = cosine(updates)
    assert similarity.dtype == torch.float64
    for i, j in np.ndindex(clients, clients):
        a, b = updates[i].double(), updates[j].double()
        norms = float(a.norm() * b.norm())
        expected = 1.0 if i == j else float(a @ b) / norms if norms > 0 else 0.0
        assert float(similarity[i, j]) == pytest.approx(expected, abs=1e-12)
    assert torch.equal(similarity, similarity.T)
    assert bool((similarity.diagonal() == 1).all())
    assert float(similarity.abs().max()) <= 1


def test_cosine_by_chunks_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = torch.randn(5, 103, generator=torch.Generator().manual_seed(0))
    whole = cosine(updates)
    monkeypatch.setattr(cosine_module, "CHUNK_VALUES", 50)  # ten parameters of five clients
    torch.testing.assert_close(cosine(updates), whole, rtol=0, atol=1e-14)
    monkeypatch.setattr(cosine_module, "CHUNK_VALUES", 1)
    torch.testing.assert_close(cosine(updates), whole, rtol=0, atol=1e-14)


def test_cosine_by_hand() -> None:
    updates = torch.tensor([[3.0, 4.0], [4.0, 3.0], [0.0, 0.0], [-3.0, -4.0]])
    expected = [[1, 0.96, 0, -1], [0.96, 1, 0, -0.96], [0, 0, 1, 0], [-1, -0.96, 0, 1]]
    torch.testing.assert_close(cosine(updates), torch.tensor(expected, dtype=torch.float64))


def test_cosine_of_updates_too_small_to_square() -> None:
    tiny = torch.tensor([[3e-200, 4e-200], [4e200, 3e200]], dtype=torch.float64)
    assert float(cosine(tiny)[0, 1]) == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("updates", "field"),
    [
        (torch.zeros(3), "updates.shape"),
        (torch.zeros(0, 3), "updates.shape"),
        (torch.tensor([[1.0, float("nan")]]), "updates"),
        (torch.tensor([[float("inf")]]), "updates"),
    ],
)
def test_cosine_refuses(updates: Tensor, field: str) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        cosine(updates)
