"""Records of fixed size: exact bytes, exact values back, and nothing undeclared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hkd_hpc import payload
from hkd_hpc.common.errors import UsageError
from hkd_hpc.state.client_state import pack, unpack

SHAPES = {"count_C": (10,), "feature_CD": (10, 64), "soft_CC": (10, 10)}


def record():
    return np.zeros(1, payload.record_type({"train_s": (), "loss": (3,)}, {"client": (), "counters": (2,)}, SHAPES))


def test_bytes_by_hand():
    """(1 + 2) int64, (1 + 3) float64, (10 + 640 + 100) float32: 56 + 3,000 bytes, no padding."""
    assert record().dtype.itemsize == 3056
    assert record().dtype["tensors"].itemsize == 3000
    assert payload.as_bytes(np.repeat(record(), 4)).shape == (12224,)


def test_tensors_come_back_bit_for_bit():
    records, random = np.repeat(record(), 2), np.random.default_rng(0)
    given = {name: torch.from_numpy(random.standard_normal(shape).astype(np.float32)) for name, shape in SHAPES.items()}
    payload.fill(records[1], given)
    travelled = payload.as_bytes(records).copy().view(records.dtype)
    one, stacked = payload.tensors_of(travelled[1]), payload.tensors_of(travelled)
    for name, tensor in given.items():
        assert one[name].dtype == torch.float32
        assert torch.equal(one[name], tensor)
        assert stacked[name].shape == (2, *SHAPES[name])
        assert torch.equal(stacked[name][1], tensor)
        assert not stacked[name][0].any()


@pytest.mark.parametrize(
    "sizes, nbytes",
    [([600_000_000], "2,400,000,008"), ([300_000_000] * 2, "2,400,000,008"), ([536_870_910], "2,147,483,648")],
)
def test_a_record_that_numpy_cannot_count_is_rejected_before_it_is_made(sizes, nbytes):
    """Two tensors of 1.2 GB make a record of -1,894,967,296 bytes there."""
    shapes = {f"tensor{number}": (size,) for number, size in enumerate(sizes)}
    told = f"has {nbytes} bytes, the most in 'tensor0', and at most 2,147,483,647 can travel"
    with pytest.raises(UsageError, match=told):
        payload.record_type({}, {"client": ()}, shapes)
    assert payload.record_type({}, {"client": ()}, {"tensor": (536_870_909,)}).itemsize == 2_147_483_644


def test_bytes_share_memory_with_the_records():
    records = record()
    payload.as_bytes(records)[:8] = np.array([5], "<i8").view(np.uint8)
    assert records[0]["client"] == 5


def test_nothing_undeclared_travels():
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(KeyError, match="count_C"):
        payload.fill(record()[0], {"feature_CD": given["feature_CD"]})
    with pytest.raises(KeyError, match="extra"):
        payload.fill(record()[0], given | {"extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"soft_CC: declared shape \(10, 10\), given \(10, 1\)"):
        payload.fill(record()[0], given | {"soft_CC": torch.zeros(10, 1)})


def test_scheme_without_tensors():
    records = np.zeros(3, payload.record_type({}, {"client": ()}, {}))
    payload.fill(records[0], {})
    assert payload.tensors_of(records) == {}
    assert records.dtype.itemsize == 8
    with pytest.raises(KeyError):
        payload.fill(records[0], {"count_C": torch.zeros(10)})


def test_a_clients_state_is_no_record_and_comes_back_with_what_it_held():
    """3 + (6 + 2 + 1) float32 = 48 bytes; numpy's records would end at 2 GiB, and a model may be larger."""
    shapes = {"memory": (2, 3), "absent": (2,), "scale": ()}
    memory = torch.arange(6.0).reshape(2, 3) / 7
    block = pack(shapes, {"memory": memory, "scale": np.float32(0.5)})
    assert (block.dtype, block.shape) == (np.uint8, (48,))
    state = unpack(shapes, block)
    assert list(state) == ["memory", "scale"]
    assert state["scale"] == 0.5
    assert state["scale"].shape == ()
    assert state["memory"].dtype == np.float32
    assert np.array_equal(state["memory"], memory.numpy())
    block[:] = 0
    assert state["memory"][0, 1] == np.float32(1 / 7)
