"""A plugin for pytest: the fixture `assert_exact`. Its entry point is declared in pyproject.toml.

Every pytest process of an environment that has this package imports this file, so it imports nothing else before the
fixture is used.
"""

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session", name="assert_exact")
def assert_exact_fixture() -> Callable[..., None]:
    """`megatron_rl_loss.assert_exact`."""
    from megatron_rl_loss.audit.assertion import assert_exact  # which imports torch

    return assert_exact
