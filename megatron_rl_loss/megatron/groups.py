"""The process groups of a model."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

_NEEDED = ("tp", "pp", "cp", "dp", "dp_cp")


def groups_of(chunk: Any, of_user: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """The user's groups, else the model's own, else those of Megatron's parallel state.

    Raises ValueError for a collection that lacks one of the groups.
    """
    groups = of_user
    if groups is None:
        groups = getattr(unwrap_model(chunk), "pg_collection", None)
        # A model's own collection has the groups that its layers use: T5's has no data-parallel ones.
        if groups is None or any(getattr(groups, name, None) is None for name in _NEEDED):
            groups = ProcessGroupCollection.use_mpu_process_groups(list(_NEEDED))
    missing = [name for name in _NEEDED if getattr(groups, name, None) is None]
    if missing:
        raise ValueError(
            f"a ProcessGroupCollection without {', '.join(missing)}: the counts of a step are reduced over these "
            "groups. Set them in the collection."
        )
    return groups
