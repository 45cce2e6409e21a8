"""Flags between programs of different ranks: one program sets, one program waits. Used by the `nvlink` kernels.

A flag lies in the memory of the rank that waits, counts upwards without end (wrapping in int32), and has one writer.

Release. `signal` is a barrier of the program's threads, then one exchange with release order at system scope. What any
thread of the program stored before, on whichever device, is visible to whoever acquires the value.

Acquire. `await_signal` polls with acquire order at system scope, in one thread; the result reaches the other threads
through shared memory and a barrier. What they load afterwards is at least as new as what the flag's writer released.
What later kernels on the same stream load is too: the end of a kernel orders it.

Scalars. A scalar load is done by every thread of a program for itself, a scalar atomic or store by one thread for all.
Threads that read different values part ways and meet at the wrong barriers. So what changes while it is looked at
(flags, whether to give up) is read by atomics only, and a counter is stored behind a barrier that every thread reaches
after it has read it: `set_counter`.

A wait ends when the flag has come far enough, when `timeout_ns` have passed, or when another wait of this process was
given up before. Whoever gives up first leaves a note for the host; the clock is read once in `POLLS_PER_LOOK` polls.

Reference: the model of both kernels' flags in tests/kernels/test_nvlink_protocol.py.
"""

import triton
import triton.language as tl

DISPATCH = 1
COMBINE = 2

POLLS_PER_LOOK = tl.constexpr(256)
"""About 0.2 ms."""


@triton.jit
def signal(flag_ptr, value):
    """Set the flag to `value`, after everything that this program has stored."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="sys")


@triton.jit
def set_counter(counter_ptr, value):
    """Store a counter that this program alone uses and has read before."""
    tl.debug_barrier()
    tl.store(counter_ptr, value)


@triton.jit
def await_signal(
    flag_ptr,
    value,
    failure_ptr,  # [1] int32
    host_failure_ptr,  # [1] int64, on the host
    calls_ptr,  # [1] int32: for the note
    source,
    phase,
    timeout_ns,
):
    """Wait until the flag has reached `value`."""
    # A difference, not a comparison of the two: the counters wrap.
    waiting = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - value < 0
    polls = 0
    give_up_at = tl.full([], 0, tl.int64)
    while waiting:
        waiting = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - value < 0
        polls += 1
        if polls % POLLS_PER_LOOK == 0:
            now = tl.extra.cuda.globaltimer()
            give_up_at = tl.where(polls == POLLS_PER_LOOK, now + timeout_ns, give_up_at)
            late = now > give_up_at
            # Threads differ in what `late` is; the one that does the atomic decides, and all see it at the next look.
            given_up = tl.atomic_cas(failure_ptr, 0, tl.where(late, phase, 0), sem="relaxed", scope="gpu")
            _leave_note(host_failure_ptr, calls_ptr, source, phase, late & (given_up == 0))
            waiting = waiting & (given_up == 0)


@triton.jit
def _leave_note(host_failure_ptr, calls_ptr, source, phase, mask):
    """See `nvlink_memory.unpack_failure`. One store of 8 bytes, so that the host never sees half a note."""
    calls = tl.load(calls_ptr, volatile=True).to(tl.int64) & 0x7FFFFFFF
    where = (tl.full([], phase, tl.int64) << 48) | (tl.full([], source, tl.int64) << 32)
    tl.store(host_failure_ptr, where | calls, mask=mask)
