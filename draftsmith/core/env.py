"""The one place that reads the environment and the machine.

torch is imported where it is asked: the processes that tokenize start three times as fast without it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def cache_dir() -> Path:
    """Where converted targets are kept: `DRAFTSMITH_CACHE`, else `~/.cache/draftsmith`."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")


def engines_dir() -> Path:
    """Virtual environment with the serving engines that interop tests start: `DRAFTSMITH_ENGINES`, else `.venv-engines` (`make engines`)."""
    return Path(os.environ.get("DRAFTSMITH_ENGINES") or ".venv-engines")


def api_key() -> str | None:
    """Sent to inference servers as a bearer token: `DRAFTSMITH_API_KEY`."""
    return os.environ.get("DRAFTSMITH_API_KEY") or None


def tokenize_in_one_thread() -> None:
    """For worker processes: their number is the parallelism, and forks of threaded tokenizers may hang."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def chromium() -> str | None:
    """A Chromium that runs without a window: `DRAFTSMITH_CHROMIUM`, else the first on the PATH; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell", "headless_shell")
    return os.environ.get("DRAFTSMITH_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def best_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def fast_dtype(device: str) -> str:
    """The faster of bfloat16 and float32 for matrix products.

    A CPU has fast bfloat16 only with AMX tiles (about 5 x float32); with AVX-512 alone it is slower than float32
    (150 against 230 GFLOP/s on two cores of a Xeon without them).
    """
    import torch

    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks instead of returning them to the kernel: a tenth of a training step was page faults.

    `DRAFTSMITH_MALLOPT=0` leaves the allocator alone; elsewhere than on Linux with glibc nothing happens.
    """
    if os.environ.get("DRAFTSMITH_MALLOPT") == "0" or not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def prefer_grouped_attention(device: str) -> None:
    """On a CPU, let transformers attend to grouped keys as they are, under masks too, instead of repeating them for every query head.

    Repeating copies all keys and values in every layer of every verification pass; on CUDA the setting would leave the fast kernels.
    """
    if device == "cpu":
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")


def dtype_of(name: str, device: str = "cpu") -> torch.dtype:
    """A torch dtype by name; `auto` is the fast one of the device. Raises ValueError for other names."""
    import torch

    name = fast_dtype(device) if name == "auto" else name
    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise ValueError(f"dtype {name!r}: expected auto, {', '.join(known)}")
    return known[name]
