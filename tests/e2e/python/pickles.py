"""Pickles and arrays between this library and Python, from Python's side.

usage: python pickles.py write FOLDER   writes what the tests read
       python pickles.py read FOLDER    reads what the tests wrote, and fails where it is not what it should be
"""
import datetime
import math
import pathlib
import pickle
import sys

import numpy as np

shared = ["seen", "twice"]
VALUES = {
    "primitives": [None, True, False, 0, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**63, -(10**40), 10**40],
    "floats": [0.0, -0.0, 0.1, 1e-320, 1e300, math.inf, -math.inf],
    "texts": ["", "naïve 火箭 \U0001f680", "quote ' \" \\ \n\r\t\0", "x" * 300, "y" * 70000],
    "bytes": [b"", b"\x00\xff", bytes(range(256)), b"z" * 70000],
    "nested": {"list": [[], [[]]], "tuple": ((), (1,), (1, 2, 3, 4)), "set": {1, "a", (2,)}, 7: {b"k": None}, (1, "x"): 0.5},
    "many": {f"key {i}": [i, i * 0.5, str(i)] for i in range(3000)},
    "shared": {"a": shared, "b": shared, "c": [shared, shared]},
    "long": list(range(5000)),
}
SHUT = {
    "date": datetime.datetime(2026, 1, 2),
    "frozen": frozenset({1}),
    "bytearray": bytearray(b"x"),
    "complex": 1 + 2j,
    "array": np.arange(3),
    "record": np.zeros(2, dtype=[("a", "<i4"), ("b", ">f8", (2,))]),
    "objects": np.array([1, "two", None], dtype=object),
    "recarray": np.rec.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "class": pathlib.PurePosixPath("/a"),
    "surrogate": "\ud800",
}
recursive = []
recursive.append(recursive)
SHUT["recursive"] = recursive


def arrays():
    record = np.dtype([("a", [("b", "<f8"), ("c", "<i2", (3,))]), ("s", "S4"), ("d", ">i4")])
    padded = np.dtype([("k", "i1"), ("v", "f8")], align=True)
    titled = np.dtype([(("a title", "name"), "<f4"), ("naïve", "<U3")])
    yield "f4", np.linspace(0, 1, 12, dtype="<f4").reshape(3, 4)
    yield "fortran", np.asfortranarray(np.arange(12, dtype="<i8").reshape(3, 4))
    yield "big", np.arange(6, dtype=">i4").reshape(2, 3)
    yield "bool", np.array([True, False])
    yield "complex", np.array([1 + 2j, 3 - 4j], dtype="<c16")
    yield "half", np.arange(4, dtype="<f2")
    yield "longdouble", np.arange(3, dtype=np.longdouble)
    yield "time", np.array(["2026-01-01", "NaT"], dtype="<M8[ns]")
    yield "span", np.array([1, 2], dtype="<m8[25s]")
    yield "generic", np.array([1, 2], dtype="<m8")
    yield "text", np.array(["naïve", "火箭", ""], dtype="<U5")
    yield "bytes", np.array([b"a", b"bcd"], dtype="S3")
    yield "void", np.array([b"abcd"], dtype="V4")
    yield "zero_d", np.array(3.5)
    yield "empty", np.empty((0, 3), dtype="<u2")
    yield "nothing", np.zeros(3, dtype="S0")
    record_array = np.zeros(3, dtype=record)
    record_array["a"]["c"] = [[1, 2, 3]] * 3
    record_array["s"] = b"ab"
    record_array["d"] = 7
    yield "record", record_array
    padded_array = np.zeros(2, dtype=padded)
    padded_array["v"] = [2.0, 4.0]
    yield "padded", padded_array
    titled_array = np.zeros(2, dtype=titled)
    titled_array["naïve"] = ["火箭", "x"]
    yield "titled", titled_array
    yield "auto", np.array([(1, 2.5)] * 4, dtype=[("", "<i4"), ("", "<f4")])


def same(a, b):
    """Equal, kinds and the signs of zeros included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def main(what, folder):
    folder = pathlib.Path(folder)
    if what == "write":
        for protocol in range(6):
            for name, value in {**VALUES, **SHUT}.items():
                kind = "value" if name in VALUES else "shut"
                (folder / f"{kind}-{name}-{protocol}.pickle").write_bytes(pickle.dumps(value, protocol=protocol))
        for name, array in arrays():
            np.save(folder / f"{name}.npy", array)
        np.savez(folder / "some.npz", **{name: array for name, array in arrays() if name in ("f4", "record")})
        np.savez_compressed(folder / "packed.npz", **{name: array for name, array in arrays() if name in ("f4", "record")})
        return
    seen = 0
    for path in sorted(folder.glob("back-value-*.pickle")):
        value = pickle.loads(path.read_bytes())
        assert same(value, VALUES[path.stem.split("-")[2]]), path
        seen += 1
    assert seen == 6 * len(VALUES), seen
    # A struct that Rust pickled: a dictionary.
    struct = pickle.loads((folder / "struct.pickle").read_bytes())
    assert struct == {"name": "naïve", "weights": [0.5, 1.5], "mode": {"Tiled": (2, 3)}, "plain": "Fast", "none": None}, struct
    for name, array in arrays():
        for suffix in ("npy", "npz"):
            back = np.load(folder / f"back-{name}.{suffix}")
            back = back[name] if suffix == "npz" else back
            assert back.dtype == array.dtype and back.shape == array.shape, (name, back.dtype, array.dtype)
            assert back.dtype.names == array.dtype.names and back.dtype.isalignedstruct in (False, array.dtype.isalignedstruct)
            # Six of the sixteen bytes of a long double are whatever they were.
            assert np.array_equal(back, array) if name == "longdouble" else back.tobytes() == array.tobytes(), name
            assert back.flags.f_contiguous == array.flags.f_contiguous, name
    print("all as it should be")


main(*sys.argv[1:])
