"""Runs probes, each in a process of its own.

Starting torch takes seconds, so one process loads it and forks for every probe. What happens in
the fork stays there: it may hang, print, exit or be killed, and the row says so.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from wngrad.conformance import distributed, probes
from wngrad.conformance.registry import REGISTERED
from wngrad.conformance.subject import load_subject
from wngrad.conformance.verdicts import Failed, NotApplicable, described

assert probes is not distributed  # Importing both has registered all probes.
PROBES = {p.name: p for p in sorted(REGISTERED, key=lambda p: p.distributed)}
Status = Literal["pass", "fail", "not applicable", "not run"]
LARGEST = 64 << 20  # bytes of any file a probe may write, what it prints included


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
        self._process: subprocess.Popen[str] | None = None
        self._child: str = ""  # the number of the process of the probe that is running

    def run(
        self, target: str, kwargs: Mapping[str, Any] | None, probe: str, seconds: float
    ) -> Outcome:
        job = {"target": target, "kwargs": kwargs, "probe": probe, "seconds": seconds}
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**job, "path": sys.path}) + "\n")
        process.stdin.flush()
        self._child = process.stdout.readline()
        reply = process.stdout.readline()
        if not reply:
            self.close()
            return Outcome(probe, "fail", "it killed the process that watches the probe")
        self._child = ""
        return Outcome(probe=probe, **json.loads(reply))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            code = "from wngrad.conformance.runner import serve; serve()"
            alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | alone,  # A process with threads cannot be forked safely.
            )
            atexit.register(self.close)
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        if self._child:
            _stop(int(self._child))
            self._child = ""


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

    torch.set_num_threads(1)
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))  # loads the compiler
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)


def _forked(job: dict[str, Any]) -> dict[str, Any]:  # pragma: no cover
    start = time.monotonic()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            _child(job, writer, output.fileno())
        print(pid, flush=True)
        os.close(writer)
        reply, code = _awaited(pid, reader, start + job["seconds"])
        os.close(reader)
        output.seek(0)
        printed = output.read(500).decode(errors="replace")
    failure = {"status": "fail", "detail": _ended(code, job["seconds"])}
    verdict = json.loads(reply) if reply else failure
    return {**verdict, "printed": printed, "seconds": round(time.monotonic() - start, 2)}


def _awaited(pid: int, reader: int, deadline: float) -> tuple[str, int | None]:  # pragma: no cover
    """The child's answer, or how it ended; None if it had to be stopped."""
    text, code = b"", None
    while not text.endswith(b"\n") and time.monotonic() < deadline:
        if select.select([reader], [], [], 0.1)[0]:
            if not (more := os.read(reader, 65536)):
                break
            text += more
        elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break  # A grandchild may still hold the pipe.
    if not text and time.monotonic() < deadline:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _stop(pid)
    if code is None:
        os.waitpid(pid, 0)
    return text.decode() if text.endswith(b"\n") else "", code


def _stop(pid: int) -> None:
    """The child, and all it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _ended(code: int | None, seconds: float) -> str:
    if code is None:
        return f"hangs: stopped after {seconds:g} s"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended by itself, with exit code {code}"


def _child(job: dict[str, Any], writer: int, output: int) -> NoReturn:  # pragma: no cover
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.path[:] = job["path"]
        answer = judged(job["target"], job["kwargs"], job["probe"])
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, json.dumps(answer).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


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
    return {"status": status, "detail": detail, "usage": usage}
