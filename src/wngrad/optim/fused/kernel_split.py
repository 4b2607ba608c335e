"""The second kernel of a fused step on CUDA, for rows that are cut between programs or shared.

`kernel.step_tiles` has left sums of squares, and moves by the coefficients that are found here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wngrad.optim.fused.kernel_rule import (
    MU,
    RUNNING_MEAN,
    SETTINGS,
    STAYS,
    C,
    coefficients,
    lam_of,
    next_b,
    real,
    words,
)
from wngrad.optim.fused.records import TRITON_MEMBER, TRITON_RUN, TRITON_SHARED

S_ROWS, S_RUN, S_RUNS, *_ = words(TRITON_SHARED, "rows", "run", "runs")
S_MEMBER, S_MEMBERS, S_GROUP, *_ = words(TRITON_SHARED, "member", "members", "group")
S_HOLD, S_PROGRAM, S_WORDS = words(TRITON_SHARED, "hold", "first_program")
R_SUMS, R_COUNT, R_WORDS = words(TRITON_RUN, "sums", "count")
M_B, M_T, M_SKIPPED, M_NORM, *_ = words(TRITON_MEMBER, "b", "t", "skipped", "norm")
M_ROOM, M_PRESENT, M_WORDS = words(TRITON_MEMBER, "room", "present")


@triton.jit
def find_b(
    tiles,
    shared,
    runs,
    members,
    conf,
    parts,
    coefs,
    found,
    bad,
    METHOD: tl.constexpr,
    SKIP: tl.constexpr,
    LATCH: tl.constexpr,
    RATED: tl.constexpr,
    RELATIVE: tl.constexpr,
    FOUND: tl.constexpr,
    CHECK: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """b of rows whose sums of squares lie in `parts`, for all parameters that share it.

    With CHECK nothing is changed: `bad` gets the number of rows that are not finite.
    """
    pid = tl.program_id(0)
    i = tl.load(tiles + pid).to(tl.int64)
    f = shared + i * S_WORDS
    row = (pid - tl.load(f + S_PROGRAM)) * R + tl.arange(0, R).to(tl.int64)
    there = row < tl.load(f + S_ROWS)
    sq = _summed(f, runs, parts, row, there, R, WIDTH)
    old = _shared_b(f, members, row, there, R, WIDTH)
    conf += tl.load(f + S_GROUP) * SETTINGS
    lam = lam_of(conf, found, FOUND)
    c, hold = real(tl.load(conf + C)), tl.load(f + S_HOLD) != 0
    new, finite = next_b(old, sq, lam, c, hold, LATCH, RATED)
    live = there & (tl.where(there, lam, 0.0) != 0)  # none of them if λ = 0
    if CHECK:
        tl.store(bad + pid, tl.sum((live & (finite == 0)).to(tl.int32)))
        return
    skips = live & (finite == 0)
    if SKIP:
        live = live & finite
    stored = live
    if LATCH:
        live = live & (new != 0)
    rows = (row, there, live, stored, skips)
    mu = real(tl.load(conf + MU))
    _store_members(f, members, coefs, rows, new, lam, mu, METHOD, SKIP, RELATIVE, WIDTH)


@triton.jit
def _summed(f, runs, parts, row, there, R: tl.constexpr, WIDTH: tl.constexpr):
    """‖g‖² of rows, from the sums of their pieces."""
    span = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    sq = tl.zeros([R], tl.float64)
    run, ends = tl.load(f + S_RUN), tl.load(f + S_RUN) + tl.load(f + S_RUNS)
    for k in range(run, ends):
        base, count = tl.load(runs + R_WORDS * k + R_SUMS), tl.load(runs + R_WORDS * k + R_COUNT)
        for j in range(0, count, WIDTH):
            inside = there[:, None] & (j + span < count)
            spots = parts + base + row[:, None] * count + j + span
            sq += tl.sum(tl.load(spots, mask=inside, other=0.0), axis=1)
    return sq


@triton.jit
def _shared_b(f, members, row, there, R: tl.constexpr, WIDTH: tl.constexpr):
    """The b that rows start from: b never decreases, so the largest of all is the latest."""
    span = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    first, count = tl.load(f + S_MEMBER), tl.load(f + S_MEMBERS)
    old, lost = tl.zeros([R], tl.float32), tl.zeros([R], tl.int32)
    for j in range(0, count, WIDTH):
        m = members + (first + j + span) * M_WORDS
        inside = there[:, None] & (j + span < count)
        bs = tl.load(m + M_B, mask=j + span < count, other=0).to(tl.pointer_type(tl.float32))
        theirs = tl.load(bs + row[:, None], mask=inside, other=0.0)
        old = tl.maximum(old, tl.max(tl.where(theirs == theirs, theirs, 0.0), axis=1))
        lost = tl.maximum(lost, tl.max((theirs != theirs).to(tl.int32), axis=1))
    return tl.where(lost != 0, float("nan"), old)


@triton.jit
def _store_members(
    f, members, coefs, rows, new, lam, mu,
    METHOD: tl.constexpr, SKIP: tl.constexpr, RELATIVE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """b, t and skips of every member that is present, and the coefficients of its move."""
    row, there, live, stored, skips = rows
    span = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    first, count = tl.load(f + S_MEMBER), tl.load(f + S_MEMBERS)
    for j in range(0, count, WIDTH):
        m = members + (first + j + span) * M_WORDS
        listed = j + span < count
        present = listed & (tl.load(m + M_PRESENT, mask=listed, other=0) != 0)
        inside = there[:, None] & present
        bs = tl.load(m + M_B, mask=present, other=0).to(tl.pointer_type(tl.float32))
        before = tl.load(bs + row[:, None], mask=inside, other=1.0)  # of each its own
        tl.store(bs + row[:, None], new[:, None] + span * 0.0, mask=inside & stored[:, None])
        ts = tl.load(m + M_T, mask=present, other=0).to(tl.pointer_type(tl.float32))
        if METHOD >= RUNNING_MEAN:
            t = tl.load(ts + row[:, None], mask=inside, other=0.0) + live.to(tl.float32)[:, None]
            tl.store(ts + row[:, None], t, mask=inside)
        else:
            one = present & (row == 0)[:, None]
            t = tl.load(ts + row[:, None] * 0, mask=one, other=0.0) + tl.where(lam != 0, 1.0, 0.0)
            tl.store(ts + row[:, None] * 0, t, mask=one)
        if SKIP:
            counts = tl.load(m + M_SKIPPED, mask=present, other=0).to(tl.pointer_type(tl.int32))
            more = tl.load(counts + row[:, None], mask=inside, other=0) + 1
            tl.store(counts + row[:, None], more, mask=inside & skips[:, None])
        room = tl.load(m + M_ROOM, mask=present, other=0)
        spot = coefs + (room + row[:, None]) * 2
        rate = lam
        if RELATIVE:
            norms = tl.load(m + M_NORM, mask=present, other=0).to(tl.pointer_type(tl.float32))
            rate = lam * tl.load(norms, mask=present, other=0.0).to(tl.float64)
        coef, kept = coefficients(before, new[:, None], rate, mu, METHOD)
        tl.store(spot, coef + span * 0.0, mask=inside)
        tl.store(spot + 1, tl.where(live[:, None], kept, STAYS) + span * 0.0, mask=inside)
