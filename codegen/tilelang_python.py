"""The Python that has TileLang, what its TileLang is, and a pool of lowering processes in it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from pydantic import TypeAdapter

from codegen.cache import Store, digest_text, digest_tree
from codegen.errors import LoweringError
from codegen.lowered import Lowered, Request

LOWERED: TypeAdapter[Lowered] = TypeAdapter(Lowered)
VARIABLE = "PEGAINFER_GEMMA4_TILELANG_PYTHON"
PACKAGE = Path(__file__).parent
PROBE = (
    "import importlib.metadata, importlib.util, json; spec = importlib.util.find_spec('tilelang'); "
    "print(json.dumps([importlib.metadata.version('tilelang'), spec.origin] if spec else None))"
)


@dataclass(frozen=True)
class TileLang:
    """An installed TileLang: the interpreter that has it, its version and its package directory."""

    python: Path
    version: str
    root: Path

    @property
    def includes(self) -> tuple[Path, Path]:
        """The include directories that lowered kernels compile with, in the JIT's order."""
        return self.root / "src", self.root / "3rdparty" / "cutlass" / "include"

    @property
    def digest(self) -> str:
        """Changes when any file of the package does."""
        return digest_text(self.version, digest_tree(self.root))


def find() -> TileLang:
    """TileLang in the Python that PEGAINFER_GEMMA4_TILELANG_PYTHON names, or in this one. Imports nothing of it."""
    named = os.environ.get(VARIABLE)
    python = Path(named or sys.executable)
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    except OSError as error:
        raise LoweringError(
            f"{VARIABLE} names {python}, which cannot be run ({error.strerror}). Name a Python interpreter that has TileLang."
        ) from error
    try:
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except json.JSONDecodeError:
        found = None
    if not found or not found[1]:
        raise LoweringError(
            f"{python} has no TileLang. Install it there (pip install tilelang), name a Python that has it in {VARIABLE}, or "
            "build from emitted sources with --from DIR."
        )
    return TileLang(python, found[0], Path(found[1]).parent)


class Worker:
    """One lowering process: `python -m codegen.lowering` in TileLang's Python."""

    def __init__(self, tilelang: TileLang) -> None:
        path = os.pathsep.join(part for part in (str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")) if part)
        # A file: nobody reads while the process works, and a full pipe would stop it.
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [tilelang.python, "-m", "codegen.lowering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def lower(self, request: Request) -> Lowered:
        """Lowers one kernel. Raises LoweringError with TileLang's reason."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(asdict(request)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            tail = "\n".join(self._stderr.read().splitlines()[-15:])
            raise LoweringError(
                f"{request.name}: the lowering process died (exit code {self._process.returncode}):\n{tail}\n"
                f"Run `python -m codegen doctor` to see whether TileLang imports."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise LoweringError(f"{request.name}: {answer['error']}")
        return LOWERED.validate_python(answer["lowered"])

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
        self._stderr.close()


def lower_all(
    tilelang: TileLang, requests: Sequence[Request], store: Store | None, jobs: int, done: Callable[[str], None]
) -> list[Lowered]:
    """Lowers kernels in up to `jobs` processes, taking from `store` what it holds. `done(name)` reports each."""
    sources = [digest_tree(PACKAGE / name) for name in ("kernels", "lowering.py", "lowered.py", "status.py")]
    environment = digest_text(tilelang.digest, *sources)
    idle: SimpleQueue[Worker] = SimpleQueue()
    workers: list[Worker] = []

    def one(request: Request) -> Lowered:
        key = digest_text(environment, json.dumps(asdict(request), sort_keys=True))
        found = store.find("lowered", key) if store else None
        if found:
            lowered = LOWERED.validate_json((found / "lowered.json").read_bytes())
        else:
            try:
                worker = idle.get_nowait()
            except Empty:
                worker = Worker(tilelang)
                workers.append(worker)
            lowered = worker.lower(request)
            idle.put(worker)
            if store:
                with contextlib.suppress(OSError):  # a cache that cannot be written is none
                    store.add("lowered", key, {"lowered.json": LOWERED.dump_json(lowered)})
        done(request.name)
        return lowered

    try:
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            return list(pool.map(one, requests))
    finally:
        for worker in workers:
            worker.close()
