"""Likely reasons for a wrong number of values; loaded where values do not fit."""

from megatron_rl_loss.step.samples import Samples

#: Where samples without a layout have fewer mask entries than tokens.
MASKS_TOO_SHORT = (
    "The masks have fewer entries: if they are of responses alone, pass masks of whole samples, 0 at the prompt; if "
    "samples are padded, pass layout="
)


def layout_hint(num_values: int, num_local: int, samples: Samples) -> str:
    """The most likely reason for a wrong number of values."""
    if num_values == 1:
        return "Pass unreduced values, one per token"
    if num_values == num_local:
        return "The number of tokens fits: transpose to batch first if it is [s, b], or flatten in the layout's order"
    layout = samples.layout
    if layout is not None and num_values == layout.total_tokens:
        cut = "cut them with microbatch.local(...); if losses are not cut over CP ranks, the layout is Gathered"
        return f"These are all tokens of the micro-batch: {cut}"
    if num_values == sum(samples.mask_lengths):
        return "These are the unpadded, uncut tokens: cut and pad them as the layout says, or change the layout"
    if num_values == int(samples.active_tokens.sum()):
        return "These are the active tokens only: pass the losses of all positions, or ZigzagResponse for responses"
    if layout is not None and num_values and layout.total_tokens % num_values == 0:
        return f"These are 1/{layout.total_tokens // num_values} of the micro-batch: check that cp_size is right"
    if layout is None and num_values > num_local and num_local:
        return MASKS_TOO_SHORT
    if layout is None and num_values == sum(samples.mask_lengths) - len(samples):
        fewer = "each mask has one entry too many, since it goes with the labels: drop the entry of the first token"
        return f"If these are this micro-batch's values, {fewer}"
    if num_values == len(samples):
        return "These are one per sample: samples.in_buffer gives each token its sample's value"
    return "Pass the values of this micro-batch's tokens, cut as its layout says"
