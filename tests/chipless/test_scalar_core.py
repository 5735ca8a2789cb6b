"""The scalar core's arithmetic, and copies in time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.chipless.copies import GRANULE, Copies
from hybrid_kv.chipless.scalar import UNKNOWN_OPERATION, Address, compute, load_address

words = st.integers(-(2**31), 2**31 - 1)
NUMPY = {
    "sadd.s32": np.add,
    "ssub.s32": np.subtract,
    "smul.u32": np.multiply,
    "sand.u32": np.bitwise_and,
    "sor.u32": np.bitwise_or,
    "sxor.u32": np.bitwise_xor,
    "smin.s32": np.minimum,
    "smax.s32": np.maximum,
}


@given(x=words, y=words, operation=st.sampled_from(sorted(NUMPY)))
def test_integers_wrap_like_32_bit_machines(x, y, operation):
    with np.errstate(over="ignore"):
        assert compute(operation, [x, y]) == NUMPY[operation](np.int32(x), np.int32(y))


@given(x=words, y=words)
def test_comparisons_are_signed_or_unsigned_as_they_say(x, y):
    assert compute("scmp.lt.s32.totalorder", [x, y]) == (x < y)
    assert compute("scmp.ge.u32.totalorder", [x, y]) == (x % 2**32 >= y % 2**32)
    assert compute("smin.u32", [x, y]) % 2**32 == min(x % 2**32, y % 2**32)


@given(x=words, count=st.integers(0, 40))
def test_shifts_beyond_the_word_leave_nothing(x, count):
    assert compute("sshll.u32", [x, count]) % 2**32 == (x << count) % 2**32
    assert compute("sshrl.u32", [x, count]) % 2**32 == (x % 2**32) >> count
    assert compute("sshra.s32", [x, count]) == x >> count


def test_what_cannot_be_known_stays_unknown_unless_it_does_not_matter():
    assert compute("sadd.s32", [None, 1]) is None
    assert compute("smul.u32", [None, 0]) == 0
    assert compute("pand", [None, False]) is False and compute("pnand", [None, False]) is True
    assert compute("por", [None, True]) is True and compute("por", [None, False]) is None
    assert compute("scalar_select", [None, 3, 3]) == 3 and compute("scalar_select", [None, 3, 4]) is None
    assert compute("sfrob.s32", [1, 2]) is UNKNOWN_OPERATION


def test_addresses_keep_their_object():
    place = Address("a3", 16)
    assert compute("sadd.s32", [place, 4]) == Address("a3", 20)
    assert compute("scmp.lt.s32.totalorder", [place, Address("a3", 20)]) is True
    assert compute("scmp.lt.s32.totalorder", [place, Address("a4", 20)]) is None
    assert load_address([Address("a3", 16), 8, Address("a3", 0)]) == Address("a3", 24)
    assert load_address([Address("a3"), None]) is None


def test_copies_share_the_pipe_and_land_a_latency_later():
    copies = Copies(bytes_per_cycle=100, latency=50)
    copies.start("hbm_to_vmem", 1000, "in", now=0)
    copies.start("vmem_to_hbm", 1000, "out", now=10)
    duration = 1000 * GRANULE / 100
    assert copies.ready_at("in", 1000) == (duration + 50, True)
    assert copies.ready_at("out", 1000) == (2 * duration + 50, True)
    assert copies.ready_at("out", 1001)[1] is False
    assert copies.busy == 2 * duration and copies.hbm_bytes == 2000 * GRANULE
    copies.add("in", -600, now=400)
    assert copies.ready_at("in", 401)[1] is False
    assert copies.ready_at("in", 400) == (duration + 50, True)


@pytest.mark.parametrize("amount", [1, 7])
def test_a_semaphore_can_be_raised_and_cleared_by_the_program(amount):
    copies = Copies(bytes_per_cycle=100, latency=50)
    copies.add("flag", amount, now=3)
    assert copies.ready_at("flag", amount) == (3, True)
    copies.clear("flag")
    assert copies.ready_at("flag", 1) == (0, False)


@pytest.mark.parametrize(("direction", "far"), [("hbm_to_smem", True), ("general", True), ("vmem_to_smem", False)])
def test_copies_that_do_not_say_where_they_go_use_high_bandwidth_memory(direction, far):
    copies = Copies(bytes_per_cycle=100, latency=40)
    copies.start(direction, 100, "done", 0.0)
    assert copies.hbm_bytes == (100 * GRANULE if far else 0)
    assert copies.ready_at("done", 100) == (32 + 40 if far else 8 + 10, True)
