"""What short replies leave for each other: much together, a little for each, and what they lost in advance is brought in."""

from __future__ import annotations

import pytest
from edgespec_runtime.chooser.account import (
    ADDED_STEPS,
    ASKED,
    CREDIT_SHARE,
    CREDIT_STEPS,
    KEPT_STEPS,
    LENGTHS,
    SURE_STEPS,
    USED_STEPS,
    Account,
    Limits,
)

STEP = 0.02
FRESH = CREDIT_SHARE * CREDIT_STEPS * STEP  # the credit of a reply that nothing was left for


def limits(account: Account) -> Limits:
    return account.limits(STEP, 0)


def reply(account: Account, lost: float, tokens: int = 10) -> None:
    """One that took as long as its tokens' plain steps and lost so many seconds."""
    account.take(tokens * STEP, lost)
    account.end_reply(tokens)
    account.settle(STEP)


def test_many_replies_keep_much_of_which_one_may_use_a_little() -> None:
    account = Account()
    for _ in range(3):
        reply(account, -100 * STEP)
    assert limits(account).credit == pytest.approx(FRESH + USED_STEPS * STEP)
    assert limits(account).reserve == pytest.approx(FRESH + KEPT_STEPS * STEP)
    assert limits(account).borrowed == pytest.approx(SURE_STEPS * STEP)


def test_one_reply_adds_so_much_at_most_and_one_that_lost_takes_it() -> None:
    account = Account()
    reply(account, -100 * STEP)
    assert limits(account).reserve == pytest.approx(FRESH + ADDED_STEPS * STEP)
    reply(account, 2 * STEP)
    share = CREDIT_SHARE * 10 * STEP
    assert limits(account).reserve == pytest.approx(FRESH + (ADDED_STEPS - 2) * STEP + share)


def test_debts_lower_the_credit_of_those_that_follow_until_they_are_brought_in() -> None:
    account = Account()
    reply(account, 1.5 * STEP)
    share = CREDIT_SHARE * 10 * STEP
    assert limits(account).credit == pytest.approx(FRESH - 1.5 * STEP + share)
    for _ in range(8):
        reply(account, 0.0)
    assert limits(account).credit == pytest.approx(FRESH - 1.5 * STEP + 9 * share)
    reply(account, 1000 * STEP)
    assert limits(account).reserve == pytest.approx(FRESH - KEPT_STEPS * STEP)


def test_long_replies_leave_nothing_and_owe_nothing() -> None:
    account = Account()
    reply(account, -50 * STEP)
    for _ in range(LENGTHS):
        reply(account, 3 * STEP, 200)
    assert not account.short
    asked = CREDIT_STEPS * ASKED  # in the plain steps of the next one, which short ones do not pay together
    assert limits(account).reserve == limits(account).credit == pytest.approx(FRESH - asked)


def test_replies_settled_together_leave_what_each_may() -> None:
    account = Account()
    account.take(20 * STEP, -100 * STEP)
    for _ in range(2):
        account.end_reply(10)
    account.settle(STEP)
    assert limits(account).reserve == pytest.approx(FRESH + 2 * ADDED_STEPS * STEP)
    assert account.unsettled == 0
