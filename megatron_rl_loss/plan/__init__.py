"""A step, planned before its first micro-batch: the denominators of the whole step, and its micro-batches with weights.

A carrier is the form in which a micro-batch returns its share, so that the trainer's own scaling cancels.
"""

from megatron_rl_loss import refuse_names

__getattr__ = refuse_names(__name__)
