"""Runs probes, each in a process of its own.

Starting torch takes seconds, so one process loads it and forks for every probe. What happens in
the fork stays there: it may hang, print, exit or be killed, and the row says so.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from wngrad.conformance import distributed, probes, processes
from wngrad.conformance.registry import REGISTERED
from wngrad.conformance.subject import load_subject
from wngrad.conformance.verdicts import Failed, NotApplicable, described

assert probes is not distributed  # Importing both has registered all probes.
PROBES = {p.name: p for p in sorted(REGISTERED, key=lambda p: p.distributed)}
Status = Literal["pass", "fail", "not applicable", "not run"]
LARGEST = 64 << 20  # bytes of any file a probe may write, what it prints included
MEMORY = 4 << 30  # bytes that each process of a probe may take beyond what torch has taken
LOADING = 600.0  # seconds for the process that loads torch
SERVE = "from wngrad.conformance.runner import serve; serve()"
MARGIN = 60.0  # seconds beyond a probe's own for its process to be stopped and the result told


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one probe says about one optimizer."""

    probe: str
    status: Status
    detail: str = ""  # why it failed or does not apply, or what was measured
    usage: str = ""  # how the optimizer was made and called
    printed: str = ""
    seconds: float = 0.0


# ------------------------------------------------------------------ in the caller's process


class Warm:
    """A process that has loaded torch and forks once for each probe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._child = 0  # the number of the process of the probe that is running
        self._rest = b""  # what was read beyond a line
        atexit.register(self.close)

    def run(
        self,
        target: str,
        kwargs: Mapping[str, Any] | None,
        probe: str,
        seconds: float,
        margin: float = MARGIN,
    ) -> Outcome:
        job = {"target": target, "kwargs": kwargs, "probe": probe, "seconds": seconds}
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps({**job, "path": sys.path}).encode() + b"\n")
        process.stdin.flush()
        reply = None
        if pid := self._line(LOADING):
            self._child = int(pid)
            reply = self._line(seconds + margin)
        if not reply:
            self.close()
            how = "killed" if reply == b"" else "stopped"
            return Outcome(probe, "fail", f"it {how} the process that watches the probe")
        self._child = 0
        return Outcome(probe=probe, **json.loads(reply))

    def _line(self, seconds: float) -> bytes | None:
        """What the process says next; nothing if it is gone, None if it has not said a word."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe, until = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            if not (more := os.read(pipe, 65536)):
                return b""
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it has been killed since the last probe
        if self._process is None:
            alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._rest = b""
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | alone,  # A process with threads cannot be forked safely.
            )
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        # One that has ended has no descendants, and another may have its number by now.
        alive = process is not None and process.poll() is None
        left = processes.descendants(process.pid) if process is not None and alive else []
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()
        for pid in (*left, *([self._child] if self._child else [])):
            processes.stop(pid)
        self._child = 0


WARM = Warm()


def run_probes(
    target: str,
    kwargs: Mapping[str, Any] | None = None,
    names: Iterable[str] | None = None,
    timeout: float | None = None,
    warm: Warm = WARM,
) -> Iterator[Outcome]:
    """Each probe's outcome, as it comes; if it cannot be made, nothing else is asked."""
    made = True
    for name in PROBES if names is None else names:
        if not made:
            yield Outcome(name, "not run")
            continue
        outcome = warm.run(target, kwargs, name, timeout or PROBES[name].seconds)
        made = name != "made" or outcome.status == "pass"
        yield outcome


# --------------------------------------------------------------------- in the warm process


def serve() -> None:  # pragma: no cover
    """Reads jobs from stdin, a line each; answers with a child's number, then with its result."""
    import torch

    processes.adopt_orphans()
    torch.set_num_threads(1)
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))  # loads the compiler
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)


def _forked(job: dict[str, Any]) -> dict[str, Any]:  # pragma: no cover
    start = time.monotonic()
    reader, writer = os.pipe()
    sign = secrets.token_hex(16)  # by which the answer is told from what a probe writes there
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _child(job, writer, output.fileno(), sign)
        print(pid, flush=True)
        os.close(writer)
        reply, code = _awaited(pid, reader, start + job["seconds"], sign.encode())
        os.close(reader)
        output.seek(0)
        printed = output.read(500).decode(errors="replace")
    failure = {"status": "fail", "detail": _ended(code, job["seconds"])}
    verdict = json.loads(reply) if reply else failure
    return {**verdict, "printed": printed, "seconds": round(time.monotonic() - start, 2)}


def _awaited(
    pid: int, reader: int, deadline: float, sign: bytes
) -> tuple[bytes, int | None]:  # pragma: no cover
    """The child's answer, or how it ended; None if it had to be stopped."""
    text, code, reply = b"", None, None
    while reply is None and len(text) < LARGEST and time.monotonic() < deadline:
        if select.select([reader], [], [], 0.1)[0]:
            if not (more := os.read(reader, 65536)):
                break
            text += more
            reply = re.search(sign + rb"(.*)\n", text)
        elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break  # A grandchild may still hold the pipe.
    if reply is None and time.monotonic() < deadline and len(text) < LARGEST:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    processes.stop(pid)
    processes.stop_children()
    return reply[1] if reply else b"", code


def _ended(code: int | None, seconds: float) -> str:
    if code is None:
        return f"hangs: stopped after {seconds:g} s"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended by itself, with exit code {code}"


def _child(
    job: dict[str, Any], writer: int, output: int, sign: str
) -> NoReturn:  # pragma: no cover
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_taken() + MEMORY,) * 2)
        sys.path[:] = job["path"]
        answer = judged(job["target"], job["kwargs"], job["probe"])
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, f"\n{sign}{json.dumps(answer)}\n".encode())
        code = 0
    finally:
        os._exit(code)


def _taken() -> int:
    """Bytes of memory that this process may write to, as far as /proc tells."""
    status = Path("/proc/self/status")
    known = re.search(r"VmData:\s*(\d+) kB", status.read_text()) if status.is_file() else None
    return int(known[1]) << 10 if known else MEMORY


def judged(target: str, kwargs: Mapping[str, Any] | None, name: str) -> dict[str, str]:
    """The verdict of a probe, in this process."""
    usage = ""
    status: Status = "pass"
    try:
        subject = load_subject(target, kwargs)
        usage = subject.usage()
        if name in subject.exempt:
            raise NotApplicable(subject.exempt[name])
        detail = PROBES[name].ask(subject) or ""
    except NotApplicable as reason:
        status, detail = "not applicable", str(reason)
    except Failed as reason:
        status, detail = "fail", str(reason)
    except BaseException as error:
        status, detail = "fail", described(error)
    return {"status": status, "detail": _encodable(detail), "usage": _encodable(usage)}


def _encodable(text: str) -> str:
    """With a code in the place of lone surrogates, which no file can hold."""
    return text.encode(errors="backslashreplace").decode()
