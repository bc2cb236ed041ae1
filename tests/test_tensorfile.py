"""Safetensors files and folders of them, against the safetensors library and against bytes written by hand."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_dirs import write_index, write_safetensors

from duomesh.core.arrays import DTYPES, dtype_name
from duomesh.core.errors import TensorFileError
from duomesh.core.tensordir import TensorDirectory
from duomesh.core.tensorfile import TensorFile, TensorFileWriter, header_capacity, write_tensor_file

RNG = np.random.default_rng(5)


def one_of_each() -> dict[str, Any]:
    out = {name: RNG.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in DTYPES.items()}
    return {**out, "scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float16)}


def raw_file(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(offsets: list[int], dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [offsets[1] - offsets[0]] if shape is None else shape, "data_offsets": offsets}


def test_every_dtype_survives_and_the_library_reads_the_same(tmp_path: Path) -> None:
    import safetensors

    tensors = one_of_each()
    write_tensor_file(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert set(file.names) == set(tensors)
        for name, want in tensors.items():
            got = file.read(name)
            assert (file.info(name).dtype, file.info(name).shape) == (dtype_name(want.dtype), want.shape)
            assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes()), name
    import torch

    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as library:
        assert set(library.keys()) == set(tensors)
        for name, want in tensors.items():
            got = library.get_tensor(name)
            assert str(got.dtype) == f"torch.{dtype_name(want.dtype)}"
            assert got.flatten().view(torch.uint8).numpy().tobytes() == want.tobytes(), name


def test_arrays_of_the_other_byte_order_are_written_in_the_files_order(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    write_tensor_file(tmp_path / "a", {"x": array})
    with TensorFile(tmp_path / "a") as file:
        assert np.array_equal(file.read("x"), array)


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    import safetensors.numpy as library

    tensors = {name: a for name, a in one_of_each().items() if "bfloat" not in name and "float8" not in name}
    library.save_file(tensors, tmp_path / "a.safetensors", {"note": "x"})
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert all(file.read(name).tobytes() == want.tobytes() for name, want in tensors.items())


@pytest.mark.parametrize(
    "box",
    [
        [],
        [(0, 7)],
        [(2, 5)],
        [(6, 7)],
        [(3, 3)],
        [(0, 7), (1, 3)],
        [(1, 6), (0, 3), (1, 2)],
        [(2, 4), (1, 2), (0, 2)],
        [(4, 5), (2, 2)],
    ],
)
def test_a_rectangle_is_read_alone(tmp_path: Path, box: list[tuple[int, int]]) -> None:
    """Rows or columns; no byte between them is read."""
    array = RNG.standard_normal((7, 3, 2)).astype(DTYPES["bfloat16"])
    write_tensor_file(tmp_path / "a", {"x": array, "y": array[::-1]})
    with TensorFile(tmp_path / "a") as file:
        index = tuple(slice(*run) for run in box)
        before = file.num_bytes_read
        assert file.read("x", box).tobytes() == array[index].tobytes()
        assert file.num_bytes_read == before + array[index].nbytes
        assert file.read("y", box).tobytes() == array[::-1][index].tobytes()


@pytest.mark.parametrize("box", [[(-1, 2)], [(3, 2)], [(0, 8)], [(0, 7), (0, 3)], [(0, 7), (0, 2), (0, 1)]])
def test_a_rectangle_outside_is_refused(tmp_path: Path, box: list[tuple[int, int]]) -> None:
    write_tensor_file(tmp_path / "a", {"x": np.zeros((7, 2))})
    with TensorFile(tmp_path / "a") as file, pytest.raises(TensorFileError, match="not within x"):
        file.read("x", box)


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    array = np.arange(64 * 1024, dtype=np.int32).reshape(1024, 64)
    write_tensor_file(tmp_path / "a", {"x": array})
    with TensorFile(tmp_path / "a") as file, ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda i: file.read("x", [(i, i + 1)]), range(1024)))
    assert np.array_equal(np.concatenate(parts), array)


def test_c008_views_are_written_as_their_own_bytes(tmp_path: Path) -> None:
    """Slices of one buffer and a transposed view become tensors of their own; the same tensor twice is an alias."""
    buffer = RNG.standard_normal(6000).astype(np.float32)
    w1, w2 = buffer[:2000].reshape(40, 50), buffer[4000:].reshape(40, 50)
    w3 = buffer[2000:4000].reshape(20, 100).T
    tensors = {"w1": w1, "w2": w2, "w3": w3, "w4": w1}
    logical = 3 * 2000 * 4
    for aliases, size in (("record", logical), ("copy", logical + 2000 * 4)):
        path = tmp_path / aliases
        write_tensor_file(path, tensors, aliases=aliases)
        with TensorFile(path) as file:
            for name, want in tensors.items():
                assert np.array_equal(file.read(name), want), name
        assert size <= path.stat().st_size <= size * 1.02
    # the first rows of a buffer are not the buffer
    write_tensor_file(tmp_path / "rows", {"whole": w1, "rows": w1[:20]})
    with TensorFile(tmp_path / "rows") as file:
        assert file.info("rows").shape == (20, 50)


def test_streamed_tensors_are_aligned_whatever_their_order(tmp_path: Path) -> None:
    tensors = {"a": np.ones(3, np.uint8), "b": np.ones(3, np.float32), "c": np.ones((3, 3), DTYPES["bfloat16"])}
    tensors |= {"d": np.arange(5, dtype=np.float64), "e": np.ones(16, np.float32), "f": np.array(7, np.int16)}
    writer = TensorFileWriter(tmp_path / "a", header_capacity(tensors))
    for name, array in tensors.items():
        writer.add(name, array)
    writer.close()
    data = (tmp_path / "a").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name, array in tensors.items():
        assert header[name]["data_offsets"][0] % array.dtype.itemsize == 0, name
    with TensorFile(tmp_path / "a") as file:
        assert all(file.read(name).tobytes() == array.tobytes() for name, array in tensors.items())


GOOD = {"x": entry([0, 4])}
MALFORMED = {
    "empty file": (b"", "0 bytes"),
    "shorter than a length": (b"\x01\x02", "2 bytes"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "absurd header length": (raw_file(GOOD, b"abcd", length=2**40), "no safetensors file"),
    "header beyond the end": (raw_file(GOOD, b"", length=5000), "truncated"),
    "not JSON": (raw_file(b"{x", b""), "malformed"),
    "not UTF-8": (raw_file(b'{"\xff": 1}', b""), "malformed"),
    "not an object": (raw_file([1], b""), "not a JSON object"),
    "a key twice": (raw_file(b'{"x": 1, "x": 2}', b""), "'x' occurs twice"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}, b""), "__metadata__"),
    "entry without shape": (raw_file({"x": {"dtype": "U8", "data_offsets": [0, 1]}}, b"a"), "x lacks"),
    "unknown dtype": (raw_file({"x": entry([0, 4], "F4")}, b"abcd"), "x has dtype 'F4'"),
    "negative shape": (raw_file({"x": entry([0, 4], shape=[-4])}, b"abcd"), "they must be sizes"),
    "three offsets": (raw_file({"x": {**entry([0, 4]), "data_offsets": [0, 2, 4]}}, b"abcd"), "they must be sizes"),
    "size unlike shape": (raw_file({"x": entry([0, 4], "F32", [2])}, b"abcd"), "x occupies 4 bytes"),
    "offsets backwards": (raw_file({"x": entry([4, 0], shape=[4])}, b"abcd"), "x occupies -4 bytes"),
    "overlap": (raw_file({"x": entry([0, 4]), "y": entry([2, 6])}, b"abcdef"), "y starts at byte 2 and overlaps"),
    "gap": (raw_file({"x": entry([0, 2]), "y": entry([4, 6])}, b"abcdef"), "y starts at byte 4 and leaves a gap"),
    "data cut short": (raw_file({"x": entry([0, 8])}, b"abcd"), "truncated"),
    "bytes left over": (raw_file(GOOD, b"abcdef"), "2 bytes that belong to no tensor"),
    "alias of nothing": (raw_file({"__metadata__": {"duomesh.alias/y": "z"}, **GOOD}, b"abcd"), "alias"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_at_opening(tmp_path: Path, case: str) -> None:
    data, message = MALFORMED[case]
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(TensorFileError, match=message) as caught:
        TensorFile(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)


def test_a_missing_file_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match=r"nothing\.safetensors"):
        TensorFile(tmp_path / "nothing.safetensors")
    write_tensor_file(tmp_path / "a", {"x": np.zeros(3)})
    with TensorFile(tmp_path / "a") as file, pytest.raises(TensorFileError, match="no tensor 'y'"):
        file.read("y")


def folder(path: Path, **files: dict[str, float]) -> Path:
    """A folder whose tensors hold one number each."""
    for stem, values in files.items():
        write_safetensors(path / f"{stem}.safetensors", {n: np.full(2, v, np.float32) for n, v in values.items()})
    return path


def value(directory: TensorDirectory, name: str) -> float:
    return float(directory.read(name, [(1, 2)])[0])


def test_c009_every_missing_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    folder(tmp_path, one={"a": 1})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"})
    with pytest.raises(TensorFileError, match=r"three\.safetensors, two\.safetensors"):
        TensorDirectory(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(TensorFileError, match=r"one\.safetensors, three\.safetensors, two\.safetensors"):
        TensorDirectory(tmp_path)


def test_c011_the_index_alone_decides_and_ignored_copies_are_listed(tmp_path: Path) -> None:
    folder(tmp_path, one={"a": 1, "b": 2}, two={"c": 3, "a": 9}, model={"a": 7, "b": 7, "c": 7}, extra={"z": 0})
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    with TensorDirectory(tmp_path) as directory:
        assert [value(directory, name) for name in "abc"] == [1, 2, 3]
        assert set(directory.names) == set("abc")
        found = "\n".join(directory.warnings)
    assert "ignored copies in model.safetensors: the index takes a, b, c" in found
    assert "ignored copies in two.safetensors: the index takes a" in found
    assert "extra.safetensors that the index does not list: z" in found
    assert "one.safetensors" not in found


def test_c011_an_overlay_file_counts_where_the_index_says_so(tmp_path: Path) -> None:
    folder(tmp_path, base={"a": 1, "b": 2}, overlay={"a": 5})
    write_index(tmp_path, {"a": "overlay.safetensors", "b": "base.safetensors"})
    with TensorDirectory(tmp_path) as directory:
        assert [value(directory, name) for name in "ab"] == [5, 2]
        assert directory.warnings == ["ignored copies in base.safetensors: the index takes a from another file."]


def test_c011_without_an_index_files_add_up_and_duplicates_are_an_error(tmp_path: Path) -> None:
    folder(tmp_path, one={"a": 1}, two={"b": 2})
    with TensorDirectory(tmp_path) as directory:
        assert [value(directory, name) for name in "ab"] == [1, 2]
        assert directory.warnings == []
    folder(tmp_path, three={"b": 2})
    with pytest.raises(TensorFileError, match=r"b \(in three\.safetensors and two\.safetensors\)"):
        TensorDirectory(tmp_path)


def test_an_index_that_lists_what_a_file_lacks_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, one={"a": 1})
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(TensorFileError, match=r"b \(in one\.safetensors\)"):
        TensorDirectory(tmp_path)


@pytest.mark.parametrize("file", ["../one.safetensors", "/etc/one.safetensors", "one.bin", 3])
def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path, file: Any) -> None:
    folder(tmp_path, one={"a": 1})
    write_index(tmp_path, {"a": file})
    with pytest.raises(TensorFileError, match="no safetensors file below it"):
        TensorDirectory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    folder(tmp_path, one={"a": 1})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(TensorFileError, match=r"index\.json"):
        TensorDirectory(tmp_path)


def test_folders_without_safetensors_are_refused_and_pickles_never_opened(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match=r"holds no \*\.safetensors"):
        TensorDirectory(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(TensorFileError, match=r"pytorch_model\.bin.*never opened"):
        TensorDirectory(tmp_path)
    with pytest.raises(TensorFileError, match="does not exist"):
        TensorDirectory(tmp_path / "nowhere")
    with pytest.raises(TensorFileError, match="is a file"):
        TensorDirectory(tmp_path / "pytorch_model.bin")
