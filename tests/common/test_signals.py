"""Signals that end a process: none is lost, and none comes in the middle of another's work."""

from __future__ import annotations

import os
import signal

import pytest

from hkd_hpc.comm.control.base import Failure, NullControl
from hkd_hpc.common.stop import Terminated, Termination, interrupts_held


@pytest.fixture
def handlers():
    """Put back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_that_raises_counts_at_the_end_of_what_it_must_not_cut_off(handlers, number, raised):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, Termination())
    reached = []
    with pytest.raises(raised), interrupts_held():
        os.kill(os.getpid(), number)
        reached.append(number)
    assert reached == [number]


def test_a_handler_that_raises_nothing_is_not_held(handlers):
    came = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_end_that_a_finalizer_swallowed_comes_at_the_next_client(handlers):
    """Python prints what is raised in a finalizer, in a weak reference's or in HDF5's callback, and goes on."""

    class Finalized:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    control = NullControl()
    control.set_status(1, "training", 0)
    Finalized()
    with pytest.raises(Terminated):
        control.set_status(1, "training", 1)
    control.finish()


def test_a_second_signal_does_not_nest_in_what_the_first_gives_back(handlers):
    """A lock that is released twice by one thread would wait for itself."""
    nested, given_back = [], []
    signal.signal(signal.SIGINT, lambda number, frame: nested.append(number))
    control = NullControl()

    def give_back():
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        given_back.append(True)

    control.give_back_after_failure(give_back)
    control.report_failure(Failure("interrupted", 130))
    assert (given_back, nested) == ([True], [])
    os.kill(os.getpid(), signal.SIGINT)
    assert nested == [signal.SIGINT]  # what comes later means what it meant before
    control.finish()
