"""Mapped files are the arrays that NumPy reads, and keep no file open."""

import gc
import os

import numpy as np
import pytest

from dlrm.mapped_files import map_file, map_npy

PAIR = np.dtype([("key", "<u8"), ("flag", "?")])
NUMBERS = np.random.default_rng(0).integers(0, 255, 90_000, np.uint8)


@pytest.fixture
def path(tmp_path):
    NUMBERS.tofile(tmp_path / "numbers")
    return tmp_path / "numbers"


def mappings(path):
    with open("/proc/self/maps") as maps:
        return sum(str(path) in line for line in maps)


@pytest.mark.parametrize("offset", [0, 4, 4096, 4100, 89_982])
@pytest.mark.parametrize("dtype", ["u1", "<f2", "<i4", PAIR])
def test_values_are_those_that_numpy_reads(path, offset, dtype):
    rows = (90_000 - offset) // np.dtype(dtype).itemsize
    expected = np.fromfile(path, dtype, rows, offset=offset)
    found = map_file(path, dtype, (rows,), offset)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
    assert type(found) is np.ndarray
    assert not found.flags.writeable


def test_shapes(path, tmp_path):
    np.testing.assert_array_equal(map_file(path, "u1"), NUMBERS)
    np.testing.assert_array_equal(map_file(path, "u1", (30, 3), 4), NUMBERS[4:94].reshape(30, 3))
    (tmp_path / "empty").touch()
    assert map_file(tmp_path / "empty", "<i4").shape == (0,)
    assert map_file(tmp_path / "empty", "<i4", (0, 7)).shape == (0, 7)
    assert map_file(path, "<f2", (5, 0), 3).shape == (5, 0)


def test_wrong_sizes_and_missing_files_are_named(path):
    with pytest.raises(ValueError, match=r"numbers: expected 90001 bytes, got 90000"):
        map_file(path, "u1", (90_001,))
    with pytest.raises(ValueError, match=r"numbers: expected a multiple of 9 bytes, got 89999"):
        map_file(path, PAIR, offset=1)
    with pytest.raises(FileNotFoundError, match="no such numbers"):
        map_file(path.with_name("no such numbers"), "u1")
    with pytest.raises(IsADirectoryError, match=str(path.parent)):
        map_file(path.parent, "u1")


def test_an_unmappable_file_is_named():
    with pytest.raises(ValueError, match="/proc/self/status: expected 10 bytes, got 0"):
        map_file("/proc/self/status", "u1", (10,))
    size = os.stat("/sys/kernel/mm/transparent_hugepage/enabled").st_size
    with pytest.raises(OSError, match="No such device.*transparent_hugepage"):
        map_file("/sys/kernel/mm/transparent_hugepage/enabled", "u1", (size,))


def test_a_map_needs_no_descriptor_and_ends_with_its_last_view(path):
    before = len(os.listdir("/proc/self/fd"))
    arrays = [map_file(path, "u1") for _ in range(20)]
    np.save(path.with_suffix(".npy"), NUMBERS)
    arrays += [map_npy(path.with_suffix(".npy")) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert mappings(path) == 40
    views = [array[1000:].view("<i4")[::2] for array in arrays]
    del arrays
    gc.collect()
    assert mappings(path) == 40
    np.testing.assert_array_equal(views[0], NUMBERS[1000:].view("<i4")[::2])
    del views
    gc.collect()
    assert mappings(path) == 0


def test_a_private_array_can_be_changed_and_the_file_stays(path):
    array = map_file(path, "<i4", (10, 2), 40, private=True)
    array[:] = 7
    assert array.sum() == 140
    np.testing.assert_array_equal(map_file(path, "u1"), NUMBERS)


def test_a_replaced_file_stays_mapped_as_it_was(path):
    array = map_file(path, "u1")
    other = path.with_name("other")
    np.zeros(9, np.uint8).tofile(other)
    other.replace(path)
    np.testing.assert_array_equal(array, NUMBERS)
    assert map_file(path, "u1").tolist() == [0] * 9


@pytest.mark.parametrize(
    "array",
    [
        np.arange(7, dtype=np.uint32),
        np.empty(0, np.uint64),
        np.float64(3.5),
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
        np.zeros(3, PAIR),
    ],
)
def test_arrays_of_numpy(tmp_path, array):
    np.save(tmp_path / "array.npy", array)
    found, expected = map_npy(tmp_path / "array.npy"), np.load(tmp_path / "array.npy")
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_other_files_are_no_arrays(tmp_path):
    path = tmp_path / "array.npy"
    np.save(path, np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"array.npy: not an array of numbers \(got object"):
        map_npy(path)
    np.save(path, np.arange(4))
    content = path.read_bytes()
    for other in (
        b"",
        b"nothing",
        content[:40],
        content.replace(b"(4,)", b"(-4)"),
        content.replace(b"Y\1", b"Y\2"),
    ):
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"array.npy: not an array of numbers"):
            map_npy(path)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"array.npy: expected 160 bytes, got 159"):
        map_npy(path)
