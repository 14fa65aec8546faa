"""The built-in modes as a table: a weight is mask / (D * U), with D tokens of the unit or the divisor, and U units."""

from typing import Literal, NamedTuple

from megatron_rl_loss.modes.names import NAMES, PeerName
from megatron_rl_loss.modes.table import Mode, find_mode

Unit = Literal["step", "rollout", "prompt"]


class ModeRow(NamedTuple):
    """The unit whose number is U, and what D is: the divisor, or mask tokens of the unit."""

    unit: Unit
    takes_divisor: bool = False


MODE_TABLE = {
    "sample_mean": ModeRow("rollout"),
    "prompt_mean": ModeRow("prompt"),
    "token_mean": ModeRow("step"),
    "constant": ModeRow("rollout", takes_divisor=True),
    "token_sum": ModeRow("step", takes_divisor=True),
}


def row_of(mode: Mode) -> ModeRow | None:
    """The row of a built-in mode; None of a user's own."""
    return MODE_TABLE[mode.name] if mode.name in MODE_TABLE and find_mode(mode.name) is mode else None


def peers_of(mode: str, *, refused: bool = False) -> list[PeerName]:
    """Other frameworks' names of a mode, or those that are refused and near it; without settings of their losses."""
    near = [peer for peer in NAMES if peer.mode == mode and bool(peer.refused) == refused]
    return [peer for peer in near if not peer.name.startswith("loss_mode=")]
