"""The shared library of `native/`: finding and loading it, its table of kernels, its errors, its huge-page memory."""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch  # first: the library then binds to torch's own OpenMP, one thread pool for both
from torch import Tensor

from minipaged.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY = Path(__file__).resolve().parents[2] / "_native" / "libminipaged.so"
BUILD_LOG = LIBRARY.with_name("build_error.txt")  # what a build that failed printed (tools/build_backend.py)

_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "the native back end could not allocate its scratch memory"),
    2: (IndexError, "a block table entry that a sequence needs is outside the block pool"),
    3: (IndexError, "a position is outside the rotary table; raise max_model_len"),
    4: (IndexError, "a token id is outside the vocabulary"),
    5: (
        ValueError,
        "seq_lens and query_start_loc contradict each other: starts begin at 0 and rise, and no row has more queries "
        "than tokens",
    ),
}


def check(code: int) -> None:
    """Raise the exception that belongs to a kernel's return code; 0 is success."""
    if code:
        kind, message = _ERRORS[code]
        raise kind(message)


_Kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


class KernelTable(ctypes.Structure):
    """`mp_kernels` of native/api.h: one entry per kernel, each takes a pointer to its argument struct."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("pack", _Kernel),
        ("embed", _Kernel),
        ("linear", _Kernel),
        ("rms_norm", _Kernel),
        ("rope_write", _Kernel),
        ("attention", _Kernel),
        ("read_probe", _Kernel),
        ("peak_probe", _Kernel),
        ("nothing", _Kernel),
    )


def unavailable_reason(device: torch.device | str) -> str | None:
    """None if this back end runs here, else why not (for the registry)."""
    try:
        load_library()
    except BackendUnavailableError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The shared library. Raises BackendUnavailableError if it was not built or does not load."""
    if not LIBRARY.exists():
        raise BackendUnavailableError(
            f"the native library was not built ({LIBRARY.name} is missing): install with a C++ compiler present, "
            "or run tools/build_native.py in a checkout; `minipaged doctor` shows what went wrong"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise BackendUnavailableError(f"the native CPU library does not load: {error}") from error
    library.mp_find.restype = ctypes.POINTER(KernelTable)
    library.mp_find.argtypes = [ctypes.c_char_p]
    library.mp_isa.restype = ctypes.c_char_p
    library.mp_isa.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    library.mp_allocate.restype = ctypes.c_void_p
    library.mp_allocate.argtypes = [ctypes.c_size_t]
    library.mp_release.restype = None
    library.mp_release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mp_packed_bytes.restype = ctypes.c_int64
    library.mp_packed_bytes.argtypes = [ctypes.c_char_p]
    return library


def instruction_sets() -> dict[str, bool]:
    """Every instruction set that the library was built for, fastest first, and whether this machine runs it."""
    library, runs = load_library(), ctypes.c_int()
    found: dict[str, bool] = {}
    while (name := library.mp_isa(len(found), ctypes.byref(runs))) is not None:
        found[name.decode()] = bool(runs.value)
    return found


def huge_page_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor on a 2 MiB boundary, on huge pages if the system has them; memory is taken as it is touched."""
    nbytes = max(prod(shape), 1) * dtype.itemsize
    library = load_library()
    address = library.mp_allocate(nbytes)
    if not address:
        raise MemoryError(f"could not map {nbytes} bytes")
    owner = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(owner, library.mp_release, address, nbytes).atexit = False
    return torch.frombuffer(owner, dtype=dtype)[: prod(shape)].view(tuple(shape))
