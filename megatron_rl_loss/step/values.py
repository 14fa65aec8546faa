"""Values of tokens, checked: one float for each token that a rank holds."""

from torch import Tensor

from megatron_rl_loss.step.samples import LocalTokens


def check_values(what: str, values: object, local: LocalTokens) -> None:
    """Validate values: one float for each token that a rank holds; `what` names the values in an error."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        if isinstance(getattr(values, "per_token_loss", None), Tensor):
            raise TypeError(
                f"{what} is a {type(values).__name__}: it must be a float tensor. Pass its .per_token_loss."
            )
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{what} is {kind}: it must be a float tensor. Pass one unreduced value per token.")
    if values.shape not in local.loss_shapes:
        from megatron_rl_loss.step.value_hints import layout_hint

        hint = layout_hint(values.numel(), len(local), local.samples)
        shown = " or ".join(map(str, local.loss_shapes))
        raise ValueError(f"{what} of shape {tuple(values.shape)}: this rank's part of the layout is {shown}. {hint}.")
