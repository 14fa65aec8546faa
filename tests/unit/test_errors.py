"""The shared checks, each on the values around its edge; that places use them is tested beside those."""

from typing import Any

import numpy as np
import pytest
import torch
from refusals import Call, check_refusal, each_of, refusals

from megatron_rl_loss import errors


class NumpyLike:
    """NumPy's ints are no int, but have __index__."""

    def __index__(self) -> int:
        return 8

    def __repr__(self) -> str:
        return "NumpyLike()"  # without an address, which is another in every process that collects the tests


@pytest.mark.parametrize(
    ("value", "whole"),
    [
        (0, True), (-3, True), (np.int64(5), True), (NumpyLike(), True), (True, False), (1.0, False), ("1", False),
        (None, False), (torch.tensor(1), False),
    ],
    ids=repr,
)  # fmt: skip
def test_whole_numbers(value: Any, whole: bool) -> None:
    assert errors.is_int(value) is whole


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("token_men", "Did you mean token_mean? Choose one of token_mean, sample-mean"),
        ("token-mean", "Did you mean token_mean? Choose one of token_mean, sample-mean"),
        ("SAMPLE_MEAN", "Did you mean sample-mean? Choose one of token_mean, sample-mean"),
        ("xyz", "Choose one of token_mean, sample-mean"),
    ],
)
def test_a_close_name_is_proposed(given: str, said: str) -> None:
    assert errors.did_you_mean(given, ["token_mean", "sample-mean"]) == said


NO, YES = torch.tensor(False), torch.tensor(True)
REFUSALS = {
    **refusals(
        errors.check_int,
        (("size", 0, 1, "Pass one"), "size is 0: it must be an int >= 1. Pass one", ("size", 1, 1, "Pass one")),
        (("size", 1.5, 1, "Pass one"), "size is 1.5", ("size", np.int32(2), 1, "Pass one")),
    ),
    **refusals(errors.check_count, (("n", -1), "n is -1", ("n", 0.5))),
    **refusals(
        errors.check_within,
        *(
            (("clip", wrong, interval, "0.2 is usual"), said, ("clip", right, interval, "0.2 is usual"))
            for interval, wrong, said, right in (
                ("(0, 1]", 0, r"clip is 0: it must be a number in \(0, 1\]. 0.2 is usual", 1),
                ("(0, 1]", 1.01, "clip is 1.01", 1e-9),
                ("(0, 1]", float("nan"), "clip is nan", np.float32(0.5)),
                ("(0, 1]", True, "clip is True", 1),
                ("(0, 1]", "0.2", "clip is '0.2'", 0.2),
                ("(0, 1]", None, "clip is None", 0.2),
                ("(0, 1]", torch.ones(2), "clip is tensor", 0.2),
                ("[0, 2.0)", 2, "clip is 2", 0),
                ("(0, inf)", float("inf"), "clip is inf", 1e300),
            )
        ),
    ),
    **refusals(
        errors.check_choice,
        (
            ("colour", "rad", ["red", "blue"]),
            "colour 'rad': there is no such colour. Did you mean red[?] Choose one of red, blue",
            ("colour", "red", ["red", "blue"]),
        ),
    ),
    **refusals(
        errors.check_one_each,
        (
            ("ids", 2, "masks", 3),
            "2 ids for 3 masks: there must be one per sample. Pass both in order",
            ("ids", 3, "masks", 3),
        ),
    ),
    **refusals(
        errors.check_callable,
        (
            ("the hook", 3, "it must be a function", "Pass one"),
            "the hook is a int: it must be a function. Pass one",
            ("the hook", print, "it must be a function", "Pass one"),
        ),
        error=TypeError,
    ),
    **refusals(errors.check_cp, ((2, 2), r"cp_rank=2, cp_size=2.*Pass cp_group.rank\(\)", (1, 2))),
    **refusals(errors.check_cp, ((0, True), "cp_size=True", (0, 1)), error=TypeError),
    **refusals(
        errors.require,
        (
            (NO, lambda: "a mask of -1", "it must be 0 or 1. Mend it."),
            "a mask of -1: it must be 0 or 1. Mend it.",
            (YES, lambda: "", ""),
        ),
    ),
}


@each_of(REFUSALS)
def test_refusals(refused: Call, error: type[Exception], text: str, accepted: Call) -> None:
    check_refusal(refused, error, text, accepted)
