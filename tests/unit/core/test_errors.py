"""Shared checks of whole numbers, close names and intervals; other checks are tried where they are used."""

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusal_tests, refusals

from megatron_rl_loss.core import errors


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
    ("name", "remedy"),
    [
        ("token_men", "Did you mean token_mean? Choose one of token_mean, sample-mean"),
        ("token-mean", "Did you mean token_mean? Choose one of token_mean, sample-mean"),
        ("SAMPLE_MEAN", "Did you mean sample-mean? Choose one of token_mean, sample-mean"),
        ("xyz", "Choose one of token_mean, sample-mean"),
        ("mean", "Choose one of token_mean, sample-mean"),  # it may be either
    ],
)
def test_a_close_name_is_proposed(name: str, remedy: str) -> None:
    assert errors.did_you_mean(name, ["token_mean", "sample-mean"]) == remedy


def test_a_part_of_several_names_is_not_the_shortest_of_them() -> None:
    assert errors.did_you_mean("mean", ["turn_mean", "sample_mean"]) == "Choose one of turn_mean, sample_mean"
    assert errors.did_you_mean("mean", ["turn_mean", "constant"]).startswith("Did you mean turn_mean?")


test_refusals = refusal_tests(
    refusals(
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
    )
)
